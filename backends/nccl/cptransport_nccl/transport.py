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
* Without routes a receiver knows a message only when it asks for it, in any order of slots and
  sources, while NCCL matches messages of a pair in the order they are sent. So such a slot has a
  lane (communicator and stream) of its own per source, on which that rank sends and all others
  receive: nobody's receive is ever behind a send of its own, and what a send waits for are takes of
  its own and earlier generations of the slot. NCCL takes a small message off the sender whether it
  is received or not: that it was, the receiver's host says through the group's store, and the
  sender's ``stage`` two generations later looks there.

Lanes are made when a slot first needs them, in its ``stage``, and connect to all peers at once, so
that no other verb waits for a connection.

Memory: staged and received tensors are double-buffered; ``stage`` of g makes the current stream
wait for the sends of g-2, and every group waits for the current stream, so receives of g cannot
overtake readers of g-2. Captures have buffers of their own.

Waits inside NCCL end by the watchdog: it aborts our communicators, which ends their kernels, and
the next verb raises.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.backend import ControlPlane, Generation, TransportBase, group_store
from cptransport.errors import (
    BackendUnavailableError,
    PeerFailedError,
    TransportError,
    TransportTimeoutError,
)
from cptransport.transport import Capabilities, PartSpec
from cptransport_nccl.library import Communicator, NcclError, unique_id
from cptransport_nccl.notes import Notes
from cptransport_nccl.watchdog import Watchdog, Work

__all__ = ["CAPABILITIES", "NcclTransport", "create"]

CAPABILITIES = Capabilities(device_types=("cuda",), cuda_graph=True, cross_host=True)

#: The lane of everything with routes, and of barriers.
_ROUTES = "routes"

#: (part, source, destination, first row or None for the whole part, number of rows)
_Move = tuple[PartSpec, int, int, int, int]


