# SPDX-License-Identifier: Apache-2.0
"""The kernels of KDA with their compile-time arguments, by configuration, sizes and transforms."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cptransport_kernels.common import GATE_BOUNDED, GATE_GIVEN, GATE_SOFTPLUS
from cptransport_kernels.configs import KDAConfig, Tile
from cptransport_kernels.kda_backward import kda_backward_pass_kernel, kda_entering_grad_kernel
from cptransport_kernels.kda_chunk_backward import (
    kda_chunk_backward_kernel,
    kda_finish_grads_kernel,
    kda_pair_backward_kernel,
)
from cptransport_kernels.kda_forward import kda_correct_kernel, kda_forward_pass_kernel
from cptransport_kernels.kda_prepare import kda_prepare_kernel, kda_remake_kernel
from cptransport_kernels.launch import Bound, bind, interpreted

__all__ = ["KDAKernels", "Transforms", "kda_kernels"]


@dataclass(frozen=True)
class Transforms:
    """What is applied to the inputs inside the kernels; meanings as in the op's options."""

    scale: float
    l2norm: bool = False
    gate: bool = False
    lower_bound: float | None = None
    beta_sigmoid: bool = False
    beta_scale: float = 1.0

    @property
    def gate_mode(self) -> int:
        """The gate's formula, see ``common``."""
        if not self.gate:
            return GATE_GIVEN.value
        return (GATE_SOFTPLUS if self.lower_bound is None else GATE_BOUNDED).value


class KDAKernels:
    """What runs for one configuration.

    Args:
        config: see there.
        transforms: see there.
        key_dim, value_dim: K and V.
        grouped: whether several value heads read one query head.

    Attributes:
        prepare, remake, pair_grad, finish: kernels.
        walk: by whether any piece is not seeded, the kernel and its number of column blocks.
        correct, back_walk: by whether states come in one row per segment, the same.
        entering_grad, chunk_grad: the kernel and its number of blocks.
        by_heads: whether gradients of q and k are summed, or go through the l2norm, in ``finish``.
    """

    def __init__(
        self,
        config: KDAConfig,
        transforms: Transforms,
        key_dim: int,
        value_dim: int,
        *,
        grouped: bool,
    ) -> None:
        self.config = config
        self.transforms = transforms
        self.key_dim = key_dim
        self.value_dim = value_dim
        self.by_heads = grouped or transforms.l2norm
        # The interpreter's products are exact, and it knows no other.
        solve = "ieee" if interpreted() else config.solve_precision
        precision: dict[str, Any] = {"PREC": "ieee" if interpreted() else config.precision}
        sizes: dict[str, Any] = {"K": key_dim, "V": value_dim, "BT": config.chunk}
        beta = {"BETA_SIGMOID": transforms.beta_sigmoid, "BETA_SCALE": transforms.beta_scale}
        inside = {"GATE": transforms.gate_mode, "L2NORM": transforms.l2norm, **beta}
        tree = {"LEVELS": config.levels, **inside}

        tile = config.prepare
        blocks = {"BK": min(tile.block, key_dim), "BV": min(tile.block, value_dim)}
        self.prepare = _bind(
            kda_prepare_kernel, tile, **sizes, **blocks, **tree, **precision, PREC_SOLVE=solve
        )
        tile = config.remake
        blocks = {"BK": min(tile.block, key_dim), "BV": min(tile.block, value_dim)}
        self.remake = _bind(kda_remake_kernel, tile, **sizes, **blocks, **inside, **precision)

        tile = config.walk
        columns = min(tile.block, key_dim, value_dim)
        self.walk: list[tuple[Bound, int]] = []
        for width in (value_dim, value_dim + key_dim):
            block = {"BC": columns, "NCOL": width // columns}
            kernel = _bind(kda_forward_pass_kernel, tile, **sizes, **block, **precision)
            self.walk.append((kernel, width // columns))
        self.correct = _by_segment(
            kda_correct_kernel, config.correct, "BV", sizes, precision, value_dim
        )
        self.back_walk = _by_segment(
            kda_backward_pass_kernel, config.back_walk, "BC", sizes, precision, value_dim
        )

        tile = config.enter
        blocks = {"BK": min(64, key_dim), "BV": min(tile.block, value_dim)}
        self.entering_grad = (
            _bind(kda_entering_grad_kernel, tile, **sizes, **blocks, **precision),
            key_dim // blocks["BK"] * (value_dim // blocks["BV"]),
        )
        tile = config.pair_grad
        self.pair_grad = _bind(
            kda_pair_backward_kernel,
            tile,
            V=value_dim,
            BT=config.chunk,
            BV=min(tile.block, value_dim),
            **beta,
            **precision,
        )
        tile = config.chunk_grad
        blocks = {"BK": min(tile.block, key_dim), "BV": min(tile.block, value_dim)}
        parts = key_dim // blocks["BK"]
        self.chunk_grad = (
            _bind(kda_chunk_backward_kernel, tile, **sizes, **blocks, **tree, **precision),
            parts,
        )
        self.finish = _bind(
            kda_finish_grads_kernel,
            config.finish,
            K=key_dim,
            BT=config.chunk,
            PARTS=parts + 1,
            HEADS=self.by_heads,
            L2NORM=transforms.l2norm,
            **beta,
        )


@lru_cache(maxsize=256)
def kda_kernels(
    config: KDAConfig, transforms: Transforms, key_dim: int, value_dim: int, grouped: bool
) -> KDAKernels:
    """Return the kernels of these, the same object every time."""
    return KDAKernels(config, transforms, key_dim, value_dim, grouped=grouped)


def _bind(kernel: Any, tile: Tile, **constants: Any) -> Bound:
    return bind(kernel, **constants, num_warps=tile.warps, num_stages=tile.stages)


def _by_segment(
    kernel: Any,
    tile: Tile,
    name: str,
    sizes: dict[str, Any],
    precision: dict[str, Any],
    value_dim: int,
) -> list[tuple[Bound, int]]:
    """Bind a kernel for states in one row per piece and per segment, with its column blocks."""
    columns = min(tile.block, value_dim)
    return [
        (
            _bind(kernel, tile, **sizes, **{name: columns}, BY_SEGMENT=by_segment, **precision),
            value_dim // columns,
        )
        for by_segment in (False, True)
    ]
