# SPDX-License-Identifier: Apache-2.0
"""Pinned kernel configurations: no timing at run time, so every rank runs the same code.

Those of bfloat16 at K = V = 128 were chosen by the profiler's kernel times on one H200 (Triton 3.6,
November 2026) at 2048 x 16 and 1024 x 8 tokens x heads; all others were only checked for results.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

__all__ = [
    "HEAD_DIMS",
    "ConvConfig",
    "KDAConfig",
    "conv_config",
    "head_dims",
    "kda_config",
    "piece_tokens",
]

#: Key and value sizes the kernels are written for; others are padded.
HEAD_DIMS = (64, 128, 256)
#: And where no product is wide enough for Hopper's warp group instructions.
NARROW_HEAD_DIMS = (16, 32, *HEAD_DIMS)


def head_dims(input_dtypes: tuple[torch.dtype, ...], key_dim: int) -> tuple[int, ...]:
    """Return the key and value sizes that serve q, k, v of these dtypes and K.

    bfloat16 has none below 64: with chunks of 64 tokens, Triton 3.6 was seen to compile products
    with 16 and 32 columns to wrong results and out-of-range shared addresses on sm_90. Others
    reported such addresses from 3.6 to 3.7.1, for kernels of several products and blocks of 32,
    and none with 3.5.1 (github.com/triton-lang/triton, issues 10486 and 11366). With chunks of 32
    tokens and K below 64 every product has at most 32 rows, and is compiled to the instructions of
    sm_80.
    """
    narrow = key_dim <= 32 and any(dtype != torch.bfloat16 for dtype in input_dtypes)
    return NARROW_HEAD_DIMS if narrow else HEAD_DIMS


@dataclass(frozen=True)
class Tile:
    """Block sizes and launch options of one kernel."""

    block: int
    warps: int
    stages: int


@dataclass(frozen=True)
class KDAConfig:
    """How KDA's kernels run for one arithmetic and head size.

    Attributes:
        dtype: of matrix operands and of what passes between kernels.
        precision, solve_precision: ``input_precision`` of products of float32 operands; of the
            triangular solve.
        chunk: tokens per chunk, a power of two.
        prepare, remake, walk, back_walk, correct, enter, pair_grad, chunk_grad, finish: per kernel.
            ``block`` is the block of channels, or of state columns.
    """

    dtype: torch.dtype
    precision: str
    solve_precision: str
    chunk: int
    prepare: Tile
    remake: Tile
    walk: Tile
    back_walk: Tile
    correct: Tile
    enter: Tile
    pair_grad: Tile
    chunk_grad: Tile
    finish: Tile

    @property
    def levels(self) -> int:
        """Depth of the tree over a chunk."""
        return self.chunk.bit_length() - 1


def kda_config(input_dtypes: tuple[torch.dtype, ...], key_dim: int, value_dim: int) -> KDAConfig:
    """Return the configuration for q, k, v of these dtypes.

    bfloat16 inputs use bfloat16 operands. float16 inputs use tf32 operands, which have float16's
    precision and do not overflow
    on states. With any float32 input products are three-pass tf32.
    """
    largest = max(key_dim, value_dim)
    if all(dtype == torch.bfloat16 for dtype in input_dtypes):
        small = largest <= 128
        return KDAConfig(
            dtype=torch.bfloat16,
            precision="tf32",
            solve_precision="tf32",
            chunk=64 if small else 32,
            prepare=Tile(64, 4, 1),
            remake=Tile(64, 8, 1),
            walk=Tile(32, 4, 3 if small else 2),
            back_walk=Tile(32, 4, 3 if small else 2),
            correct=Tile(64, 4, 1),
            enter=Tile(32, 4, 4),
            pair_grad=Tile(64, 4, 1),
            chunk_grad=Tile(64, 8, 1),
            finish=Tile(64, 4, 1),
        )
    precise = any(dtype == torch.float32 for dtype in input_dtypes)
    precision = "tf32x3" if precise else "tf32"
    return KDAConfig(
        dtype=torch.float32,
        precision=precision,
        solve_precision=precision,
        chunk=32,
        prepare=Tile(32, 4, 1),
        remake=Tile(32, 4, 1),
        walk=Tile(32 if largest <= 128 else 16, 4, 1),
        back_walk=Tile(32 if largest <= 128 else 16, 4, 1),
        correct=Tile(32, 8, 1),
        enter=Tile(32, 4, 1),
        pair_grad=Tile(32, 4, 1),
        chunk_grad=Tile(32, 4, 1),
        finish=Tile(32, 4, 1),
    )


def piece_tokens(
    num_tokens: int, segments: int, heads: int, value_dim: int, config: KDAConfig, processors: int
) -> int:
    """Return the length at which segments are cut so that a walk of one rank fills the GPU.

    Cutting costs a fold and, where a segment was seeded, the columns of its transition: it pays
    only for long spans that leave most of the ``processors`` idle.
    """
    columns = max(1, value_dim // min(config.walk.block, value_dim)) * 2
    walkers = max(1, heads * columns * max(1, segments))
    chunks = -(-num_tokens // config.chunk)
    # Under a quarter of the GPU busy, and pieces long enough to be worth their fold.
    wanted = processors // walkers if 4 * walkers <= processors else 1
    return config.chunk * max(16, -(-chunks // wanted))


@dataclass(frozen=True)
class ConvTile:
    """Tokens and channels of one program, and its warps."""

    tokens: int
    channels: int
    warps: int


@dataclass(frozen=True)
class ConvConfig:
    """How the kernels of a causal convolution run; not measured yet.

    Attributes:
        walk: the backward keeps the last W inputs and gradients in registers.
        span: tokens of one program of the backward, at least W - 1 where it walks.
        forward, backward, rows, reduce: per kernel. The backward's tokens are those of one step.
    """

    walk: bool
    span: int
    forward: ConvTile
    backward: ConvTile
    rows: ConvTile
    reduce: ConvTile


@lru_cache
def conv_config(width: int) -> ConvConfig:
    """Return the configuration for a convolution of W taps."""
    walk = width <= 8
    return ConvConfig(
        walk=walk,
        span=64,
        forward=ConvTile(32, 128, 8),
        # The walk's registers grow with W, the channels of a thread and the tokens of a step.
        backward=ConvTile(8, 256 if width <= 4 else 128, 2) if walk else ConvTile(32, 64, 4),
        rows=ConvTile(4, 256, 4),
        reduce=ConvTile(32, 64, 4),
    )
