# SPDX-License-Identifier: Apache-2.0
"""One exchange of summaries between ranks: stage, publish, and the states that enter this rank's segments.

Executes a ``composition.Schedule`` on any transport; which bytes move is decided there alone. An
exchange is used once::

    exchange = begin(...)                      # stages the slots
    engine.forward_local(..., exchange.out)    # writes E and M into exchange.out
    exchange.publish()
    table = exchange.incoming()                # waits; [R, ...], one row per (segment, batch row)

"Travel order" and the meaning of rounds are explained in ``composition``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from cptransport.composition import (
    Fold,
    RankRound,
    Round,
    RowRoute,
    Schedule,
    expand_routes,
    schedule,
)
from cptransport.engines import Need
from cptransport.errors import CapabilityError
from cptransport.merge import compose_gathered, fold_gathered
from cptransport.plan import Plan
from cptransport.summary import Advance, advance, exactly
from cptransport.transport import BoundaryTransport, Gathered, PartSpec, Slot

__all__ = ["Course", "Exchange", "Summaries", "Wire", "begin", "course", "start"]


@dataclass(frozen=True)
class Wire:
    """What an exchange needs to know of an op, alike on all ranks.

    Attributes:
        op: ``"kda"`` or ``"ssd"``.
        parts: the engine's ``state`` and ``transition`` parts, without routes.
        layout: the engine's state layout.
        batch: B.
        device: where the tables are; the transport's, or the inputs' in a group of one rank.
        composition: ``"handoff"``, ``"gather"`` or ``"scan"``.
    """

    op: str
    parts: tuple[PartSpec, ...]
    layout: str
    batch: int
    device: torch.device
    composition: str

    def part(self, name: str) -> PartSpec:
        """Return the part of that name."""
        return next(part for part in self.parts if part.name == name)


@dataclass(frozen=True, eq=False)
class Course:
    """One rank's exchange in one direction, before it is under way: all that no tensor changes.

    Attributes:
        wire, schedule, rank: see there.
        slots: one per round.
        needs: of this rank's segments.
        advance: the fold step.
        table: shape of a table of this rank's states, ``[R, ...]``. dtype: of states.
        filled: whether every row of such a table comes from other segments.
    """

    wire: Wire
    schedule: Schedule
    rank: int
    slots: tuple[Slot, ...]
    needs: tuple[Need, ...]
    advance: Advance
    table: tuple[int, ...]
    dtype: torch.dtype
    filled: bool


def course(wire: Wire, plan: Plan, direction: str, rank: int) -> Course:
    """Return the course of a rank.

    Raises:
        OpInputError: the composition is unknown.
    """
    chosen = schedule(plan, direction, wire.composition)
    state = wire.part("state")
    local = [i for i, segment in enumerate(plan.segments) if segment.rank == rank]
    entered = {fold.target.segment for step in chosen.rounds for fold in step.ranks[rank].folds}
    name = f"{wire.op}.{direction}"
    return Course(
        wire,
        chosen,
        rank,
        tuple(
            _slot(f"{name}.{index}" if index else name, wire, step)
            for index, step in enumerate(chosen.rounds)
        ),
        tuple(chosen.needs[i] for i in local),
        advance(wire.op, direction, wire.layout),
        (len(local) * wire.batch, *state.shape[1:]),
        state.dtype,
        filled=len(entered) == len(local),
    )


def _slot(name: str, wire: Wire, step: Round) -> Slot:
    """The slot of a round: only parts that somebody reads."""
    return Slot(
        name,
        tuple(
            _routed(part, step.routes[part.name], wire.batch)
            for part in wire.parts
            if part.name in step.parts
        ),
    )


@lru_cache(maxsize=1024)
def _routed(part: PartSpec, routes: frozenset[RowRoute], batch: int) -> PartSpec:
    """Return the part with routes; the same object every time, so that slots compare at once."""
    return replace(part, routes=expand_routes(routes, batch))


@dataclass(frozen=True)
class Summaries:
    """What a single round brought, before any fold.

    Attributes:
        gathered: the parts ``state`` and, where a fold has two sources, ``transition``.
        folds: of this rank's segments. batch: B. rank: this rank.
    """

    gathered: Gathered
    folds: tuple[Fold, ...]
    batch: int
    rank: int

    def sources(self, row: int) -> list[tuple[int, int]]:
        """Return (rank, row of its tables) of all that enters a row of this rank's tables, in travel order."""
        segment, b = divmod(row, self.batch)
        return [
            (source.rank, source.row * self.batch + b)
            for fold in self.folds
            if fold.target.row == segment
            for source in fold.sources
        ]


