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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from cptransport.engines import Need
from cptransport.errors import OpInputError, UnsupportedOptionError

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
COMPOSITIONS = ("handoff", "gather")
DIRECTIONS = ("forward", "backward")

#: ``(source rank, destination rank, row)``.
RowRoute = tuple[int, int, int]


class Source(NamedTuple):
    """Where a segment and its summary are.

    Attributes:
        segment: its global index.
        rank: who owns it.
        row: its local index there.
    """

    segment: int
    rank: int
    row: int


@dataclass(frozen=True)
class Fold:
    """How one segment gets the state that enters it in travel order.

    Attributes:
        target: the segment.
        sources: what to fold, in travel order, never empty: all predecessors (``gather``; the first
            contributes its ``state`` alone), or the predecessor, whose finished state is the answer
            (``handoff``).
    """

    target: Source
    sources: tuple[Source, ...]


@dataclass(frozen=True, eq=False)
class RankRound:
    """One rank's share of a round.

    Attributes:
        folds: folds of this rank's segments, ascending by segment.
        sends: part -> rows of this rank's tables that some route moves, ascending; nothing else
            need be written to the slot.
        receives: part -> ranks from which something comes, ascending; never this rank.
    """

    folds: tuple[Fold, ...]
    sends: Mapping[str, tuple[int, ...]]
    receives: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Round:
    """One slot's worth of movement.

    Attributes:
        routes: ``"state"`` and ``"transition"`` -> ``(source rank, destination rank, local segment
            index on the source)``, source never equal to destination, each once however many
            segments of the destination use it.
        ranks: every rank's share.
    """

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
        UnsupportedOptionError: ``scan``, which is not served yet.
        OpInputError: unknown; the message lists the valid names.
    """
    if composition == "scan":
        raise UnsupportedOptionError(
            "composition 'scan' is not served yet; use 'gather' or 'handoff'"
        )
    if composition not in COMPOSITIONS:
        raise OpInputError(f"unknown composition {composition!r}; valid: {', '.join(COMPOSITIONS)}")
    return composition


def schedule(plan: Plan, direction: str, composition: str) -> Schedule:
    """Return the (cached) schedule of one exchange.

    Raises:
        UnsupportedOptionError: composition ``scan``.
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
    rounds = _gather(chains) if composition == "gather" else _handoff(chains)
    return Schedule(
        direction,
        composition,
        _needs(chains, len(plan.segments)),
        tuple(_round(folds, plan.world_size) for folds in rounds),
        receive_first=composition == "handoff",
    )


def _needs(chains: Iterable[Sequence[Source]], count: int) -> tuple[Need, ...]:
    needs = [Need(state=False, transition=False)] * count
    for chain in chains:
        for position, source in enumerate(chain[:-1]):
            needs[source.segment] = Need(state=True, transition=position > 0)
    return tuple(needs)


def _gather(chains: Iterable[Sequence[Source]]) -> list[list[Fold]]:
    folds = [Fold(chain[j], tuple(chain[:j])) for chain in chains for j in range(1, len(chain))]
    return [folds] if folds else []


def _handoff(chains: Iterable[Sequence[Source]]) -> list[list[Fold]]:
    """Put each step of each chain in the first round whose graph over ranks stays acyclic."""
    rounds: list[list[Fold]] = []
    reach: list[dict[int, set[int]]] = []  # per round: rank -> itself and all that wait for it
    for chain in chains:
        current = 0
        for source, target in pairwise(chain):
            while current < len(rounds) and source.rank in reach[current].get(target.rank, ()):
                current += 1
            if current == len(rounds):
                rounds.append([])
                reach.append({})
            _add_edge(reach[current], source.rank, target.rank)
            rounds[current].append(Fold(target, (source,)))
    return rounds


def _add_edge(reach: dict[int, set[int]], source: int, target: int) -> None:
    """Record in the transitive closure that target waits for source."""
    beyond = reach.setdefault(target, {target})
    if target in reach.setdefault(source, {source}):
        return
    for ranks in reach.values():
        if source in ranks:
            ranks |= beyond


def _round(folds: list[Fold], world_size: int) -> Round:
    states: set[RowRoute] = set()
    transitions: set[RowRoute] = set()
    of_rank: list[list[Fold]] = [[] for _ in range(world_size)]
    for fold in folds:
        destination = fold.target.rank
        of_rank[destination].append(fold)
        for position, source in enumerate(fold.sources):
            if source.rank != destination:
                route = (source.rank, destination, source.row)
                states.add(route)
                if position > 0:
                    transitions.add(route)
    routes = {"state": frozenset(states), "transition": frozenset(transitions)}
    sends = {part: _grouped(moves, 0, 2, world_size) for part, moves in routes.items()}
    receives = {part: _grouped(moves, 1, 0, world_size) for part, moves in routes.items()}
    ranks = tuple(
        RankRound(
            tuple(sorted(of_rank[rank], key=lambda fold: fold.target.segment)),
            MappingProxyType({part: rows[rank] for part, rows in sends.items()}),
            MappingProxyType({part: peers[rank] for part, peers in receives.items()}),
        )
        for rank in range(world_size)
    )
    return Round(MappingProxyType(routes), ranks)


def _grouped(
    routes: Iterable[RowRoute], key: int, value: int, world_size: int
) -> list[tuple[int, ...]]:
    """Return per rank in field ``key`` of the routes what stands in field ``value``, ascending."""
    groups: list[set[int]] = [set() for _ in range(world_size)]
    for route in routes:
        groups[route[key]].add(route[value])
    return [tuple(sorted(group)) for group in groups]
