# SPDX-License-Identifier: Apache-2.0
"""Lanes: NCCL communicators with streams of their own, how work gets on them, and how waits inside NCCL end.

A lane is made when it is first needed, all ranks together, and connects to all peers at once, so that
no verb waits for a connection. The watchdog aborts all lanes when work passes its deadline or a peer
has failed; that ends NCCL's kernels, and the next verb raises.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread

import torch
from torch import Tensor

from cptransport.backend import ControlPlane, Generation, TransportBase
from cptransport.errors import PeerFailedError, TransportError, TransportTimeoutError
from cptransport.transport import Capabilities
from cptransport_nccl.library import Communicator, NcclError
from cptransport_nccl.notes import Notes
from cptransport_nccl.order import Order
from cptransport_nccl.watchdog import Watchdog, Work

__all__ = ["BARRIERS", "ROUTES", "LanesTransport", "still_used"]

#: The lane of everything with routes, and that of barriers, which may come between any two verbs.
ROUTES, BARRIERS = "routes", "barriers"

#: How long an abort of lanes may hold up this rank.
_ABORT_S = 2.0
#: Transports that NCCL still works for; their memory stays.
_kept: list[LanesTransport] = []


@dataclass(frozen=True)
class _Lane:
    """A communicator and the stream that its work is on."""

    communicator: Communicator
    stream: torch.cuda.Stream


class LanesTransport(TransportBase):
    """A transport's lanes; see the module docstring.

    Args:
        control, device, timeout_s, capabilities: as ``TransportBase``.
        identity: gives the id of a new communicator, by name; collective.
        notes: what hosts tell each other.
    """

    def __init__(
        self,
        control: ControlPlane,
        device: torch.device,
        timeout_s: float,
        capabilities: Capabilities,
        identity: Callable[[str], bytes],
        notes: Notes,
    ) -> None:
        super().__init__(
            "nccl", device=device, control=control, timeout_s=timeout_s, capabilities=capabilities
        )
        self._identity = identity
        self._notes = notes
        self._order = Order(self.rank, self.world_size)
        self._error: BaseException | None = None
        self._lanes: dict[str, _Lane] = {}
        self._aborts: list[Thread] = []
        self._barriers = 0
        self._captured = False
        self._token = torch.zeros(2, dtype=torch.uint8, device=device)
        self._watchdog = Watchdog(
            timeout_s, self._failure, self._late, self._expire, self._compare_order
        )
        try:
            self._lane(ROUTES)
        except BaseException:
            self._close(broken=True)
            raise

    def _barrier(self) -> None:
        if BARRIERS not in self._lanes and torch.cuda.is_current_stream_capturing():
            raise TransportError(
                "the first barrier connects to the peers, which a capture cannot hold"
            )
        self._lane(BARRIERS)
        self._barriers += 1
        event = self._run(BARRIERS, None, tuple(self._others()), self._post_barrier)
        torch.cuda.current_stream(self.device).wait_event(event)

    def _post_barrier(self, comm: Communicator, stream: int) -> None:
        comm.all_reduce(self._token.data_ptr(), 1, stream)

    def _reported(self) -> BaseException | None:
        return self._error

    @property
    def aborting(self) -> bool:
        """Whether NCCL has not yet ended what was aborted, and may still write to memory."""
        return any(thread.is_alive() for thread in self._aborts)

    def _interrupt(self) -> None:
        """Abort all lanes and wait a little; their kernels have most likely ended then."""
        started = (lane.communicator.abort() for lane in tuple(self._lanes.values()))
        self._aborts += [thread for thread in started if thread is not None]
        if torch.cuda.is_current_stream_capturing():
            return  # NCCL waits for the graph, and the graph for this thread
        deadline = time.monotonic() + _ABORT_S
        for thread in self._aborts:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _drain(self) -> None:
        """Let issued work end, then compare its order with the peers' once more."""
        for lane in self._lanes.values():
            lane.stream.synchronize()  # the watchdog ends it
        if self._error is None and self._lanes:
            try:
                texts = self.control.exchange(self._order.text(), "nccl: closing")
            except (PeerFailedError, TransportTimeoutError):
                texts = self._notes.orders(self.world_size)  # a peer is gone; it may have said why
            self._note_strays(texts)

    def _close(self, broken: bool) -> None:
        try:
            # What was captured is freed when its last graph has gone, which nobody can wait for.
            if not (broken or self._captured):
                for lane in self._lanes.values():
                    lane.communicator.destroy()
        except (NcclError, TransportError):
            pass  # a peer is gone; ours goes too
        finally:
            self._watchdog.stop()
            self._interrupt()
            if self.aborting:
                _kept.append(self)
            self._lanes.clear()

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self.world_size) if rank != self.rank)

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
            self._captured = True
            stream.wait_event(event)  # a capture must not leave work that nothing waits for
        else:
            slot = current.slot.name if current else None
            number = current.number if current else self._barriers
            self._watchdog.watch(communication.cuda_stream, slot, number, peers)
        return event

    def _compare_order(self) -> None:
        """Tell what this rank has sent and look at what others have; runs on the watchdog's thread."""
        self._notes.tell_order(self._order.text())
        self._note_strays(self._notes.orders(self.world_size))

    def _note_strays(self, texts: Iterable[str]) -> None:
        strays = self._order.strays(texts)
        if strays and self._error is None:
            self._error = TransportError(
                f"rank {self.rank} and ranks {strays} used slots in different orders, so that messages went to "
                "the wrong ones: some rank left a forward or a backward out (see join_backward), or uses slots "
                "in an order of its own"
            )

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

        first = self._post_barrier if name == BARRIERS else post
        self._run(name, None, tuple(self._others()), first)
        if name == ROUTES:
            table = torch.empty(self.world_size, dtype=torch.uint8, device=self.device)

            def post_all(comm: Communicator, stream: int) -> None:
                comm.all_gather(self._token.data_ptr(), table.data_ptr(), 1, stream)

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
            self._compare_order()
            error = self._error
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


def still_used(memory: Tensor, stream: torch.cuda.Stream) -> None:
    """Keep memory that may be freed soon until a stream has done its work so far."""
    memory.record_stream(stream)
