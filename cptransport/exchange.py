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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from cptransport.composition import Fold, Round, RowRoute, Schedule, expand_routes, schedule
from cptransport.engines import Need
from cptransport.errors import CapabilityError
from cptransport.merge import compose_gathered, fold_gathered
from cptransport.plan import Plan
from cptransport.precision import ieee_math
from cptransport.summary import advance
from cptransport.transport import BoundaryTransport, Gathered, PartSpec, Slot

__all__ = ["Exchange", "Wire", "begin"]


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


class Exchange:
    """Base of the two ways to run a schedule; see ``begin``."""

    def __init__(
        self, wire: Wire, plan: Plan, transport: BoundaryTransport, direction: str
    ) -> None:
        self.schedule: Schedule = schedule(plan, direction, wire.composition)
        self.wire = wire
        self.transport = transport
        self.rank = transport.rank
        self.name = f"{wire.op}.{direction}"
        self.advance = advance(wire.op, direction, wire.layout)
        local = plan.for_rank(self.rank).segments
        self.num_rows = len(local) * wire.batch
        self.needs: tuple[Need, ...] = tuple(
            need
            for need, segment in zip(self.schedule.needs, plan.segments, strict=True)
            if segment.rank == self.rank
        )
        self._incoming: Tensor | None = None
        self.out: Mapping[str, Tensor] = {}

    def publish(self) -> None:
        """Release what the local pass wrote into ``out``."""
        raise NotImplementedError

    def incoming(self, seed: Tensor | None = None) -> Tensor:
        """Return the ``[R, ...]`` states that enter this rank's segments in travel order; waits on the first call.

        Args:
            seed: rows of segments that are first in travel order, zeros elsewhere; None: all zero.
        """
        if self._incoming is None:
            state = self._part("state")
            table = torch.empty(
                (self.num_rows, *state.shape[1:]), dtype=state.dtype, device=self.wire.device
            )
            if seed is None:
                table.zero_()
            else:
                table.copy_(seed)
            with ieee_math(self.wire.device.type):
                self._receive(table)
            self._incoming = table
        return self._incoming

    def _receive(self, table: Tensor) -> None:
        raise NotImplementedError

    def _part(self, name: str) -> PartSpec:
        return next(part for part in self.wire.parts if part.name == name)

    def _rows(self, row: int) -> slice:
        """Rows of a table that belong to a local segment."""
        return slice(row * self.wire.batch, (row + 1) * self.wire.batch)

    def _slot(self, index: int, step: Round) -> Slot:
        """The slot of a round: only parts that somebody reads."""
        return Slot(
            f"{self.name}.{index}" if index else self.name,
            tuple(
                _routed(part, step.routes[part.name], self.wire.batch)
                for part in self.wire.parts
                if part.name in step.parts
            ),
        )


@lru_cache(maxsize=1024)
def _routed(part: PartSpec, routes: frozenset[RowRoute], batch: int) -> PartSpec:
    """Return the part with routes; the same object every time, so that slots compare at once."""
    return replace(part, routes=expand_routes(routes, batch))


class _Silent(Exchange):
    """No chain has more than one segment: nothing is computed for others and nothing moves."""

    def publish(self) -> None:
        pass

    def _receive(self, table: Tensor) -> None:
        pass


class _PublishFirst(Exchange):
    """Gather and scan: rounds of publish, then gather; at the end each segment folds its sources."""

    def __init__(
        self, wire: Wire, plan: Plan, transport: BoundaryTransport, direction: str
    ) -> None:
        super().__init__(wire, plan, transport, direction)
        rounds = self.schedule.rounds
        self._slots = [self._slot(index, step) for index, step in enumerate(rounds)]
        self._staged = [transport.stage(slot) for slot in self._slots]
        self.out = self._staged[0]

    def publish(self) -> None:
        self.transport.publish(self._slots[0])

    def _receive(self, table: Tensor) -> None:
        gathered: list[Gathered] = []
        for index, step in enumerate(self.schedule.rounds):
            share = step.ranks[self.rank]
            if index > 0:
                self._merge(fold_gathered, share.windows, gathered, self._staged[index]["state"])
                products = tuple(window for window in share.windows if window.transition)
                if products:
                    staged = self._staged[index]["transition"]
                    self._merge(compose_gathered, products, gathered, staged)
                self.transport.publish(self._slots[index])
            gathered.append(self.transport.gather(self._slots[index]))
            self._merge(fold_gathered, share.folds, gathered, table)

    def _merge(
        self,
        how: Callable[..., None],
        folds: tuple[Fold, ...],
        gathered: Sequence[Gathered],
        table: Tensor,
    ) -> None:
        wire = self.wire
        how(wire.op, self.schedule.direction, wire.layout, wire.batch, folds, gathered, table)


class _Handoff(Exchange):
    """A chain of rounds: receive the predecessor's finished state, finish one's own, publish it."""

    def __init__(
        self, wire: Wire, plan: Plan, transport: BoundaryTransport, direction: str
    ) -> None:
        super().__init__(wire, plan, transport, direction)
        rounds = self.schedule.rounds
        self._slots = [self._slot(index, step) for index, step in enumerate(rounds)]
        self._staged = [transport.stage(slot)["state"] for slot in self._slots]
        # Finished states go where E was: into the slot itself when there is one, so that a first
        # segment writes in place.
        out = {"state": self._staged[0] if len(rounds) == 1 else self._scratch("state")}
        if any(need.transition for need in self.needs):
            out["transition"] = self._scratch("transition")
        self.out = out
        self._published = 0

    def _scratch(self, name: str) -> Tensor:
        part = self._part(name)
        return torch.empty(part.shape, dtype=part.dtype, device=self.wire.device)

    def publish(self) -> None:
        """Publish the rounds that wait for nobody; the others follow as states come in."""
        table = self.out["state"]
        while self._published < len(self._slots) and not self._waits(self._published):
            self._send(self._published, table)

    def _waits(self, index: int) -> bool:
        return bool(self.schedule.rounds[index].ranks[self.rank].receives["state"])

    def _receive(self, table: Tensor) -> None:
        state = self.out["state"]
        for index, step in enumerate(self.schedule.rounds):
            share = step.ranks[self.rank]
            if self._waits(index):
                gathered = self.transport.gather(
                    self._slots[index], parts={"state": share.receives["state"]}
                )
                for fold in share.folds:
                    (source,) = fold.sources
                    rows = self._rows(fold.target.row)
                    table[rows] = gathered.tensor("state", source.rank)[self._rows(source.row)]
                    if self.needs[fold.target.row].state:
                        state[rows] = self.advance(
                            self.out["transition"][rows], table[rows], state[rows]
                        )
            if index == self._published:
                self._send(index, state)

    def _send(self, index: int, state: Tensor) -> None:
        staged = self._staged[index]
        if staged is not state:
            for row in self.schedule.rounds[index].ranks[self.rank].sends["state"]:
                rows = self._rows(row)
                staged[rows] = state[rows]
        self.transport.publish(self._slots[index])
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
        CapabilityError: ``handoff`` on a transport that is not pairwise; alike on all ranks.
        TransportError: as the verbs.

    Collective: over the transport's ranks; communicates nothing where no chain has two segments.
    """
    chosen = schedule(plan, direction, wire.composition)
    if chosen.receive_first and not transport.capabilities.pairwise:
        raise CapabilityError(
            f"composition {wire.composition!r} fetches before it publishes, and transport "
            f"{transport.name!r} is not pairwise"
        )
    if not chosen.rounds:
        return _Silent(wire, plan, transport, direction)
    return _WAYS[wire.composition](wire, plan, transport, direction)
