# SPDX-License-Identifier: Apache-2.0
"""What an exchange executes: which summaries exist, which move in which round, how they fold.

Pure and shared: ``Plan.volume`` counts the routes that the exchange hands to its slots, so the two
cannot differ.

*Travel order* is the causal order of a chain in the forward direction, the reverse in the backward.
``state`` is E (forward) or dE (backward), ``transition`` is M. A fold step is ``S <- M S + E``
forward and ``S <- M^T S + E`` backward. In travel order the first segment of a chain produces a
``state`` that is already finished (its seed is in it), an interior one produces ``state`` and
``transition``, the last one and an only one produce nothing. Touching segments on one rank are one
segment, so neighbours in a chain are always on different ranks.

A ``Schedule`` is a list of rounds, one slot each (``rounds[i]`` is the i-th slot of the exchange).
Every rank stages every round's slot, in order, also where it neither sends nor receives. Rows are
*local segment indices* of the source rank; ``expand_routes`` turns them into rows of a part
``[n * B, ...]``.

``gather``: at most one round, publish first. A rank writes the E and M that it sends, publishes,
receives what its folds need, and folds the sources of each of its segments: ``S = E_0``, then
``S = M_i S + E_i`` for the others in turn. S enters the segment. What a fold needs of its own rank
it reads from the rank's own tables.

``scan``: recursive doubling over each chain of n segments, ceil(log2 n) rounds, publish first. Round
k moves *windows* of length 2^k: that of segment j stands for the segments ``j - 2^k + 1 .. j`` of
the chain, or, where that reaches the start, for all of ``0 .. j``; then its ``state`` is finished
and it has no transition. Segment j receives the window of ``j - 2^k``, and makes its next window of
that and its own, if somebody reads it. What enters segment j is the exclusive prefix: the windows
that it received lie side by side, so it is a fold of them, the farthest first, like that of
``gather`` but of at most ceil(log2 n) sources. The windows are held in the rounds' slots until
then; composing them into one map as they come would cost a product of transitions in each round.

Picture, n = 6, what segment 5 receives: round 0 the window 4..4, round 1 2..3, round 2 0..1.

``handoff`` (``receive_first``): in each round a rank receives every finished state that the round's
routes bring it (one source per fold: S enters the segment), then writes the finished states that it
sends in this round and publishes. The finished state of a segment is its E if it is first in travel
order, else ``M S + E`` with the S that entered; only ``state`` moves. A chain that would wait for
itself or for a chain that runs the other way continues in a later round.

Handoffs cannot deadlock. The routes of one round form a graph over ranks without a cycle, and a
rank goes through the rounds in order. So the earliest round that some rank has not left has a rank
that waits in it for nobody who is still in it; that rank publishes and goes on.

Source: docs/algebra.md, "Composition and the scan".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from cptransport.engines import Need
from cptransport.errors import OpInputError

if TYPE_CHECKING:
    from cptransport.plan import Plan

__all__ = [
    "COMPOSITIONS",
    "DIRECTIONS",
    "Fold",
    "RankRound",
    "Round",
    "RowRoute",
    "Schedule",
    "Source",
    "check_composition",
    "expand_routes",
    "schedule",
]

#: Compositions that are served.
COMPOSITIONS = ("handoff", "gather", "scan")
DIRECTIONS = ("forward", "backward")
#: Parts of a summary.
PARTS = ("state", "transition")

#: ``(source rank, destination rank, row)``.
RowRoute = tuple[int, int, int]


class Source(NamedTuple):
    """Where a segment and its summary are.

    Attributes:
        segment: its global index.
        rank: who owns it.
        row: its local index there.
        round: the round whose slot holds the summary.
    """

    segment: int
    rank: int
    row: int
    round: int = 0


@dataclass(frozen=True)
class Fold:
    """How one segment gets the state that enters it in travel order, or its next window.

    Attributes:
        target: the segment; of a window with the round that moves it.
        sources: what to fold, in travel order, never empty: all predecessors (``gather``), or the
            predecessor, whose finished state is the answer (``handoff``), or windows that make up
            all predecessors (``scan``); the first contributes its ``state`` alone. A window is
            folded of one that ends where the segment's own begins, if there is one, and its own.
        transition: the transition over all sources is wanted too (windows only).
    """

    target: Source
    sources: tuple[Source, ...]
    transition: bool = False


@dataclass(frozen=True, eq=False)
class RankRound:
    """One rank's share of a round.

    Attributes:
        windows: what this rank writes into the round's slot before it publishes, made of what the
            round before held and brought; its engine writes the first round's.
        folds: folds of this rank's segments, ascending by segment, once the round has come.
        sends: part -> rows of this rank's tables that some route moves, ascending; nothing else
            need be written to the slot.
        receives: part -> ranks from which something comes, ascending; never this rank.
    """

    windows: tuple[Fold, ...]
    folds: tuple[Fold, ...]
    sends: Mapping[str, tuple[int, ...]]
    receives: Mapping[str, tuple[int, ...]]

    @cached_property
    def products(self) -> tuple[Fold, ...]:
        """The windows whose transition is wanted too."""
        return tuple(window for window in self.windows if window.transition)


@dataclass(frozen=True, eq=False)
class Round:
    """One slot's worth of movement.

    Attributes:
        parts: the parts of the slot: of ``"state"`` and ``"transition"`` those that are read at all;
            perhaps by their own rank only, then no route moves them.
        routes: ``"state"`` and ``"transition"`` -> ``(source rank, destination rank, local segment
            index on the source)``, source never equal to destination, each once however many
            segments of the destination use it.
        ranks: every rank's share.
    """

    parts: tuple[str, ...]
    routes: Mapping[str, frozenset[RowRoute]]
    ranks: tuple[RankRound, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Everything that one exchange of summaries executes. See the module's docstring.

    Attributes:
        direction: ``"forward"`` or ``"backward"``.
        composition: one of ``COMPOSITIONS``.
        needs: per global segment what it must produce, moved or not.
        rounds: may be empty when no chain has more than one segment.
        receive_first: each round receives before it publishes (needs the capability ``pairwise``).
    """

    direction: str
    composition: str
    needs: tuple[Need, ...]
    rounds: tuple[Round, ...]
    receive_first: bool