@dataclass
class _Traffic:
    """What has been issued for one generation.

    Attributes:
        captured: in a graph capture; its events mean nothing outside.
        received: the receives of the routes were issued.
        done: events after everything issued.
        arrived: event after the receives of the routes.
        asked: source -> event after the receives of its parts without routes.
    """

    captured: bool
    received: bool = False
    done: list[torch.cuda.Event] = field(default_factory=list)
    arrived: torch.cuda.Event | None = None
    asked: dict[int, torch.cuda.Event | None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Lane:
    """A communicator and the stream that its work is on."""

    communicator: Communicator
    stream: torch.cuda.Stream


class NcclTransport(TransportBase):
    """One rank's end; see the module docstring."""

    def __init__(
        self,
        control: ControlPlane,
        device: torch.device,
        timeout_s: float,
        identity: Callable[[str], bytes],
        notes: Notes,
    ) -> None:
        super().__init__(
            "nccl", device=device, control=control, timeout_s=timeout_s, capabilities=CAPABILITIES
        )
        self._identity = identity
        self._notes = notes
        self._memory: dict[tuple[str, ...], Tensor] = {}
        self._traffic: dict[tuple[str, int], _Traffic] = {}
        self._error: BaseException | None = None
        self._lanes: dict[str, _Lane] = {}
        self._barriers = 0
        self._token = torch.zeros(2, dtype=torch.uint8, device=device)
        self._watchdog = Watchdog(timeout_s, self._failure, self._late, self._expire)
        try:
            self._lane(_ROUTES)
        except BaseException:
            self._close(broken=True)
            raise

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        name, number = current.slot.name, current.number
        stream = torch.cuda.current_stream(self.device)
        captured = torch.cuda.is_current_stream_capturing()
        if retired is not None:
            self._receive_routes(retired)
        old = self._traffic.pop((name, number - 2), None)
        for event in old.done if old and old.captured == captured else ():
            stream.wait_event(event)
        if not captured:
            self._await_takes(current)
        self._traffic[name, number] = _Traffic(captured)
        if any(part.routes is None for part in current.slot.parts):
            for source in range(self.world_size):
                self._lane(f"{name}/{source}", source)
        return {
            part.name: self._buffer("staged", name, part, number, ()) for part in current.slot.parts
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
        traffic = self._traffic[current.slot.name, current.number]
        receive = not traffic.received
        traffic.received = True
        moves = [
            move
            for part in current.slot.parts
            for move in self._moves_of(part)
            if move[1] == self.rank or receive
        ]
        dense = [p for p in current.slot.parts if receive and self._is_dense(p)]
        event = self._issue(_ROUTES, current, moves, dense)
        if receive:
            traffic.arrived = event
        free = [part for part in current.slot.parts if part.routes is None]
        others = [rank for rank in to if rank != self.rank]
        sends: list[_Move] = [(part, self.rank, peer, 0, -1) for part in free for peer in others]
        self._issue(f"{current.slot.name}/{self.rank}", current, sends, [])
        if free and not traffic.captured:
            self._notes.expect(current.slot.name, current.number, others)

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        traffic = self._traffic[current.slot.name, current.number]
        stream = torch.cuda.current_stream(self.device)
        self._receive_routes(current)
        if traffic.arrived is not None:
            stream.wait_event(traffic.arrived)
        # All parts of a source at once, as it sends them.
        free = [part for part in current.slot.parts if part.routes is None]
        for source in dict.fromkeys(source for part, source in wanted if part.routes is None):
            if source not in traffic.asked:
                moves: list[_Move] = [(part, source, self.rank, 0, -1) for part in free]
                lane = f"{current.slot.name}/{source}"
                traffic.asked[source] = self._issue(lane, current, moves, [])
                if not traffic.captured:
                    self._notes.took(current.slot.name, current.number, source)
            event = traffic.asked[source]
            if event is not None:
                stream.wait_event(event)
        return {(part.name, source): self._target(current, part, source) for part, source in wanted}

    def _barrier(self) -> None:
        def post(comm: Communicator, stream: int) -> None:
            comm.all_reduce(self._token.data_ptr(), 1, stream)

        self._barriers += 1
        event = self._run(_ROUTES, None, tuple(self._others()), post)
        torch.cuda.current_stream(self.device).wait_event(event)

    def _reported(self) -> BaseException | None:
        return self._error

    def _interrupt(self) -> None:
        for lane in tuple(self._lanes.values()):
            lane.communicator.abort()

    def _close(self, broken: bool) -> None:
        try:
            if not broken:
                for lane in self._lanes.values():
                    lane.stream.synchronize()
                if self._error is None:
                    for lane in self._lanes.values():
                        lane.communicator.destroy()
        except (NcclError, TransportError):
            pass  # a peer is gone; ours goes too
        finally:
            self._watchdog.stop()
            self._interrupt()
            self._lanes.clear()
            self._traffic.clear()
            self._memory.clear()

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self.world_size) if rank != self.rank)

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
            rows = part.rows(source, destination)
            if rows is None:
                moves.append((part, source, destination, 0, -1))
            else:
                moves += [(part, source, destination, a, n) for a, n in runs(rows)]
        return moves

    def _receive_routes(self, current: Generation) -> None:
        """Issue the receives of a generation's routes, if ``publish`` has not."""
        traffic = self._traffic[current.slot.name, current.number]
        if traffic.received:
            return
        traffic.received = True
        parts = [p for p in current.slot.parts if p.routes is not None]
        dense = [p for p in parts if self._is_dense(p)]
        if dense:
            raise TransportError(
                self._where(current)
                + f": part {dense[0].name!r} goes from every rank to every other, so publish comes first"
            )
        moves = [m for part in parts for m in self._moves_of(part) if m[2] == self.rank]
        traffic.arrived = self._issue(_ROUTES, current, moves, [])

    def _issue(
        self,
        lane: str,
        current: Generation,
        moves: Sequence[_Move],
        dense: Sequence[PartSpec],
    ) -> torch.cuda.Event | None:
        """Issue moves and all-gathers as one group; return the event after it, None if it is empty."""
        moves = [m for m in moves if m[0].nbytes]
        dense = [p for p in dense if p.nbytes]
        if not moves and not dense:
            return None
        peers = {m[1] if m[2] == self.rank else m[2] for m in moves}
        peers |= set(self._others()) if dense else set()

        def post(comm: Communicator, stream: int) -> None:
            for part in dense:
                table = self._dense_table(current, part)
                staged = current.staged[part.name]
                comm.all_gather(staged.data_ptr(), table.data_ptr(), part.nbytes, stream)
            for part, source, destination, first, count in moves:
                nbytes = part.nbytes if count < 0 else count * part.row_nbytes
                offset = first * part.row_nbytes
                if source == self.rank:
                    address = current.staged[part.name].data_ptr() + offset
                    comm.send(address, nbytes, destination, stream)
                else:
                    address = self._target(current, part, source).data_ptr() + offset
                    comm.receive(address, nbytes, source, stream)

        event = self._run(lane, current, tuple(sorted(peers)), post)
        self._traffic[current.slot.name, current.number].done.append(event)
        return event

    def _run(
        self,
        lane: str,
        current: Generation | None,
        peers: tuple[int, ...],
        post: Callable[[Communicator, int], None],
    ) -> torch.cuda.Event:
        """Run NCCL calls on a lane, after the current stream's work so far."""
        stream = torch.cuda.current_stream(self.device)
        comm, communication = self._lanes[lane].communicator, self._lanes[lane].stream
        communication.wait_stream(stream)
        what = self._where(current) if current else "barrier"
        with self._mapped(what), torch.cuda.device(self.device), comm.group(what):
            post(comm, communication.cuda_stream)
        event = torch.cuda.Event()
        event.record(communication)
        if torch.cuda.is_current_stream_capturing():
            stream.wait_event(event)  # a capture must not leave work that nothing waits for
        else:
            slot = current.slot.name if current else None
            number = current.number if current else self._barriers
            self._watchdog.watch(communication.cuda_stream, slot, number, peers)
        return event

    def _lane(self, name: str, sender: int | None = None) -> None:
        """Make a lane at its first use and connect it; collective then.

        Args:
            name: of the lane.
            sender: the only rank that sends on it; None: all do.
        """
        if name in self._lanes or self.world_size == 1:
            return
        identity = self._identity(name)

        def missing() -> list[int]:
            return list(self._others())

        def wait(arrived: Callable[[float], bool], what: str) -> None:
            self._wait(arrived, what, missing=missing)

        with self._mapped("connect"), torch.cuda.device(self.device):
            comm = Communicator(identity, self.rank, self.world_size, wait)
        lane = self._lanes[name] = _Lane(comm, torch.cuda.Stream(self.device))

        def post(comm: Communicator, stream: int) -> None:
            for peer in self._others():
                if sender in (None, self.rank):
                    comm.send(self._token.data_ptr(), 1, peer, stream)
                if sender in (None, peer):
                    comm.receive(self._token.data_ptr() + 1, 1, peer, stream)

        self._run(name, None, tuple(self._others()), post)
        if name == _ROUTES:
            table = torch.empty(self.world_size, dtype=torch.uint8, device=self.device)

            def post_all(comm: Communicator, stream: int) -> None:
                comm.all_gather(self._token.data_ptr(), table.data_ptr(), 1, stream)
                comm.all_reduce(self._token.data_ptr(), 1, stream)

            self._run(name, None, tuple(self._others()), post_all)
            still_used(table, lane.stream)
        self._wait(
            lambda seconds: self._drained(lane.stream, seconds),
            "connecting to the peers",
            missing=missing,
        )

    def _drained(self, stream: torch.cuda.Stream, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not stream.query():
            if self._error is not None:
                raise self._error
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    @contextmanager
    def _mapped(self, what: str) -> Iterator[None]:
        """Map NCCL's errors to ours, with their cause."""
        try:
            yield
        except NcclError as error:
            if self._error is not None:
                raise self._error from error
            self.control.check()
            raise PeerFailedError(f"rank {self.rank}: {what}: {error}") from error

    def _failure(self) -> BaseException | None:
        """What peers or NCCL report while work is pending; runs on the watchdog's thread."""
        try:
            self.control.check()
        except PeerFailedError as error:
            return error
        for lane in tuple(self._lanes.values()):
            problem = lane.communicator.failure()
            if problem is not None:
                return PeerFailedError(f"NCCL reports: {problem}")
        return None

    def _late(self, work: Work) -> None:
        """Tell peers that this rank is there; runs on the watchdog's thread."""
        self._notes.waits(work.name)

    def _expire(self, work: Work, error: BaseException | None) -> None:
        """Remember why, then abort; runs on the watchdog's thread."""
        if error is None:
            place = f"slot {work.slot!r}, generation {work.generation}" if work.slot else "barrier"
            peers = self._notes.absent(work.name, work.peers)
            error = TransportTimeoutError(
                f"rank {self.rank}: {place}: waited {self.timeout_s:g} s inside NCCL for "
                + (f"rank {peers[0]}" if len(peers) == 1 else f"one of ranks {peers}"),
                peer=peers[0] if len(peers) == 1 else None,
                slot=work.slot,
                generation=work.generation if work.slot else None,
                waited_s=self.timeout_s,
                missing=peers,
            )
        self._error = error
        self._interrupt()

    def _target(self, current: Generation, part: PartSpec, source: int) -> Tensor:
        """The tensor that a source's part is received into."""
        if self._is_dense(part):
            return self._dense_table(current, part)[source]
        key = (str(source),)
        return self._buffer("received", current.slot.name, part, current.number, key)

    def _dense_table(self, current: Generation, part: PartSpec) -> Tensor:
        table = PartSpec(part.name, (self.world_size, *part.shape), part.dtype)
        return self._buffer("dense", current.slot.name, table, current.number, ())

    def _buffer(
        self, kind: str, slot: str, part: PartSpec, generation: int, more: tuple[str, ...]
    ) -> Tensor:
        """Memory of a part, one of two per slot, apart for captures; grows, never shrinks."""
        captured = "captured" if torch.cuda.is_current_stream_capturing() else "eager"
        key = (kind, slot, part.name, str(generation % 2), captured, *more)
        memory = self._memory.get(key)
        if memory is None or memory.numel() < part.nbytes:
            if memory is not None:
                for lane in self._lanes.values():
                    still_used(memory, lane.stream)
            memory = torch.empty(part.nbytes, dtype=torch.uint8, device=self.device)
            self._memory[key] = memory
        return memory[: part.nbytes].view(part.dtype).view(part.shape)


def still_used(memory: Tensor, stream: torch.cuda.Stream) -> None:
    """Keep memory that may be freed soon until a stream has done its work so far."""
    memory.record_stream(stream)


def runs(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Cut ascending rows into runs ``(first, count)``."""
    found: list[tuple[int, int]] = []
    for row in rows:
        if found and found[-1][0] + found[-1][1] == row:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((row, 1))
    return found


def create(
    group: Any,
    device: Any,
    timeout_s: float,
    kind: type[NcclTransport] = NcclTransport,
    **options: Any,
) -> NcclTransport:
    """Make the transport of a group; collective.

    Args:
        group, device, timeout_s: as ``BackendSpec.create``.
        kind: the class to make; backends may build on this one.

    Raises:
        BackendUnavailableError: two ranks share a GPU, or NCCL cannot connect them.
    """
    device = torch.device(device)
    if device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.init()
    control = ControlPlane(
        group_store(group, "control"), dist.get_rank(group), dist.get_world_size(group), timeout_s
    )
    places = control.exchange(_place(device), "nccl: devices of the ranks")
    shared = {p: [r for r, q in enumerate(places) if q == p] for p in places if places.count(p) > 1}
    if shared:
        ranks = next(iter(shared.values()))
        raise BackendUnavailableError(
            f"ranks {ranks} share one GPU, which NCCL refuses; give every rank a GPU of its own, or a "
            "NCCL_HOSTID of its own (with NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1; slow, for tests), "
            "or use gloo or cupy_ipc"
        )

    def identity(name: str) -> bytes:
        mine = unique_id().hex() if control.rank == 0 else ""
        return bytes.fromhex(control.exchange(mine, f"nccl: id of communicator {name!r}")[0])

    try:
        notes = Notes(group_store(group, "nccl notes"), control.rank)
        return kind(control, device, timeout_s, identity, notes)
    except (NcclError, PeerFailedError) as error:
        raise BackendUnavailableError(f"NCCL could not connect the group: {error}") from error


def _place(device: torch.device) -> str:
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host}/{torch.cuda.get_device_properties(device).uuid}"