class Exchange:
    """Base of the two ways to run a schedule; see ``begin``."""

    def __init__(self, way: Course, transport: BoundaryTransport) -> None:
        self.course = way
        self.transport = transport
        self._incoming: Tensor | None = None
        self.out: Mapping[str, Tensor] = {}

    @property
    def needs(self) -> tuple[Need, ...]:
        """What this rank's segments must produce."""
        return self.course.needs

    def publish(self) -> None:
        """Release what the local pass wrote into ``out``."""
        raise NotImplementedError

    def incoming(self, seed: Tensor | None = None) -> Tensor:
        """Return the ``[R, ...]`` states that enter this rank's segments in travel order; waits on the first call.

        Args:
            seed: rows of segments that are first in travel order, zeros elsewhere; None: all zero.
        """
        if self._incoming is None:
            self._incoming = self._receive(seed)
        return self._incoming

    def complete(self, seed: Tensor | None = None) -> None:
        """Go through all rounds now: others may wait for this rank in them, whatever its engine asks for."""
        self.incoming(seed)

    def summaries(self) -> Summaries | None:
        """Return what came as it came, for an engine that composes by itself; None: it has to be folded here."""
        return None

    def _receive(self, seed: Tensor | None) -> Tensor:
        raise NotImplementedError

    def _table(self, seed: Tensor | None) -> Tensor:
        """Return a table that holds the seeds, and zeros where folds do not write."""
        if seed is not None:
            return seed.clone()
        way = self.course
        make = torch.empty if way.filled else torch.zeros
        return make(way.table, dtype=way.dtype, device=way.wire.device)

    def _rows(self, row: int) -> slice:
        """Rows of a table that belong to a local segment."""
        batch = self.course.wire.batch
        return slice(row * batch, (row + 1) * batch)


class _Silent(Exchange):
    """No chain has more than one segment: nothing is computed for others and nothing moves."""

    def publish(self) -> None:
        pass

    def complete(self, seed: Tensor | None = None) -> None:
        pass

    def _receive(self, seed: Tensor | None) -> Tensor:
        return self._table(None) if seed is None else seed


class _PublishFirst(Exchange):
    """Gather and scan: rounds of publish, then gather; at the end each segment folds its sources."""

    def __init__(self, way: Course, transport: BoundaryTransport) -> None:
        super().__init__(way, transport)
        self._staged = [transport.stage(slot) for slot in way.slots]
        self._gathered: list[Gathered] = []
        self.out = self._staged[0]

    def publish(self) -> None:
        self.transport.publish(self.course.slots[0])

    def complete(self, seed: Tensor | None = None) -> None:
        if len(self.course.slots) > 1:
            super().complete(seed)
        else:
            self._gather(0)

    def summaries(self) -> Summaries | None:
        way = self.course
        if len(way.slots) > 1:
            return None
        share = way.schedule.rounds[0].ranks[way.rank]
        return Summaries(self._gather(0), share.folds, way.wire.batch, way.rank)

    def _gather(self, index: int) -> Gathered:
        """Gather a round, once."""
        if index == len(self._gathered):
            self._gathered.append(self.transport.gather(self.course.slots[index]))
        return self._gathered[index]

    def _receive(self, seed: Tensor | None) -> Tensor:
        table = self._table(seed)
        gathered, way = self._gathered, self.course
        for index, (slot, step) in enumerate(zip(way.slots, way.schedule.rounds, strict=True)):
            share = step.ranks[way.rank]
            if index > 0:
                staged = self._staged[index]
                self._merge(share.windows, gathered, staged["state"])
                if share.products:
                    self._merge(share.products, gathered, staged["transition"], products=True)
                self.transport.publish(slot)
            self._gather(index)
            self._merge(share.folds, gathered, table)
        return table

    def _merge(
        self,
        folds: tuple[Fold, ...],
        gathered: Sequence[Gathered],
        table: Tensor,
        *,
        products: bool = False,
    ) -> None:
        if folds:
            wire, direction = self.course.wire, self.course.schedule.direction
            merge = compose_gathered if products else fold_gathered
            merge(wire.op, direction, wire.layout, wire.batch, folds, gathered, table)


