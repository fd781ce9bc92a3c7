# SPDX-License-Identifier: Apache-2.0
"""From one plan to another of the same stream: which rows go where. Pure, like plans.

Rows keep their order: what a rank sends to another one, and what it has there, is ascending in the
stream, so a list of row numbers per side is all that there is. States of sequences move in the same
way, from the rank that owns a sequence under one plan to the one that owns it under the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from cptransport.errors import PlanError
from cptransport.plan import Plan

__all__ = ["RowMove", "check_same_stream", "received_rows", "relayout", "state_move"]


@dataclass(frozen=True, eq=False)
class RowMove:
    """Rows of one dimension that change their rank, seen from one of them; a ``Move``.

    Attributes:
        rank: which one.
        before, after: number of rows it has before and after.
        send (int64, [m], cpu): its rows by destination, ascending; its own are among them.
        send_counts: how many of them go to each rank.
        receive (int64, [k], cpu): rows of the result by source. Rows that nobody sends are zero.
        receive_counts: how many of them each rank sends.
        dim: the dimension of the rows.
    """

    rank: int
    before: int
    after: int
    send: Tensor
    send_counts: tuple[int, ...]
    receive: Tensor
    receive_counts: tuple[int, ...]
    dim: int = 1
    _on_device: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def along(self, dim: int) -> RowMove:
        """Return the same move of another dimension; shares the tables."""
        return RowMove(
            self.rank,
            self.before,
            self.after,
            self.send,
            self.send_counts,
            self.receive,
            self.receive_counts,
            dim,
            self._on_device,
        )

    @property
    def reverse(self) -> RowMove:
        """What was received goes back."""
        return RowMove(
            self.rank,
            self.after,
            self.before,
            self.receive,
            self.receive_counts,
            self.send,
            self.send_counts,
            self.dim,
            {device: (there, here) for device, (here, there) in self._on_device.items()},
        )

    def split(self, x: Tensor) -> list[Tensor]:
        """Return the rows for each rank, ``[rows, *rest]``."""
        rows, _ = self._tables(x.device)
        taken = _plain(x).movedim(self.dim, 0).index_select(0, rows).view(x.dtype)
        return list(taken.split(self.send_counts))

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shape of each rank's rows."""
        rest = x.movedim(self.dim, 0).shape[1:]
        return [(count, *rest) for count in self.receive_counts]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Put every row in its place."""
        _, rows = self._tables(parts[0].device)
        rest = list(parts[0].shape[1:])
        shape = [*rest[: self.dim], self.after, *rest[self.dim :]]
        covered = len(self.receive) == self.after
        result = parts[0].new_empty(shape) if covered else parts[0].new_zeros(shape)
        start = 0
        for part in parts:
            if len(part):
                here = rows.narrow(0, start, len(part))
                _plain(result).index_copy_(self.dim, here, _plain(part).movedim(0, self.dim))
                start += len(part)
        return result

    def _tables(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return ``send`` and ``receive`` on a device; copied once."""
        if device not in self._on_device:
            self._on_device[device] = (
                self.send.to(device, non_blocking=True),
                self.receive.to(device, non_blocking=True),
            )
        return self._on_device[device]


class _Piece(NamedTuple):
    """Adjacent rows that have one rank before and one after; local rows where they start."""

    length: int
    source: int
    source_row: int
    target: int
    target_row: int


def check_same_stream(plan_from: Plan, plan_to: Plan) -> None:
    """Raise unless two plans share out one stream among one number of ranks.

    Raises:
        PlanError: they do not; the words are a function of the plans.
    """
    for what, a, b in (
        ("world sizes", plan_from.world_size, plan_to.world_size),
        ("cu_seqlens", plan_from.cu_seqlens, plan_to.cu_seqlens),
        ("padded_cu_seqlens", plan_from.padded_cu_seqlens, plan_to.padded_cu_seqlens),
    ):
        if a != b:
            raise PlanError(
                f"plan_from and plan_to must share out one stream; their {what} differ: "
                f"{_short(a)} and {_short(b)}"
            )


