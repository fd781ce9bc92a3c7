# SPDX-License-Identifier: Apache-2.0
"""The ``nccl`` transport: a generation is one group of NCCL sends and receives on a communication
stream of its own.

Picture, one rank, current stream above, communication stream below::

    write staged   publish ............ local work ........... gather (waits for the event)   fold
                      \\-- event --> [ group: sends + receives ] -- event --/

* ``publish`` issues what the routes say, sends and receives, as one group in (part, source,
  destination, row) order; a part whose routes go from every rank to every other is one typed
  all-gather. The current stream goes on at once.
* In a handoff ``fetch`` comes first: the receives are one group there, the sends one at
  ``publish``.
* What nobody looked at is received at the next ``stage``.
* All slots with routes share a lane (communicator and stream), so two ranks must issue what they have
  to say to each other through them in one order; ``order`` notices where they do not. Barriers have
  a lane of their own and may come between any two verbs.
* Without routes a receiver knows a message only when it asks for it, in any order of slots and
  sources, while NCCL matches messages of a pair in the order they are sent. So such a slot has a
  lane of its own per source, on which that rank sends and all others
  receive: nobody's receive is ever behind a send of its own, and what a send waits for are takes of
  its own and earlier generations of the slot. NCCL takes a small message off the sender whether it
  is received or not: that it was, the receiver's host says through the group's store, and the
  sender's ``stage`` two generations later looks there.

Memory: staged and received tensors are double-buffered; ``stage`` makes the current stream wait for
what the slot's memory was last sent from or received into, and every group waits for the current
stream, so receives of g cannot overtake readers of g-2. Captures have buffers of their own, and in a
capture groups go on the current stream, since a capture must not leave work that nothing waits for; events
of another capture, or of none, mean nothing there.

Waits inside NCCL end by the watchdog: it aborts our communicators, which ends their kernels, and
the next verb raises. A kernel that is ended leaves anything where it was to receive; a small launch
after each group makes NaN of that then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cptransport.backend import ControlPlane, Generation, byte_spans
from cptransport.errors import GenerationError, TransportError
from cptransport.transport import Capabilities, PartSpec
from cptransport_nccl.lanes import ROUTES, LanesTransport, still_used
from cptransport_nccl.library import Communicator
from cptransport_nccl.notes import Notes

__all__ = ["CAPABILITIES", "NcclTransport"]

CAPABILITIES = Capabilities(device_types=("cuda",), cuda_graph=True, cross_host=True)

#: (kind, slot, part, source or -1, generation's parity, in a capture)
_Place = tuple[str, str, str, int, int, bool]
#: (part, source, destination, first byte, number of bytes)
_Move = tuple[PartSpec, int, int, int, int]


@dataclass
class _Traffic:
    """What has been issued for one generation.

    Attributes:
        captured: in a graph capture; its events mean nothing outside of that one.
        received: the receives of the routes were issued.
        arrived: event after the receives of the routes; None where they are on the current stream.
        asked: source -> such an event for its parts without routes.
    """

    captured: bool
    received: bool = False
    arrived: torch.cuda.Event | None = None
    asked: dict[int, torch.cuda.Event | None] = field(default_factory=dict)


class NcclTransport(LanesTransport):
    """One rank's end; see the module docstring."""

    def __init__(
        self,
        control: ControlPlane,
        device: torch.device,
        timeout_s: float,
        identity: Callable[[], bytes],
        notes: Notes,
    ) -> None:
        self._memory: dict[_Place, Tensor] = {}
        #: Tensors on it, each with its shape and dtype: making one costs as much as a launch.
        self._views: dict[_Place, tuple[tuple[tuple[int, ...], torch.dtype], Tensor]] = {}
        self._outgrown: list[Tensor] = []
        self._traffic: dict[tuple[str, int], _Traffic] = {}
        #: Events after all that was last issued on a slot's memory, outside of captures.
        self._under_way: dict[tuple[str, int], list[torch.cuda.Event]] = {}
        super().__init__(control, device, timeout_s, CAPABILITIES, identity, notes)

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        name, number = current.slot.name, current.number
        stream = self._current_stream()
        captured = torch.cuda.is_current_stream_capturing()
        if retired is not None:
            self._receive_routes(retired)
        self._traffic.pop((name, number - 2), None)
        if not captured:
            for event in self._under_way.pop((name, number % 2), ()):
                stream.wait_event(event)
            self._await_takes(current)
        self._traffic[name, number] = _Traffic(captured)
        if any(part.routes is None for part in current.slot.parts):
            self._connect({f"{name}/{source}": source for source in range(self.world_size)})
        return {
            part.name: self._buffer("staged", name, part, number).detach()
            for part in current.slot.parts
        }

    def _await_takes(self, current: Generation) -> None:
        """Wait until what was sent without routes two generations ago has been asked for."""
        name, number = current.slot.name, current.number - 2

        def missing() -> list[int]:
            return self._notes.untaken(name, number)

        def arrived(seconds: float) -> bool:
            deadline = time.monotonic() + seconds
            while missing():
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.001)
            return True

        if missing():
            what = f"what generation {number} sent was not taken"
            self._wait(arrived, what, current=current, missing=missing)

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        traffic = self._begun(current)
        receive = not traffic.received
        traffic.received = True
        moves = [
            move
            for part in current.slot.parts
            for move in self._moves_of(part)
            if move[1] == self.rank or receive
        ]
        dense = [p for p in current.slot.parts if receive and self._is_dense(p)]
        event = self._issue(ROUTES, current, moves, dense)
        if receive:
            traffic.arrived = event
        free = [part for part in current.slot.parts if part.routes is None]
        others = [rank for rank in to if rank != self.rank]
        sends: list[_Move] = [
            (part, self.rank, peer, 0, part.nbytes) for part in free for peer in others
        ]
        self._issue(f"{current.slot.name}/{self.rank}", current, sends, [])
        if free and not traffic.captured:
            self._notes.expect(current.slot.name, current.number, others)

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        traffic = self._begun(current)
        stream = self._current_stream()
        self._receive_routes(current)
        if traffic.arrived is not None:
            stream.wait_event(traffic.arrived)
        # All parts of a source at once, as it sends them.
        free = [part for part in current.slot.parts if part.routes is None]
        for source in dict.fromkeys(source for part, source in wanted if part.routes is None):
            if source not in traffic.asked:
                moves: list[_Move] = [(part, source, self.rank, 0, part.nbytes) for part in free]
                lane = f"{current.slot.name}/{source}"
                traffic.asked[source] = self._issue(lane, current, moves, [])
                if not traffic.captured:
                    self._notes.took(current.slot.name, current.number, source)
            event = traffic.asked[source]
            if event is not None:
                stream.wait_event(event)
        return {
            (part.name, source): self._target(current, part, source).detach()
            for part, source in wanted
        }

    def _close(self, broken: bool) -> None:
        for memory in self._memory.values() if broken else ():
            for lane in self._lanes.values():
                still_used(memory, lane.stream)  # what was issued and never drained
        super()._close(broken)
        self._traffic.clear()
        self._under_way.clear()
        if not self.aborting:
            self._memory.clear()
            self._views.clear()
            self._outgrown.clear()

    def _is_dense(self, part: PartSpec) -> bool:
        """Whether a part goes whole from every rank to every other: a typed all-gather."""
        if part.routes is None or self.world_size < 3:
            return False
        ranks = range(self.world_size)
        return all((s, d) in part.routes for s in ranks for d in ranks if s != d)

    def _moves_of(self, part: PartSpec) -> list[_Move]:
        """This rank's sends and receives of a part with routes, in an order that both ends share."""
        if part.routes is None or self._is_dense(part):
            return []
        pairs = sorted({route[:2] for route in part.routes})
        moves: list[_Move] = []
        for source, destination in pairs:
            if source == destination or self.rank not in (source, destination):
                continue
            spans = byte_spans(part, part.rows(source, destination))
            moves += [(part, source, destination, start, nbytes) for start, nbytes in spans]
        return moves

    def _receive_routes(self, current: Generation) -> None:
        """Issue the receives of a generation's routes, if ``publish`` has not."""
        traffic = self._traffic[current.slot.name, current.number]
        if traffic.received:
            return
        parts = [p for p in current.slot.parts if p.routes is not None]
        dense = [p for p in parts if self._is_dense(p)]
        if dense:
            raise TransportError(
                self._where(current)
                + f": part {dense[0].name!r} goes from every rank to every other, so publish comes first"
            )
        moves = [m for part in parts for m in self._moves_of(part) if m[2] == self.rank]
        if moves:
            self._begun(current)
        traffic.received = True
        traffic.arrived = self._issue(ROUTES, current, moves, [])

    def _begun(self, current: Generation) -> _Traffic:
        """Return what was issued for a generation.

        Raises:
            GenerationError: it was staged inside a graph capture and goes on outside, or the other way
                round. A replay would not move what this rank's peers move.
        """
        traffic = self._traffic[current.slot.name, current.number]
        if traffic.captured != torch.cuda.is_current_stream_capturing():
            where = "inside a graph capture" if traffic.captured else "outside of graph captures"
            raise GenerationError(
                self._where(current) + f" was staged {where}, where all of it has to be"
            )
        return traffic

    def _issue(
        self,
        lane: str,
        current: Generation,
        moves: Sequence[_Move],
        dense: Sequence[PartSpec],
    ) -> torch.cuda.Event | None:
        """Issue moves and all-gathers as one group.

        Returns:
            The event after it; None if it is empty, or on the current stream.
        """
        moves = [m for m in moves if m[0].nbytes]
        dense = [p for p in dense if p.nbytes]
        if not moves and not dense:
            return None
        all_others = set(self._others()) if dense else set()
        to = {move[2] for move in moves if move[1] == self.rank} | all_others
        of = {move[1] for move in moves if move[2] == self.rank} | all_others
        if lane == ROUTES:
            self._order.issued(current.slot.name, current.step, to, of)

        tables = {part.name: self._dense_table(current, part) for part in dense}
        targets, expected = self._targets(current, moves)
        expected += [(table.data_ptr(), table.nbytes) for table in tables.values()]

        def post(comm: Communicator, stream: int) -> None:
            for part in dense:
                table, staged = tables[part.name], current.staged[part.name]
                comm.all_gather(staged.data_ptr(), table.data_ptr(), part.nbytes, stream)
            for part, source, destination, offset, nbytes in moves:
                if source == self.rank:
                    address = current.staged[part.name].data_ptr() + offset
                    comm.send(address, nbytes, destination, stream)
                else:
                    comm.receive(targets[part.name, source] + offset, nbytes, source, stream)

        event = self._run(lane, current, tuple(sorted(to | of)), post, expected)
        if event is not None:
            place = (current.slot.name, current.number % 2)
            self._under_way.setdefault(place, []).append(event)
        return event

    def _targets(
        self, current: Generation, moves: Sequence[_Move]
    ) -> tuple[dict[tuple[str, int], int], list[tuple[int, int]]]:
        """Return addresses by part and source, and (address, bytes) of what is received there, from first to last."""
        targets: dict[tuple[str, int], int] = {}
        bounds: dict[tuple[str, int], tuple[int, int]] = {}
        for part, source, _, start, nbytes in moves:
            if source == self.rank:
                continue
            key = (part.name, source)
            if key not in targets:
                targets[key] = self._target(current, part, source).data_ptr()
            first, end = bounds.get(key, (start, start))
            bounds[key] = min(first, start), max(end, start + nbytes)
        spans = [(targets[key] + first, end - first) for key, (first, end) in bounds.items()]
        return targets, spans

    def _target(self, current: Generation, part: PartSpec, source: int) -> Tensor:
        """The tensor that a source's part is received into."""
        if self._is_dense(part):
            return self._dense_table(current, part)[source]
        return self._buffer("received", current.slot.name, part, current.number, source)

    def _dense_table(self, current: Generation, part: PartSpec) -> Tensor:
        table = PartSpec(part.name, (self.world_size, *part.shape), part.dtype)
        return self._buffer("dense", current.slot.name, table, current.number)

    def _buffer(
        self, kind: str, slot: str, part: PartSpec, generation: int, source: int = -1
    ) -> Tensor:
        """Memory of a part, one of two per slot, apart for captures; grows, never shrinks.

        The tensor is kept, so whoever hands it out detaches it.
        """
        captured = torch.cuda.is_current_stream_capturing()
        key = (kind, slot, part.name, source, generation % 2, captured)
        layout = (part.shape, part.dtype)
        known = self._views.get(key)
        if known is not None and known[0] == layout:
            return known[1]
        memory = self._memory.get(key)
        if memory is None or memory.numel() < part.nbytes:
            if memory is not None and captured:
                self._outgrown.append(memory)  # graphs work on it
            elif memory is not None:
                for stream in (self._current_stream(), *(x.stream for x in self._lanes.values())):
                    still_used(memory, stream)
            memory = torch.empty(part.nbytes, dtype=torch.uint8, device=self.device)
            self._memory[key] = memory
        view = memory[: part.nbytes].view(part.dtype).view(part.shape)
        self._views[key] = layout, view
        return view
