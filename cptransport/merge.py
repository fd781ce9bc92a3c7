# SPDX-License-Identifier: Apache-2.0
"""Folding what gathers brought: one kernel out of the address tables where there is one, plain torch elsewhere.

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
from cptransport.same import Same
from cptransport.summary import advance, compose, exactly
from cptransport.transport import Gathered

__all__ = ["compose_gathered", "fold_gathered"]

_KERNEL_DIMS = frozenset({16, 32, 64, 128, 256})


def fold_gathered(
    op: str,
    direction: str,
    layout: str,
    batch: int,
    folds: tuple[Fold, ...],
    gathered: Sequence[Gathered],
    table: Tensor,
) -> None:
    """Fold sources into states: those that enter segments, or those of windows.

    Args:
        op: ``"kda"`` or ``"ssd"``. direction: ``"forward"`` or ``"backward"``.
        layout: of the tables, ``"k_major"`` or ``"v_major"``.
        batch: B.
        folds: of this rank's segments, see ``composition``.
        gathered: by round, the parts ``state`` and, where a fold has two sources, ``transition``.
        table: ``[R, ...]`` states; the rows of the folds' targets are overwritten.

    Stream: runs on the current stream.
    """
    if not folds:
        return
    if _kernel_serves(op, table):
        _by_kernel(op, "state", direction, layout, batch, folds, gathered, table)
        return
    step = advance(op, direction, layout)
    with exactly(op, table.device.type):
        for fold in folds:
            first, *others = fold.sources
            state = _take(gathered, "state", first, batch)
            entered = _rows(table, fold.target.row, batch)
            if not others:
                entered.copy_(state)
            for source in others:
                state = step(
                    _take(gathered, "transition", source, batch),
                    state,
                    _take(gathered, "state", source, batch),
                    out=entered if source is others[-1] else None,
                )


def compose_gathered(
    op: str,
    direction: str,
    layout: str,
    batch: int,
    folds: tuple[Fold, ...],
    gathered: Sequence[Gathered],
    table: Tensor,
) -> None:
    """Compose the transitions of each fold's two sources; arguments as ``fold_gathered``, the table of transitions."""
    if not folds:
        return
    if _kernel_serves(op, table):
        _by_kernel(op, "transition", direction, layout, batch, folds, gathered, table)
        return
    product = compose(op, direction, layout)
    with exactly(op, table.device.type):
        for fold in folds:
            earlier, later = (_take(gathered, "transition", s, batch) for s in fold.sources)
            _rows(table, fold.target.row, batch).copy_(product(later, earlier))


def _take(gathered: Sequence[Gathered], part: str, source: Source, batch: int) -> Tensor:
    return _rows(gathered[source.round].tensor(part, source.rank), source.row, batch)


def _rows(table: Tensor, row: int, batch: int) -> Tensor:
    """Rows of a table that belong to a segment: mostly all, and a view of them costs as much as a launch."""
    return table if table.shape[0] == batch else table[row * batch : (row + 1) * batch]


def _kernel_serves(op: str, table: Tensor) -> bool:
    if not table.is_cuda or table.dtype != torch.float32 or not _has_triton():
        return False
    if op == "kda":
        return {*table.shape[2:]} <= _KERNEL_DIMS
    return table.dim() == 4  # SSD's transitions are numbers, whose products are sums


@lru_cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _by_kernel(
    op: str,
    what: str,
    direction: str,
    layout: str,
    batch: int,
    folds: tuple[Fold, ...],
    gathered: Sequence[Gathered],
    table: Tensor,
) -> None:
    """Run the kernel; ``what`` is ``"state"`` or ``"transition"``.

    A product of transitions is a fold whose state is a transition.
    """
    from cptransport_kernels.fold import fold
    from cptransport_kernels.ssd_fold import ssd_fold

    world_size = len(gathered[0]["state"])
    rounds, steps = _steps(Same(folds), world_size, table.device, what, direction)
    transitions = _addresses(gathered, rounds, "transition")
    states = transitions if what == "transition" else _addresses(gathered, rounds, "state")
    assert states is not None
    # SSD's transitions are read one by one.
    wide = ("state",) if op == "ssd" else ("state", "transition")
    arrived = [gathered[index] for index in rounds]
    aligned = all(g.aligned(part) for g in arrived for part in wide if part in g.addresses)
    # Known states are copied as they lie, whatever the op.
    if op == "ssd" or (what == "state" and all(len(fold.sources) == 1 for fold in folds)):
        ssd_fold(steps, states, transitions, batch=batch, out=table, aligned=aligned)
        return
    v_major = layout == "v_major"
    heads, a, b = table.shape[1:]
    fold(
        steps,
        states,
        transitions,
        shape=(heads, b, a) if v_major else (heads, a, b),
        batch=batch,
        out=table,
        v_major=v_major,
        transposed=what == "state" and direction == "backward",
        aligned=aligned,
        linked=any(g.linked for g in arrived),
    )


def _addresses(gathered: Sequence[Gathered], rounds: tuple[int, ...], part: str) -> Tensor | None:
    """Return int64 ``[rounds * world_size]`` addresses of a part; None if no round has it."""
    tables = [gathered[index].addresses.get(part) for index in rounds]
    present = [table for table in tables if table is not None]
    if len(tables) <= 1 or not present:
        return tables[0]
    # Whose round lacks the part is never asked for it.
    return torch.cat([present[0] if table is None else table for table in tables])


@lru_cache(maxsize=512)
def _steps(
    folds: Same, world_size: int, device: torch.device, what: str, direction: str
) -> tuple[tuple[int, ...], Any]:
    """Return the rounds that folds read, and the kernel's table of steps, uploaded once.

    The kernel's tables of addresses have those of the rounds one after the other.
    """
    from cptransport_kernels.fold import FoldSteps

    many: tuple[Fold, ...] = folds.it
    rounds = tuple(sorted({source.round for fold in many for source in fold.sources}))

    def place(source: Source) -> int:
        return rounds.index(source.round) * world_size + source.rank

    def of_state(fold: Fold) -> list[tuple[int, int, int, int]]:
        return [
            (place(source), source.row, source.row if index else -1, -1)
            for index, source in enumerate(fold.sources)
        ]

    def of_transition(fold: Fold) -> list[tuple[int, int, int, int]]:
        # ``later @ earlier``, or ``earlier @ later`` in the backward: see ``summary``.
        right, left = fold.sources if direction == "forward" else fold.sources[::-1]
        return [(place(right), right.row, -1, -1), (place(left), -1, left.row, -1)]

    row = of_state if what == "state" else of_transition
    rows = [row(fold) for fold in many]
    return rounds, FoldSteps(rows, device, results=[fold.target.row for fold in many])