def relayout(plan_from: Plan, plan_to: Plan, rank: int) -> RowMove:
    """Return the (cached) move of a rank's tokens from one plan to another.

    Raises:
        PlanError: not plans of one stream, or no such rank.

    Collective: no.
    """
    check_same_stream(plan_from, plan_to)
    plan_from.for_rank(rank)
    return _relayout(plan_from, plan_to, rank)


def received_rows(plan_from: Plan, plan_to: Plan) -> list[int]:
    """Return how many rows every rank receives from others when tokens go from one plan to another.

    Raises:
        PlanError: not plans of one stream.
    """
    check_same_stream(plan_from, plan_to)
    rows = [0] * plan_from.world_size
    for piece in _pieces(plan_from, plan_to):
        if piece.source != piece.target:
            rows[piece.target] += piece.length
    return rows


@lru_cache(maxsize=256)
def _relayout(plan_from: Plan, plan_to: Plan, rank: int) -> RowMove:
    pieces = _pieces(plan_from, plan_to)
    send = sorted((p.target, p.source_row, p.length) for p in pieces if p.source == rank)
    receive = sorted((p.source, p.target_row, p.length) for p in pieces if p.target == rank)
    size = plan_from.world_size
    return RowMove(
        rank,
        plan_from.for_rank(rank).num_tokens,
        plan_to.for_rank(rank).num_tokens,
        _rows(send),
        _counts(send, size),
        _rows(receive),
        _counts(receive, size),
    )


@lru_cache(maxsize=128)
def _pieces(plan_from: Plan, plan_to: Plan) -> tuple[_Piece, ...]:
    """Cut the stream wherever one of the plans does, in stream order."""
    pieces = []
    filled = [0] * plan_from.world_size, [0] * plan_to.world_size
    there = iter(plan_to.runs)
    after = next(there, None)
    for before in plan_from.runs:
        start = before.start
        while start < before.stop:
            assert after is not None  # both cover the stream
            stop = min(before.stop, after.stop)
            rows = filled[0][before.rank], filled[1][after.rank]
            pieces.append(_Piece(stop - start, before.rank, rows[0], after.rank, rows[1]))
            filled[0][before.rank] += stop - start
            filled[1][after.rank] += stop - start
            start = stop
            if stop == after.stop:
                after = next(there, None)
    return tuple(pieces)


@lru_cache(maxsize=256)
def state_move(plan_from: Plan, plan_to: Plan, rank: int, batch: int, end: str) -> RowMove:
    """Return the (cached) move of ``[N, ...]`` states to their owners under another plan.

    Args:
        plan_from, plan_to: of one stream.
        rank: seen from which rank.
        batch: B; a sequence has B rows.
        end: a sequence is owned by the rank of its ``"first"`` or ``"last"`` segment.

    Raises:
        PlanError: not plans of one stream.
    """
    check_same_stream(plan_from, plan_to)
    at = 0 if end == "first" else -1
    send, receive = [], []
    for sequence in range(plan_from.num_sequences):
        source, target = (p.segments[p.chain(sequence)[at]].rank for p in (plan_from, plan_to))
        if source == rank:
            send.append((target, sequence * batch, batch))
        if target == rank:
            receive.append((source, sequence * batch, batch))
    states, size = plan_from.num_sequences * batch, plan_from.world_size
    send, receive = sorted(send), sorted(receive)
    counts = _counts(send, size), _counts(receive, size)
    return RowMove(rank, states, states, _rows(send), counts[0], _rows(receive), counts[1], dim=0)


def _plain(x: Tensor) -> Tensor:
    """View small dtypes as bytes: torch does not index rows of every one of them."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _rows(runs: Sequence[tuple[int, int, int]]) -> Tensor:
    if not runs:
        return torch.empty(0, dtype=torch.int64)
    return torch.cat([torch.arange(start, start + length) for _, start, length in runs])


def _counts(runs: Iterable[tuple[int, int, int]], world_size: int) -> tuple[int, ...]:
    counts = [0] * world_size
    for peer, _, length in runs:
        counts[peer] += length
    return tuple(counts)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
