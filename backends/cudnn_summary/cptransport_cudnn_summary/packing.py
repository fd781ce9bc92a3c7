# SPDX-License-Identifier: Apache-2.0
"""Segments as packed THD sequences: what cuDNN's kernels see of a rank's rows.

Two levels. ``Layout.long`` packs all segments of two tokens or more out of the rank's ``B * T`` flat
rows; ``Layout.group`` picks some of these for one call. Where a pack is everything below it, in
order, nothing is copied: the rule for a rank with one segment.

Padding rows, empty segments and single tokens are in no pack, so no kernel of cuDNN's ever sees
them, and a pack of one sequence is exactly ``[0, T]``.

Sequences are ordered by flat row, so for B > 1 by batch row first; state tables have
``segment * B + b``, and ``Pack.states`` says which of their rows belong to the sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from cptransport.engines import LocalSegment

__all__ = ["Layout", "Pack", "Picked", "flat", "layout"]


@dataclass(frozen=True)
class _Sequence:
    """One packed sequence: where its rows start below, how many, its row of state tables, its segment."""

    start: int
    length: int
    state: int
    segment: int


@dataclass(frozen=True, eq=False)
class Pack:
    """Packed sequences.

    Attributes:
        sequences: N of them.
        tokens: of all.
        rows: int64 ``[tokens]``, rows of the level below; None: all of them, in order.
        states: int64 ``[N]``, rows of state tables; None: all of them, in order.
        cu_seqlens: int32 ``[N + 1]``.
    """

    sequences: tuple[_Sequence, ...]
    tokens: int
    rows: Tensor | None
    states: Tensor | None
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
        wanted = [each.state for each in sequences]

        def table(values: list[int], whole: int) -> Tensor | None:
            if values == list(range(whole)):
                return None
            return torch.tensor(values, dtype=torch.int64).to(device)

        return cls(
            tuple(sequences),
            cu[-1],
            table(rows, below),
            table(wanted, states),
            torch.tensor(cu, dtype=torch.int32).to(device),
        )

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Token ranges of the sequences inside the pack."""
        spans, start = [], 0
        for each in self.sequences:
            spans.append((start, start + each.length))
            start += each.length
        return spans

    def take(self, rows: Tensor) -> Tensor:
        """Return the pack's rows of ``[below, ...]``, contiguous."""
        return rows.contiguous() if self.rows is None else rows.index_select(0, self.rows)

    def put(self, values: Tensor, below: Tensor) -> None:
        """Write ``[tokens, ...]`` into the pack's rows of ``[below, ...]``."""
        if self.rows is None:
            below.copy_(values)
        else:
            below.index_copy_(0, self.rows, values)

    def take_states(self, table: Tensor) -> Tensor:
        """Return a copy of the sequences' rows of a state table; always fresh memory.

        cuDNN keeps what it is given as ``initial_state`` by reference.
        """
        if self.states is None:
            return table[: len(self.sequences)].clone()
        return table.index_select(0, self.states)

    def put_states(self, values: Tensor, table: Tensor) -> None:
        """Write ``[N, ...]`` into the sequences' rows of a state table."""
        if self.states is None:
            table[: len(self.sequences)].copy_(values)
        else:
            table.index_copy_(0, self.states, values)


@dataclass
class Picked:
    """Rows that groups of a pack bring one after the other, joined without a copy if one group is all."""

    below: int
    values: dict[str, Tensor] = field(default_factory=dict)

    def put(self, pack: Pack, **values: Tensor) -> None:
        """Add a group's rows, by name."""
        for name, value in values.items():
            if pack.rows is None:
                self.values[name] = value
                continue
            if name not in self.values:
                self.values[name] = value.new_empty(self.below, *value.shape[1:])
            pack.put(value, self.values[name])


@dataclass(frozen=True, eq=False)
class Layout:
    """One rank's segments.

    Attributes:
        segments: as the engine was given them. batch, tokens: B, T.
        long: all sequences of two tokens or more.
        single: of one token. empty: of none; only their states matter.
        groups: packs made so far.
    """

    segments: tuple[LocalSegment, ...]
    batch: int
    tokens: int
    device: torch.device
    long: Pack
    single: Pack
    empty: Pack
    groups: dict[frozenset[int], Pack] = field(default_factory=dict)
    _state_rows: dict[frozenset[int], Tensor] = field(default_factory=dict)

    @property
    def covered(self) -> bool:
        """Whether every row belongs to a sequence."""
        return self.long.tokens + self.single.tokens == self.batch * self.tokens

    def group(self, segments: frozenset[int]) -> Pack:
        """Return a pack of the long sequences of some segments, out of the rows of ``long``."""
        if segments not in self.groups:
            chosen = [
                _Sequence(start, each.length, each.state, each.segment)
                for (start, _), each in zip(self.long.spans, self.long.sequences, strict=True)
                if each.segment in segments
            ]
            states = len(self.segments) * self.batch
            self.groups[segments] = Pack.of(chosen, self.long.tokens, states, self.device)
        return self.groups[segments]

    def state_rows(self, segments: frozenset[int]) -> Tensor:
        """Return int64 rows of state tables that belong to some segments, segment by segment."""
        if segments not in self._state_rows:
            rows = [i * self.batch + b for i in sorted(segments) for b in range(self.batch)]
            made = torch.tensor(rows, dtype=torch.int64).to(self.device)
            self._state_rows[segments] = made
        return self._state_rows[segments]

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