class _Handoff(Exchange):
    """A chain of rounds: receive the predecessor's finished state, finish one's own, publish it."""

    def __init__(self, way: Course, transport: BoundaryTransport) -> None:
        super().__init__(way, transport)
        self._staged = [transport.stage(slot)["state"] for slot in way.slots]
        # Finished states go where E was: into the slot itself when there is one, so that a first
        # segment writes in place.
        out = {"state": self._staged[0] if len(way.slots) == 1 else self._scratch("state")}
        if any(need.transition for need in way.needs):
            out["transition"] = self._scratch("transition")
        self.out = out
        self._published = 0

    def _scratch(self, name: str) -> Tensor:
        part = self.course.wire.part(name)
        return torch.empty(part.shape, dtype=part.dtype, device=self.course.wire.device)

    def publish(self) -> None:
        """Publish the rounds that wait for nobody; the others follow as states come in."""
        table = self.out["state"]
        while self._published < len(self._staged) and not self._waits(self._published):
            self._send(self._published, table)

    def _share(self, index: int) -> RankRound:
        return self.course.schedule.rounds[index].ranks[self.course.rank]

    def _waits(self, index: int) -> bool:
        return bool(self._share(index).receives["state"])

    def _receive(self, seed: Tensor | None) -> Tensor:
        table, state, way = self._table(seed), self.out["state"], self.course
        with exactly(way.wire.op, way.wire.device.type):
            for index, slot in enumerate(way.slots):
                share = self._share(index)
                if self._waits(index):
                    gathered = self.transport.gather(slot, parts={"state": share.receives["state"]})
                    for fold in share.folds:
                        (source,) = fold.sources
                        rows = self._rows(fold.target.row)
                        table[rows] = gathered.tensor("state", source.rank)[self._rows(source.row)]
                        if way.needs[fold.target.row].state:
                            state[rows] = way.advance(
                                self.out["transition"][rows], table[rows], state[rows]
                            )
                if index == self._published:
                    self._send(index, state)
        return table

    def _send(self, index: int, state: Tensor) -> None:
        staged = self._staged[index]
        if staged is not state:
            for row in self._share(index).sends["state"]:
                rows = self._rows(row)
                staged[rows] = state[rows]
        self.transport.publish(self.course.slots[index])
        self._published += 1


_WAYS: Mapping[str, type[Exchange]] = {
    "handoff": _Handoff,
    "gather": _PublishFirst,
    "scan": _PublishFirst,
}


def begin(wire: Wire, plan: Plan, transport: BoundaryTransport, direction: str) -> Exchange:
    """Stage one exchange.

    Args:
        wire: what moves.
        plan: who owns which segments.
        transport: of the same world size.
        direction: ``"forward"`` or ``"backward"``.

    Raises:
        OpInputError: the composition is unknown.
        CapabilityError, TransportError: as ``start``.

    Collective: over the transport's ranks; communicates nothing where no chain has two segments.
    """
    return start(course(wire, plan, direction, transport.rank), transport)


def start(way: Course, transport: BoundaryTransport) -> Exchange:
    """Stage an exchange whose course is known.

    Args:
        way: of the transport's rank.
        transport: of the plan's world size.

    Raises:
        CapabilityError: ``handoff`` on a transport that is not pairwise; alike on all ranks.
        TransportError: as the verbs.

    Collective: as ``begin``.
    """
    if way.schedule.receive_first and not transport.capabilities.pairwise:
        raise CapabilityError(
            f"composition {way.wire.composition!r} fetches before it publishes, and transport "
            f"{transport.name!r} is not pairwise"
        )
    if not way.slots:
        return _Silent(way, transport)
    return _WAYS[way.wire.composition](way, transport)