def check_composition(composition: str) -> str:
    """Return the composition's name.

    Raises:
        OpInputError: unknown; the message lists the valid names.
    """
    if composition not in COMPOSITIONS:
        raise OpInputError(f"unknown composition {composition!r}; valid: {', '.join(COMPOSITIONS)}")
    return composition


def schedule(plan: Plan, direction: str, composition: str) -> Schedule:
    """Return the (cached) schedule of one exchange.

    Raises:
        OpInputError: unknown composition or direction.

    Collective: no.
    """
    if direction not in DIRECTIONS:
        raise OpInputError(f"unknown direction {direction!r}; valid: {', '.join(DIRECTIONS)}")
    return _schedule(plan, direction, check_composition(composition))


@lru_cache(maxsize=512)
def expand_routes(routes: frozenset[RowRoute], batch: int) -> frozenset[RowRoute]:
    """Turn routes of segments into routes of slot rows, ``row = segment * batch + b``."""
    if batch == 1:
        return routes
    return frozenset((s, d, row * batch + b) for s, d, row in routes for b in range(batch))


@lru_cache(maxsize=256)
def _schedule(plan: Plan, direction: str, composition: str) -> Schedule:
    chains = [
        tuple(Source(i, plan.segments[i].rank, plan.local_index(i)) for i in plan.chain(sequence))
        for sequence in range(plan.num_sequences)
    ]
    if direction == "backward":
        chains = [chain[::-1] for chain in chains]
    steps = _STEPS[composition](chains)
    return Schedule(
        direction,
        composition,
        _needs(chains, len(plan.segments)),
        _rounds(steps, plan.world_size),
        receive_first=composition == "handoff",
    )


def _needs(chains: Iterable[Sequence[Source]], count: int) -> tuple[Need, ...]:
    needs = [Need(state=False, transition=False)] * count
    for chain in chains:
        for position, source in enumerate(chain[:-1]):
            needs[source.segment] = Need(state=True, transition=position > 0)
    return tuple(needs)


@dataclass(frozen=True)
class _Step:
    """The windows and the folds of one round, of all ranks."""

    windows: list[Fold] = field(default_factory=list)
    folds: list[Fold] = field(default_factory=list)


def _gather(chains: Iterable[Sequence[Source]]) -> list[_Step]:
    folds = [Fold(chain[j], tuple(chain[:j])) for chain in chains for j in range(1, len(chain))]
    return [_Step(folds=folds)] if folds else []


