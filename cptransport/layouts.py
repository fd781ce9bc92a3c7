# SPDX-License-Identifier: Apache-2.0
"""Layouts: which rank owns which rows of the global stream.

A layout is a list of *runs* ``(rank, start, stop)`` that covers the stream once. Knows rows and
where sequences start, nothing of tokens, padding or tensors; ``plan.py`` cuts the runs into
segments. "Cut in n pieces" means: piece i has ``floor(length / n) + (i < length mod n)`` rows.

=========================  ==================================================================
layout                     rank r of P owns
=========================  ==================================================================
contiguous                 piece r of P of the stream, or rows ``boundaries[r]:boundaries[r+1]``
contiguous_per_sequence    piece r of P of every sequence
zigzag                     pieces r and 2P-1-r of 2P of the stream
zigzag_per_sequence        pieces r and 2P-1-r of 2P of every sequence
custom                     what ``boundaries=[(rank, start, stop), ...]`` says
=========================  ==================================================================
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from itertools import pairwise
from numbers import Integral
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from cptransport.errors import PlanError

__all__ = [
    "LAYOUTS",
    "Boundaries",
    "Run",
    "as_boundaries",
    "as_integer",
    "as_offsets",
    "assign_rows",
    "check_layout",
]

LAYOUTS = ("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence", "custom")

_INT64_MAX = 2**63 - 1


class Run(NamedTuple):
    """Adjacent rows of the stream on one rank, ``start <= row < stop``."""

    rank: int
    start: int
    stop: int


#: Normalised ``boundaries``: offsets for ``contiguous``, runs for ``custom``.
Boundaries = tuple[int, ...] | tuple[Run, ...]


def check_layout(layout: object) -> str:
    """Return the layout's name.

    Raises:
        PlanError: unknown; the message lists the valid names and suggests the nearest.
    """
    if isinstance(layout, str) and layout in LAYOUTS:
        return layout
    near = difflib.get_close_matches(layout.lower() if isinstance(layout, str) else "", LAYOUTS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PlanError(f"unknown layout {_show(layout)}; valid layouts: {', '.join(LAYOUTS)}{hint}")


def as_integer(value: object, what: str) -> int:
    """Return a Python int; numpy's integers count, bools, floats, strings and tensors do not.

    Raises:
        PlanError: not an integer, or outside int64.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise PlanError(f"{what} must be an integer, got {_show(value)}")
    number = int(value)
    if abs(number) > _INT64_MAX:
        raise PlanError(f"{what} does not fit in 64 bits: {number}")
    return number


def as_offsets(values: object, what: str) -> tuple[int, ...]:
    """Return offsets as a tuple: at least two, from 0, non-decreasing.

    Args:
        values: a sequence of integers, or a one-dimensional int32 or int64 tensor on any device
            (read on the host).
        what: the argument's name, for messages.

    Raises:
        PlanError: malformed; the message is a function of the values alone.
    """
    offsets = tuple(
        as_integer(value, f"{what}[{i}]") for i, value in enumerate(_elements(values, what))
    )
    if len(offsets) < 2:
        raise PlanError(f"{what} needs at least two offsets (0 and the end), got {len(offsets)}")
    if offsets[0] != 0:
        raise PlanError(f"{what} must start at 0, got {offsets[0]}")
    for i in range(1, len(offsets)):
        if offsets[i] < offsets[i - 1]:
            raise PlanError(
                f"{what} must not decrease, got {offsets[i]} at position {i} after {offsets[i - 1]}"
            )
    return offsets


def as_boundaries(layout: str, boundaries: object) -> Boundaries | None:
    """Return boundaries as offsets (``contiguous``) or as runs in the order given (``custom``).

    Raises:
        PlanError: malformed, missing for ``custom``, or given for a layout that takes none.
    """
    if boundaries is None:
        if layout == "custom":
            raise PlanError("layout 'custom' needs boundaries=[(rank, start, stop), ...]")
        return None
    if layout == "contiguous":
        return as_offsets(boundaries, "boundaries")
    if layout != "custom":
        raise PlanError(f"layout {layout!r} takes no boundaries; only 'contiguous' and 'custom' do")
    pieces = _elements(boundaries, "boundaries", dim=2)
    return tuple(_as_run(piece, f"boundaries[{i}]") for i, piece in enumerate(pieces))


