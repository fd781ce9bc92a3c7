# SPDX-License-Identifier: Apache-2.0
"""Segments as packed THD sequences: what cuDNN's kernels see of a rank's rows.

Two levels. ``Layout.long`` packs all segments of two tokens or more out of the rank's ``B * T`` flat
rows; ``Layout.group`` picks some of these for one call. Where a pack is everything below it, in
order, nothing is copied: the rule for a rank with one segment.

Padding rows, empty segments and single tokens are in no pack, so no kernel of cuDNN's ever sees
them, and a pack of one sequence is exactly ``[0, T]``.

Sequences are ordered by flat row, so for B > 1 by batch row first; state tables have
``segment * B + b``, and ``Pack.states`` says which of their rows belong to the sequences.

cuDNN keeps what it is given as ``initial_state`` by reference. Rows that are a whole table are that
table: those that the engine is given and those it makes belong to one call, and nobody writes to them
again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cptransport.engines import LocalSegment

__all__ = ["Layout", "Pack", "Picked", "Rows", "flat", "layout"]


@dataclass(frozen=True)
class _Sequence:
    """One packed sequence: where its rows start below, how many, its row of state tables, its segment."""

    start: int
    length: int
    state: int
    segment: int


@dataclass(frozen=True, eq=False)
class Rows:
    """Some rows of a table.

    Attributes:
        count, below: how many; how many there are.
        index: int64 ``[count]``; None: the first ones, in order.
    """

    count: int
    below: int
    index: Tensor | None

    @classmethod
    def of(cls, rows: Sequence[int], below: int, device: torch.device) -> Rows:
        """Choose rows out of ``below``."""
        index = None
        if list(rows) != list(range(len(rows))):
            index = torch.tensor(rows, dtype=torch.int64).to(device)
        return cls(len(rows), below, index)

    @property
    def whole(self) -> bool:
        """Whether they are all there are, in order."""
        return self.index is None and self.count == self.below

    def take(self, table: Tensor) -> Tensor:
        """Return the rows of ``[below, ...]``, contiguous; no copy of a contiguous table's first ones."""
        if self.index is not None:
            return table.index_select(0, self.index)
        return self._first(table).contiguous()

    def put(self, values: Tensor, table: Tensor) -> None:
        """Write ``[count, ...]`` into the rows of a table, of ``below`` rows or more."""
        if self.index is not None:
            table.index_copy_(0, self.index, values)
        else:
            self._first(table).copy_(values)

    def _first(self, table: Tensor) -> Tensor:
        return table if table.shape[0] == self.count else table[: self.count]


@dataclass(frozen=True, eq=False)
class Pack:
    """Packed sequences.

    Attributes:
        sequences: N of them.
        tokens: of all.
        rows: rows of the level below. states: rows of state tables.
        cu_seqlens: int32 ``[N + 1]``.
    """

    sequences: tuple[_Sequence, ...]
    tokens: int
    rows: Rows
    states: Rows
    cu_seqlens: Tensor

    @classmethod
    def of(
        cls, sequences: Sequence[_Sequence], below: int, states: int, device: torch.device
    ) -> Pack:
        """Pack sequences out of ``below`` rows; ``states`` rows of state tables exist."""
        cu = [0]
        rows: list[int] = []
        for each in sequences:
            cu.append(cu[-1] + each.length)
            rows += range(each.start, each.start + each.length)
        return cls(
            tuple(sequences),
            cu[-1],
            Rows.of(rows, below, device),
            Rows.of([each.state for each in sequences], states, device),
            torch.tensor(cu, dtype=torch.int32).to(device),
        )

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Token ranges of the sequences inside the pack."""
        spans, start = [], 0
        for each in self.sequences:
            spans.append((start, start + each.length))
            start += each.length
        return spans


class Picked(dict[str, Tensor]):
    """Tables by name that come a few rows at a time, without a copy if these are all."""

    def put(self, rows: Rows, **values: Tensor) -> None:
        """Add rows of some tables."""
        for name, value in values.items():
            if rows.whole:
                self[name] = value
                continue
            if name not in self:
                self[name] = value.new_empty(rows.below, *value.shape[1:])
            rows.put(value, self[name])


@dataclass(frozen=True, eq=False)
class Layout:
    """One rank's segments.

    Attributes:
        segments: as the engine was given them. batch, tokens: B, T.
        states: number of rows of state tables.
        long: all sequences of two tokens or more.
        single: of one token. empty: of none; only their states matter.
    """

    segments: tuple[LocalSegment, ...]
    batch: int
    tokens: int
    device: torch.device
    long: Pack
    single: Pack
    empty: Pack
    _groups: dict[frozenset[int], Pack] = field(default_factory=dict)

    @property
    def states(self) -> int:
        return len(self.segments) * self.batch

    @property
    def covered(self) -> bool:
        """Whether every row belongs to a sequence."""
        return self.long.tokens + self.single.tokens == self.batch * self.tokens

    @property
    def shorts(self) -> bool:
        """Whether any sequence is in no pack of ``long``."""
        return bool(self.single.sequences or self.empty.sequences)

    def group(self, segments: frozenset[int]) -> Pack | None:
        """Return a pack of the long sequences of some segments, out of the rows of ``long``; None for none."""
        if segments and segments not in self._groups:
            chosen = [
                _Sequence(start, each.length, each.state, each.segment)
                for (start, _), each in zip(self.long.spans, self.long.sequences, strict=True)
                if each.segment in segments
            ]
            self._groups[segments] = Pack.of(chosen, self.long.tokens, self.states, self.device)
        return self._groups.get(segments)

    def state_rows(self, segments: frozenset[int]) -> Rows:
        """Return the rows of state tables that belong to some segments, segment by segment."""
        rows = [i * self.batch + b for i in sorted(segments) for b in range(self.batch)]
        return Rows.of(rows, self.states, self.device)

    @cached_property
    def longs(self) -> frozenset[int]:
        """Indices of the segments of two tokens or more."""
        return frozenset(each.segment for each in self.long.sequences)


@lru_cache(maxsize=256)
def layout(
    segments: tuple[LocalSegment, ...], batch: int, tokens: int, device: torch.device
) -> Layout:
    """Return the (cached) layout of a rank's segments in ``[B, T, ...]``."""
    sequences = [
        _Sequence(b * tokens + segment.start, segment.length, i * batch + b, i)
        for b in range(batch)
        for i, segment in enumerate(segments)
    ]
    below, states = batch * tokens, len(segments) * batch

    def pack(lengths: range) -> Pack:
        chosen = [each for each in sequences if each.length in lengths]
        return Pack.of(chosen, below, states, device)

    longest = max((each.length for each in sequences), default=0)
    return Layout(
        segments,
        batch,
        tokens,
        device,
        pack(range(2, longest + 1)),
        pack(range(1, 2)),
        pack(range(1)),
    )


def flat(x: Tensor) -> Tensor:
    """Return ``[B, T, ...]`` as ``[B * T, ...]``, a view where x is contiguous."""
    return x.flatten(0, 1)
