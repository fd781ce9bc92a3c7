# SPDX-License-Identifier: Apache-2.0
"""The halo of a causal convolution: the last W-1 inputs of the same sequence before a segment.

They live on whichever ranks hold those tokens.

With ``h = W - 1``, a rank's halo table has one row per (local segment, position): ``row =
local_segment * h + p``, p = 0 the oldest. Three tables of that shape, times ``[B, D]``, play a
part:

* ``published``, the slot's forward part: a segment's own last ``m = min(length, h)`` inputs in rows
  ``p = h - m .. h - 1``;
* ``halo``: what comes before each segment. Position p is the sequence's token ``t - h + p``, where
  t tokens precede the segment; before the sequence's start it is column ``t + p`` of the initial
  conv state ``[N, D, h]``;
* ``halo gradient``, the slot's backward part, indexed like ``halo``, by consumer.

Forward, a token's row moves at most once to a rank, however many segments there need it. Backward,
every halo row returns its gradient to the rank that owns the token: a row per consumer, added
there. One round each way; W = 1 moves nothing.

Rows of the initial conv state are addressed as ``sequence * h + column``: its ``[N, h, D]`` view
for packed input (rows of the ``[N * h, 1, D]`` reshape), and its ``[h, B, D]`` view for dense
input, where the plan has one sequence.

Source: docs/algebra.md, "Causal convolution".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cptransport.composition import RowRoute
from cptransport.errors import OpInputError

if TYPE_CHECKING:
    from cptransport.plan import Plan

__all__ = ["Halo", "RankHalo", "RowCopy", "halo"]


@dataclass(frozen=True, eq=False)
class RowCopy:
    """Rows to copy or add: ``into[target] = out_of[source]``, or ``+=``; no target repeats.

    Attributes:
        peer: rank whose table is read.
        target (int64, [m]): rows written.
        source (int64, [m]): rows read.
    """

    peer: int
    target: Tensor
    source: Tensor

    def to(self, device: torch.device) -> RowCopy:
        """Return a copy on a device, without waiting for it."""
        return RowCopy(
            self.peer,
            self.target.to(device, non_blocking=True),
            self.source.to(device, non_blocking=True),
        )


@dataclass(frozen=True, eq=False)
class RankHalo:
    """What one rank copies, as int64 index tensors.

    Attributes:
        publish: ``published[target] = x_local[source]``; peer is this rank.
        receive: per source rank, this one included, ``halo[target] = published of peer[source]``.
        initial: ``halo[target] = initial_state[source]``; peer is this rank.
        give_back: ``dx_local[target] += halo gradient of peer[source]``, this rank's own included.
            A peer may come twice: targets are unique within one entry, so adding needs no atomics
            and has a fixed order.
        give_back_initial: ``d_initial_state[target] += halo gradient[source]``, as above; peer is
            this rank.
        final_halo: ``final_state[target] = halo[source]``; targets address like the initial state.
        final_rows: ``final_state[target] = x_local[source]``. Together they fill the final states
            of owned sequences.
    """

    publish: RowCopy
    receive: tuple[RowCopy, ...]
    initial: RowCopy
    give_back: tuple[RowCopy, ...]
    give_back_initial: tuple[RowCopy, ...]
    final_halo: RowCopy
    final_rows: RowCopy

    def to(self, device: torch.device) -> RankHalo:
        """Return the tables on a device, without waiting for the copies."""
        return RankHalo(
            publish=self.publish.to(device),
            receive=tuple(copy.to(device) for copy in self.receive),
            initial=self.initial.to(device),
            give_back=tuple(copy.to(device) for copy in self.give_back),
            give_back_initial=tuple(copy.to(device) for copy in self.give_back_initial),
            final_halo=self.final_halo.to(device),
            final_rows=self.final_rows.to(device),
        )


@dataclass(frozen=True, eq=False)
class Halo:
    """What a convolution of one width moves under one plan.

    Attributes:
        width: W.
        forward, backward: routes ``(source, destination, row)`` of the two slot parts, source never
            equal to destination.
        ranks: every rank's tables, on the CPU.
    """

    width: int
    forward: frozenset[RowRoute]
    backward: frozenset[RowRoute]
    ranks: tuple[RankHalo, ...]
    _on_device: dict[tuple[int, torch.device], RankHalo] = field(default_factory=dict, repr=False)

    def routes(self, direction: str) -> frozenset[RowRoute]:
        """Return the routes of a direction, ``"forward"`` or ``"backward"``."""
        return self.forward if direction == "forward" else self.backward

    def for_rank(self, rank: int, device: torch.device) -> RankHalo:
        """Return a rank's tables on a device; copied once, on the stream of the first use."""
        if (rank, device) not in self._on_device:
            self._on_device[rank, device] = self.ranks[rank].to(device)
        return self._on_device[rank, device]