def _as_run(piece: object, what: str) -> Run:
    if not isinstance(piece, Sequence) or isinstance(piece, (str, bytes)) or len(piece) != 3:
        raise PlanError(f"{what} of a custom layout must be (rank, start, stop)")
    rank, start, stop = piece
    return Run(
        as_integer(rank, f"rank of {what}"),
        as_integer(start, f"start of {what}"),
        as_integer(stop, f"stop of {what}"),
    )


def assign_rows(
    layout: str, starts: Sequence[int], world_size: int, boundaries: Boundaries | None
) -> tuple[Run, ...]:
    """Return who owns which rows: non-empty runs in stream order, touching runs of one rank merged.

    Args:
        layout: one of ``LAYOUTS``.
        starts: N+1 rows where sequences start in the stream; the last is the number of rows T.
        world_size: number of ranks P.
        boundaries: as ``as_boundaries`` returns them.

    Raises:
        PlanError: boundaries that do not cover every row once, or name no rank.
    """
    total = starts[-1]
    if layout == "custom":
        return _merged(_covering(cast("tuple[Run, ...]", boundaries), total, world_size))
    if boundaries is not None:
        return _merged(_between(cast("tuple[int, ...]", boundaries), total, world_size))
    extents = pairwise(starts) if layout.endswith("per_sequence") else [(0, total)]
    ranks = [*range(world_size)]
    if layout.startswith("zigzag"):
        ranks += ranks[::-1]
    return _merged(run for start, stop in extents for run in _cut(start, stop, ranks))


def _cut(start: int, stop: int, ranks: Sequence[int]) -> Iterable[Run]:
    """Cut rows ``start:stop`` in ``len(ranks)`` pieces, the i-th for ``ranks[i]``."""
    size, larger = divmod(stop - start, len(ranks))
    for i, rank in enumerate(ranks):
        end = start + size + (i < larger)
        yield Run(rank, start, end)
        start = end


def _between(offsets: Sequence[int], total: int, world_size: int) -> Iterable[Run]:
    if len(offsets) != world_size + 1:
        raise PlanError(
            f"boundaries of a contiguous layout need world_size + 1 = {world_size + 1} offsets, "
            f"got {len(offsets)}"
        )
    if offsets[-1] != total:
        raise PlanError(f"boundaries must end at the number of rows {total}, got {offsets[-1]}")
    return (Run(rank, offsets[rank], offsets[rank + 1]) for rank in range(world_size))


def _covering(pieces: Sequence[Run], total: int, world_size: int) -> Iterable[Run]:
    for i, (rank, start, stop) in enumerate(pieces):
        if not 0 <= rank < world_size:
            raise PlanError(f"boundaries[{i}]: rank {rank} is outside 0..{world_size - 1}")
        if not 0 <= start <= stop <= total:
            raise PlanError(
                f"boundaries[{i}]: rows {start}:{stop} do not lie in order within 0:{total}"
            )
    covered = 0
    ordered = sorted(
        (p for p in pieces if p.start < p.stop), key=lambda p: (p.start, p.stop, p.rank)
    )
    for piece in [*ordered, Run(0, total, total)]:
        if piece.start > covered:
            raise PlanError(f"custom boundaries leave rows {covered}:{piece.start} to no rank")
        if piece.start < covered:
            raise PlanError(
                f"custom boundaries give rows {piece.start}:{min(covered, piece.stop)} "
                "to more than one piece"
            )
        covered = piece.stop
    return ordered


def _merged(runs: Iterable[Run]) -> tuple[Run, ...]:
    merged: list[Run] = []
    for run in runs:
        if run.start == run.stop:
            continue
        if merged and merged[-1].rank == run.rank:
            run = Run(run.rank, merged.pop().start, run.stop)
        merged.append(run)
    return tuple(merged)


def _elements(values: object, what: str, dim: int = 1) -> Iterable[Any]:
    """Return the elements of a sequence or tensor, on the host."""
    if isinstance(values, Tensor):
        if values.dim() != dim:
            raise PlanError(f"{what} must have {dim} dimension(s), got {values.dim()}")
        if values.dtype not in (torch.int32, torch.int64):
            raise PlanError(f"{what} must be an int32 or int64 tensor, got {values.dtype}")
        return values.tolist()
    if hasattr(values, "tolist"):  # numpy arrays; other dtypes are refused element by element
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise PlanError(f"{what} must be a sequence of integers or a tensor, got {_show(values)}")
    return values


def _show(value: object) -> str:
    """Return a text of the value that is the same on every rank (no addresses)."""
    plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if plain else type(value).__name__
