# SPDX-License-Identifier: Apache-2.0
"""Folding what a gather brought: one kernel out of the address table where there is one, plain torch elsewhere.

Both compute the same fold; which one runs depends on op, device, dtype and sizes only, so it is the
same on every rank and for every transport.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cptransport.composition import Fold, Source
from cptransport.precision import ieee_math
from cptransport.summary import advance
from cptransport.transport import Gathered

__all__ = ["fold_gathered"]

_KERNEL_DIMS = frozenset({16, 32, 64, 128, 256})


def fold_gathered(
    op: str,
    direction: str,
    layout: str,
    batch: int,
    folds: tuple[Fold, ...],
    gathered: Gathered,
    table: Tensor,
) -> None:
    """Fold every segment's sources into the state that enters it.

    Args:
        op: ``"kda"`` or ``"ssd"``. direction: ``"forward"`` or ``"backward"``.
        layout: of the tables, ``"k_major"`` or ``"v_major"``.
        batch: B.
        folds: of this rank's segments, see ``composition``.
        gathered: the parts ``state`` and, where a fold has two sources, ``transition``.
        table: ``[R, ...]``; the rows of the folds' targets are overwritten.

    Stream: runs on the current stream.
    """
    if not folds:
        return
    if _kernel_serves(op, layout, table):
        _by_kernel(direction, batch, folds, gathered, table)
        return
    step = advance(op, direction, layout)

    def take(part: str, source: Source) -> Tensor:
        rows = slice(source.row * batch, (source.row + 1) * batch)
        return gathered.tensor(part, source.rank)[rows]

    with ieee_math(table.device.type):
        for fold in folds:
            first, *others = fold.sources
            state = take("state", first)
            for source in others:
                state = step(take("transition", source), state, take("state", source))
            table[fold.target.row * batch : (fold.target.row + 1) * batch] = state


def _kernel_serves(op: str, layout: str, table: Tensor) -> bool:
    return (
        op == "kda"
        and layout == "k_major"
        and table.is_cuda
        and table.dtype == torch.float32
        and {*table.shape[2:]} <= _KERNEL_DIMS
        and find_spec("triton") is not None
    )


def _by_kernel(
    direction: str, batch: int, folds: tuple[Fold, ...], gathered: Gathered, table: Tensor
) -> None:
    from cptransport_kernels.fold import fold

    addresses = gathered.addresses
    fold(
        _steps(folds, table.device),
        addresses["state"],
        addresses.get("transition"),
        shape=(table.shape[1], table.shape[2], table.shape[3]),
        batch=batch,
        out=table,
        transposed=direction == "backward",
    )


@lru_cache(maxsize=256)
def _steps(folds: tuple[Fold, ...], device: torch.device) -> Any:
    """The kernel's table of steps, uploaded once."""
    from cptransport_kernels.fold import FoldSteps

    rows: list[Sequence[tuple[int, int, int, int]]] = []
    for fold in folds:
        first, *others = fold.sources
        rows.append(
            [
                (first.rank, first.row, -1, -1),
                *((source.rank, source.row, source.row, -1) for source in others),
            ]
        )
    return FoldSteps(rows, device, results=[fold.target.row for fold in folds])