@lru_cache(maxsize=256)
def halo(plan: Plan, width: int) -> Halo:
    """Return the (cached) halo of a plan for convolutions of a width.

    Raises:
        OpInputError: width below 1.

    Collective: no.
    """
    if width < 1:
        raise OpInputError(f"the width of a convolution must be at least 1, got {width}")
    tables = [_Tables(rank) for rank in range(plan.world_size)]
    forward: set[RowRoute] = set()
    backward: set[RowRoute] = set()
    h = width - 1
    for sequence in range(plan.num_sequences):
        chain = plan.chain(sequence)
        for consumer in chain:
            segment = plan.segments[consumer]
            mine = tables[segment.rank]
            base = plan.local_index(consumer) * h
            end = segment.local_start + segment.length
            mine.publish += [(base + h - k, end - k) for k in range(1, min(segment.length, h) + 1)]
            tokens = 0
            for origin, k in _tokens_before(plan, chain, consumer, h):
                tokens += 1
                row = base + h - tokens
                peer = plan.segments[origin]
                published = plan.local_index(origin) * h + h - k
                mine.receive[peer.rank].append((row, published))
                tables[peer.rank].give_back[segment.rank].append(
                    (peer.local_start + peer.length - k, row)
                )
                if peer.rank != segment.rank:
                    forward.add((peer.rank, segment.rank, published))
                    backward.add((segment.rank, peer.rank, row))
            # What is left lies before the sequence; position p is column `tokens + p` there.
            mine.initial += [(base + p, sequence * h + tokens + p) for p in range(h - tokens)]
        last = plan.segments[chain[-1]]
        base = plan.local_index(chain[-1]) * h
        for column in range(h):
            target = sequence * h + column
            p = last.length + column  # position in the last segment's halo, its own rows after it
            if p < h:
                tables[last.rank].final_halo.append((target, base + p))
            else:
                tables[last.rank].final_rows.append((target, last.local_start + p - h))
    return Halo(width, frozenset(forward), frozenset(backward), tuple(t.finished() for t in tables))


def _tokens_before(
    plan: Plan, chain: Sequence[int], consumer: int, count: int
) -> Iterator[tuple[int, int]]:
    """Yield the last tokens before a segment, newest first: (segment, k) is its k-th last token."""
    for origin in range(consumer - 1, chain[0] - 1, -1):
        for k in range(1, plan.segments[origin].length + 1):
            if count == 0:
                return
            yield origin, k
            count -= 1


#: Target and source row.
_Pair = tuple[int, int]


class _Tables:
    """The tables of one rank while they are being filled."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.publish: list[_Pair] = []
        self.receive: defaultdict[int, list[_Pair]] = defaultdict(list)
        self.initial: list[_Pair] = []
        self.give_back: defaultdict[int, list[_Pair]] = defaultdict(list)
        self.final_halo: list[_Pair] = []
        self.final_rows: list[_Pair] = []

    def finished(self) -> RankHalo:
        return RankHalo(
            publish=_copy(self.rank, self.publish),
            receive=tuple(_copy(peer, pairs) for peer, pairs in sorted(self.receive.items())),
            initial=_copy(self.rank, self.initial),
            give_back=tuple(
                _copy(peer, pairs)
                for peer, all_pairs in sorted(self.give_back.items())
                for pairs in _unique_targets(all_pairs)
            ),
            give_back_initial=tuple(
                _copy(self.rank, pairs)
                for pairs in _unique_targets((t, s) for s, t in self.initial)
            ),
            final_halo=_copy(self.rank, self.final_halo),
            final_rows=_copy(self.rank, self.final_rows),
        )


def _copy(peer: int, pairs: Iterable[_Pair]) -> RowCopy:
    ordered = sorted(pairs)
    table = torch.tensor(ordered, dtype=torch.int64).reshape(-1, 2)
    return RowCopy(peer, table[:, 0].contiguous(), table[:, 1].contiguous())


def _unique_targets(pairs: Iterable[_Pair]) -> list[list[_Pair]]:
    """Split pairs in lists without repeated targets: a target's k-th pair goes to the k-th list."""
    lists: list[list[_Pair]] = []
    seen: Counter[int] = Counter()
    for pair in pairs:
        k = seen[pair[0]]
        if k == len(lists):
            lists.append([])
        lists[k].append(pair)
        seen[pair[0]] += 1
    return lists
