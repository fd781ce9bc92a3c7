# SPDX-License-Identifier: Apache-2.0
"""Pinned configurations of the SSD kernels, as ``configs`` has KDA's.

Those of bfloat16 at headdim 64 and dstate 128 are measured on an H200 (1024, 4096 and 16384 tokens of
64 heads): 8 warps take 1.3 to 1.7 times as long, chunks of 32 or 128 tokens 1.1 to 1.6 times. The
others are chosen by what fits registers and shared memory of sm_90.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Run", "SSDConfig", "ssd_config", "ssd_piece_tokens", "ssd_splits"]


class Run(NamedTuple):
    """Launch options of one kernel."""

    warps: int
    stages: int


@dataclass(frozen=True)
class SSDConfig:
    """How SSD's kernels run for one arithmetic and state size.

    Attributes:
        dtype: of matrix operands and of what passes between kernels.
        precision: ``input_precision`` of products of float32 operands.
        chunk: tokens per chunk, a power of two up to 128.
        channels: channels of a block of a head.
        columns: dstate rounded up to a block.
        summary, scores, output, states, pair_grads, write_grads, read_grads: per kernel.
    """

    dtype: torch.dtype
    precision: str
    chunk: int
    channels: int
    columns: int
    summary: Run
    scores: Run
    output: Run
    states: Run
    pair_grads: Run
    write_grads: Run
    read_grads: Run


#: Pieces shorter than this are not worth their scan.
_MIN_PIECE_CHUNKS = 4


def ssd_config(input_dtype: torch.dtype, headdim: int, dstate: int) -> SSDConfig:
    """Return the configuration for x, B, C of this dtype; arithmetic as in ``kda_config``.

    Blocks are masked, not padded in memory. None of bfloat16 is narrower than 64, for the reason
    that ``configs.HEAD_DIMS`` gives.
    """
    bf16 = input_dtype == torch.bfloat16
    least = 64 if bf16 else 16

    def block(size: int, most: int) -> int:
        return min(most, max(least, 1 << (size - 1).bit_length()))

    columns = block(dstate, 256)
    wide = columns > 128
    channels = block(headdim, 64 if bf16 or not wide else 32)
    if bf16:
        warps = 8 if wide else 4
        return SSDConfig(
            dtype=torch.bfloat16,
            precision="tf32",
            chunk=32 if wide else 64,
            channels=channels,
            columns=columns,
            summary=Run(warps, 2 if wide else 3),
            scores=Run(4, 1),
            output=Run(warps, 2),
            states=Run(warps, 2),
            pair_grads=Run(warps, 2),
            write_grads=Run(warps, 2),
            read_grads=Run(warps, 2 if wide or headdim > 64 else 3),
        )
    precise = input_dtype == torch.float32
    return SSDConfig(
        dtype=torch.float32,
        precision="tf32x3" if precise else "tf32",
        # Operands of whole rows are in registers here.
        chunk=16 if columns > (64 if precise else 128) else 32,
        channels=channels,
        columns=columns,
        summary=Run(8, 1),
        scores=Run(8, 1),
        output=Run(8, 1),
        states=Run(8, 1),
        pair_grads=Run(8, 1),
        write_grads=Run(8, 1),
        read_grads=Run(8, 1),
    )


def ssd_piece_tokens(
    num_tokens: int, segments: int, rows: int, headdim: int, config: SSDConfig, num_processors: int
) -> int:
    """Return the length at which segments are cut so that the walks of one rank fill the GPU.

    Args:
        num_tokens: T, the rank's rows.
        segments: of the rank.
        rows: batch rows times heads.
        headdim: P.
        config: of the call.
        num_processors: of the GPU; each should have two walks: more of them cost more in the scan
            that joins pieces than they gain.
    """
    walks = rows * -(-headdim // config.channels) * max(1, segments)
    wanted = max(1, 2 * num_processors // max(1, walks))
    chunks = -(-num_tokens // config.chunk)
    return config.chunk * max(_MIN_PIECE_CHUNKS, -(-chunks // wanted))


def ssd_splits(chunks: int, groups: int, heads: int, num_processors: int) -> int:
    """Return into how many programs the heads of a group go where gradients are summed over them.

    Args:
        chunks: of the rank.
        groups: batch rows times groups.
        heads: of a group.
        num_processors: of the GPU; one program each is enough: parts must be summed, too.
    """
    wanted = -(-num_processors // max(1, chunks * groups))
    per_program = -(-heads // min(heads, wanted))
    return -(-heads // per_program)