def _scan(chains: Sequence[Sequence[Source]]) -> list[_Step]:
    """Double the windows of all chains side by side; fold when the last one has come."""
    steps = [_Step() for _ in range((max(map(len, chains), default=1) - 1).bit_length())]
    for chain in chains:

        def window(j: int, level: int, chain: Sequence[Source] = chain) -> Source:
            return chain[j]._replace(round=level)

        for level in range(1, (len(chain) - 1).bit_length()):
            half = 1 << level - 1
            for j in range(len(chain) - 2 * half):  # the others' are read by nobody
                own = window(j, level - 1)
                before = (window(j - half, level - 1),) if j >= half else ()
                made = Fold(window(j, level), (*before, own), transition=j >= 2 * half)
                steps[level].windows.append(made)
        for j in range(1, len(chain)):
            levels = range(j.bit_length() - 1, -1, -1)
            steps[-1].folds.append(
                Fold(chain[j], tuple(window(j - (1 << level), level) for level in levels))
            )
    return steps


def _handoff(chains: Iterable[Sequence[Source]]) -> list[_Step]:
    """Put each step of each chain in the first round whose graph over ranks stays acyclic."""
    steps: list[_Step] = []
    reach: list[dict[int, set[int]]] = []  # per round: rank -> itself and all that wait for it
    for chain in chains:
        current = 0
        for source, target in pairwise(chain):
            while current < len(steps) and source.rank in reach[current].get(target.rank, ()):
                current += 1
            if current == len(steps):
                steps.append(_Step())
                reach.append({})
            _add_edge(reach[current], source.rank, target.rank)
            steps[current].folds.append(Fold(target, (source._replace(round=current),)))
    return steps


def _add_edge(reach: dict[int, set[int]], source: int, target: int) -> None:
    """Record in the transitive closure that target waits for source."""
    beyond = reach.setdefault(target, {target})
    if target in reach.setdefault(source, {source}):
        return
    for ranks in reach.values():
        if source in ranks:
            ranks |= beyond


_STEPS: Mapping[str, Callable[[Sequence[Sequence[Source]]], list[_Step]]] = {
    "handoff": _handoff,
    "gather": _gather,
    "scan": _scan,
}


def _rounds(steps: Sequence[_Step], world_size: int) -> tuple[Round, ...]:
    """Route what the folds read; windows read nothing but what the same rank's folds read too."""
    read: list[dict[str, set[RowRoute]]] = [{part: set() for part in PARTS} for _ in steps]
    for fold in (fold for step in steps for fold in step.folds):
        for position, source in enumerate(fold.sources):
            route = (source.rank, fold.target.rank, source.row)
            for part in PARTS if position > 0 else PARTS[:1]:
                read[source.round][part].add(route)
    return tuple(_round(step, parts, world_size) for step, parts in zip(steps, read, strict=True))


def _round(step: _Step, read: Mapping[str, set[RowRoute]], world_size: int) -> Round:
    routes = {part: frozenset(r for r in read[part] if r[0] != r[1]) for part in PARTS}
    windows, folds = (_by_rank(many, world_size) for many in (step.windows, step.folds))
    sends = {part: _grouped(moves, 0, 2, world_size) for part, moves in routes.items()}
    receives = {part: _grouped(moves, 1, 0, world_size) for part, moves in routes.items()}
    ranks = tuple(
        RankRound(
            windows[rank],
            folds[rank],
            MappingProxyType({part: rows[rank] for part, rows in sends.items()}),
            MappingProxyType({part: peers[rank] for part, peers in receives.items()}),
        )
        for rank in range(world_size)
    )
    parts = tuple(part for part in PARTS if read[part])
    return Round(parts, MappingProxyType(routes), ranks)


def _by_rank(folds: Iterable[Fold], world_size: int) -> list[tuple[Fold, ...]]:
    of_rank: list[list[Fold]] = [[] for _ in range(world_size)]
    for fold in sorted(folds, key=lambda fold: fold.target.segment):
        of_rank[fold.target.rank].append(fold)
    return [tuple(many) for many in of_rank]


def _grouped(
    routes: Iterable[RowRoute], key: int, value: int, world_size: int
) -> list[tuple[int, ...]]:
    """Return per rank in field ``key`` of the routes what stands in field ``value``, ascending."""
    groups: list[set[int]] = [set() for _ in range(world_size)]
    for route in routes:
        groups[route[key]].add(route[value])
    return [tuple(sorted(group)) for group in groups]
