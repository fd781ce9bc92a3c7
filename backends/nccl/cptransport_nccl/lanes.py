# SPDX-License-Identifier: Apache-2.0
"""Lanes: NCCL communicators with streams of their own, how work gets on them, and how waits inside NCCL end.

A lane is made when it is first needed, all ranks together, and connects to all peers at once, so that
no verb waits for a connection. The watchdog aborts all lanes when work, or a call into NCCL, passes its
deadline or a peer has failed; that ends NCCL's kernels and calls, and this verb or the next one raises.

In a capture work goes on the current stream itself: it has to be waited for at once there, so a stream of its
own would win nothing.
"""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Thread

import torch
from torch import Tensor

from cptransport.backend import (
    BackgroundCall,
    ControlPlane,
    Generation,
    LimitedCalls,
    TransportBase,
    exclusive_stream,
    release_stream,
)
from cptransport.errors import PeerFailedError, TransportError, TransportTimeoutError
from cptransport.transport import Capabilities
from cptransport_nccl.library import Communicator, NcclError, Origin, join_within
from cptransport_nccl.notes import Notes
from cptransport_nccl.order import Order
from cptransport_nccl.pulse import Pulse
from cptransport_nccl.void import void
from cptransport_nccl.watchdog import Watchdog, Work, work_name

__all__ = ["BARRIERS", "ROUTES", "LanesTransport", "still_used"]

#: The lane of everything with routes, and that of barriers, which may come between any two verbs.
ROUTES, BARRIERS = "routes", "barriers"

#: How long peers are asked who failed, when NCCL says only that something did.
_WORDS_S = 1.0
#: What ranks sign when NCCL says that something failed.
_LOST = "lost"
#: How long ``close`` waits for what was aborted.
_ABORT_S = 1.0


@dataclass(frozen=True)
class _Lane:
    """A communicator and the stream that its work is on."""

    communicator: Communicator
    stream: torch.cuda.Stream
    #: Recorded anew for each piece of work: where in the caller's stream it begins.
    _begin: torch.cuda.Event

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Wait for what a stream was given so far."""
        self._begin.record(stream)
        self.stream.wait_event(self._begin)


class LanesTransport(TransportBase):
    """A transport's lanes; see the module docstring.

    Args:
        control, device, timeout_s, capabilities: as ``TransportBase``.
        identity: gives the id of a new communicator; collective.
        notes: what hosts tell each other.
    """

    def __init__(
        self,
        control: ControlPlane,
        device: torch.device,
        timeout_s: float,
        capabilities: Capabilities,
        identity: Callable[[], bytes],
        notes: Notes,
    ) -> None:
        super().__init__(
            "nccl", device=device, control=control, timeout_s=timeout_s, capabilities=capabilities
        )
        self._identity = identity
        self._notes = notes
        self._order = Order(self.rank, self.world_size)
        self._error: BaseException | None = None
        self._origin: Origin | None = None
        self._lanes: dict[str, _Lane] = {}
        self._aborts: list[Thread] = []
        self._barriers = 0
        self._captured = False
        #: What NCCL receives is void from now on: its kernels leave anything when they are ended.
        self._ended = torch.zeros(1, dtype=torch.int64).pin_memory()
        self._ended_view = ctypes.c_int64.from_address(self._ended.data_ptr())
        #: What is sent, received and gathered while connecting.
        self._token = torch.zeros(2 + self.world_size, dtype=torch.uint8, device=device)
        self._watchdog = Watchdog(
            timeout_s, self._failure, self._late, self._expire, self._compare_order
        )
        # Loaded before anything waits on the device.
        with torch.cuda.device(device):
            void(torch.cuda.current_stream(device), self._ended, [(self._token.data_ptr(), 1)])
        try:
            self._connect({ROUTES: None})
        except BaseException:
            self._close(broken=True)
            raise

    def _barrier(self) -> None:
        self._connect({BARRIERS: None})
        self._barriers += 1
        event = self._run(BARRIERS, None, tuple(self._others()), self._post_barrier)
        if event is not None:
            self._current_stream().wait_event(event)

    def _post_barrier(self, comm: Communicator, stream: int) -> None:
        comm.all_reduce(self._token.data_ptr(), 1, stream)

    def _reported(self) -> BaseException | None:
        return self._error

    @property
    def aborting(self) -> bool:
        """Whether NCCL has not yet ended what was aborted, and may still write to memory."""
        return any(thread.is_alive() for thread in self._aborts)

    def _interrupt(self) -> None:
        """Begin to abort all lanes, which ends their kernels. The error is not held up until that is done.

        After it no verb comes to a lane; what was handed out is read behind events of the lanes'
        streams; and what NCCL may still write to lives as long as that takes.
        """
        self._ended_view.value = 1
        started = [communicator.abort(self) for communicator in self._communicators()]
        self._aborts += [thread for thread in started if thread is not None]

    def _drain(self) -> None:
        """Let issued work end, then compare its order with the peers' once more."""
        for lane in self._lanes.values():
            lane.stream.synchronize()  # the watchdog ends it
        if self._captured and not torch.cuda.is_current_stream_capturing():
            # Replays may be under way on any stream, and nobody watches them.
            wait = LimitedCalls("cpt-nccl-drain")
            with suppress(RuntimeError):  # CUDA allows no such wait while another thread captures
                wait(partial(torch.cuda.synchronize, self.device), self.timeout_s)
        if self._error is None and self._lanes:
            try:
                texts = self.control.exchange(self._order.text(), "nccl: closing")
            except (PeerFailedError, TransportTimeoutError):
                texts = self._notes.orders(self.world_size)  # a peer is gone; it may have said why
            self._note_strays(texts)

    def _close(self, broken: bool) -> None:
        ending: list[Thread | None] = []
        # What was captured is freed when its last graph has gone, which nobody can wait for.
        if not (broken or self._captured):
            ending += [communicator.destroy() for communicator in self._communicators()]
        try:
            join_within(filter(None, ending), self.timeout_s)
        finally:
            self._watchdog.stop()
            self._interrupt()
            if not torch.cuda.is_current_stream_capturing():
                # Else NCCL waits for the graph, and the graph for this thread.
                join_within(self._aborts, _ABORT_S)
                for lane in self._lanes.values():
                    release_stream(lane.stream)
            self._lanes.clear()

    def _communicators(self) -> list[Origin | Communicator]:
        made: list[Origin | Communicator] = [x.communicator for x in tuple(self._lanes.values())]
        return made if self._origin is None else [*made, self._origin]

    def _others(self) -> Iterable[int]:
        return (rank for rank in range(self.world_size) if rank != self.rank)

    def _current_stream(self) -> torch.cuda.Stream:
        """Return the current stream; a verb on a GPU has found it already."""
        return self._stream or torch.cuda.current_stream(self.device)

    def _run(
        self,
        lane: str,
        current: Generation | None,
        peers: tuple[int, ...],
        post: Callable[[Communicator, int], None],
        expected: Sequence[tuple[int, int]] = (),
    ) -> torch.cuda.Event | None:
        """Run NCCL calls on a lane, after the current stream's work so far.

        Args:
            lane: which.
            current: the generation that they belong to; None: none, as a barrier.
            peers: ranks that they wait for.
            post: makes the calls.
            expected: (address, bytes) of what they receive into; NaN if they are ended.

        Returns:
            Event after it; None in a capture, where it is on the current stream.
        """
        communicator, stream = self._lanes[lane].communicator, self._lanes[lane].stream
        capturing = torch.cuda.is_current_stream_capturing()
        if capturing:
            self._captured = True
            stream = self._current_stream()
        else:
            self._lanes[lane].follow(self._current_stream())
        slot = current.slot.name if current else None
        number = current.number if current else self._barriers
        try:
            with self._watchdog.call(slot, number, peers), communicator.group():
                post(communicator, stream.cuda_stream)
        except NcclError as error:
            what = self._where(current) if current else "barrier"
            raise self._failed(what, error, work_name(slot, number), peers) from error
        if expected:
            void(stream, self._ended, expected)
        if capturing:
            return None
        event = torch.cuda.Event()
        event.record(stream)
        self._watchdog.watch(stream.cuda_stream, slot, number, peers)
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

    def _connect(self, senders: Mapping[str, int | None]) -> None:
        """Make lanes at their first use and connect them; collective then.

        Args:
            senders: by name of a lane, the only rank that sends on it; None: all do.
        """
        new = [name for name in senders if name not in self._lanes]
        if not new or self.world_size == 1:
            return
        if torch.cuda.is_current_stream_capturing():
            raise TransportError(
                f"the first use of {new[0]!r} connects to the peers, which a capture cannot hold"
            )
        others = tuple(self._others())
        pulse = Pulse(self._notes, new[0], others, self._wait)
        try:
            with torch.cuda.device(self.device):
                self._make(new, senders, pulse)
        except NcclError as error:
            raise self._failed("connect", error, f"connect {new[0]}", others) from error
        pulse.connected()

    def _make(self, new: Sequence[str], senders: Mapping[str, int | None], pulse: Pulse) -> None:
        origin = self._meet(new[0], pulse)
        for name in new:
            # What carries little needs no more than one channel.
            comm = origin.split(None if name == ROUTES else 1, pulse.wait)
            stream = exclusive_stream(self.device)
            self._lanes[name] = _Lane(comm, stream, torch.cuda.Event())
        lanes = {name: self._lanes[name] for name in new}
        for lane in lanes.values():
            lane.follow(self._current_stream())
        # NCCL holds the host up in there, until it is aborted if need be.
        first = BackgroundCall(partial(self._use_first, lanes, senders), "cpt-nccl-connect")
        try:
            pulse.wait(first.ended, "connecting to the peers")
        except BaseException:
            first.give_up()
            raise
        first.answer()
        for lane in lanes.values():
            pulse.wait(partial(self._drained, lane), "connecting to the peers")

    def _meet(self, what: str, pulse: Pulse) -> Origin:
        """Return what lanes are split off, when all ranks are there: NCCL would hold up those that are."""
        if self._origin is None:
            self._origin = Origin(self._identity(), self.rank, self.world_size)
            self._origin.complete(pulse.wait)
        else:
            self.control.exchange("", f"nccl: connect {what}")
        return self._origin

    def _use_first(self, lanes: Mapping[str, _Lane], senders: Mapping[str, int | None]) -> None:
        """Run on lanes what connects all that will be needed."""
        sent, received, gathered = (self._token.data_ptr() + i for i in range(3))
        with torch.cuda.device(self.device):
            for name, lane in lanes.items():
                comm, stream = lane.communicator, lane.stream.cuda_stream
                with comm.group():
                    if name == BARRIERS:
                        self._post_barrier(comm, stream)
                        continue
                    for peer in self._others():
                        if senders[name] in (None, self.rank):
                            comm.send(sent, 1, peer, stream)
                        if senders[name] in (None, peer):
                            comm.receive(received, 1, peer, stream)
                if name == ROUTES:
                    with comm.group():
                        comm.all_gather(sent, gathered, 1, stream)

    def _drained(self, lane: _Lane, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not lane.stream.query():
            if self._error is not None:
                raise self._error
            problem = lane.communicator.failure()
            if problem is not None:
                raise NcclError(problem)
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0005)
        return True

    def _failed(
        self, what: str, error: NcclError, work: str, peers: Sequence[int]
    ) -> BaseException:
        """Return what an error of NCCL's means."""
        if error.local and self._error is None:
            problem = TransportError(f"rank {self.rank}: {what}: {error}")
            self._break(problem)
            return problem
        return self._lost(what, error, work, peers)

    def _lost(
        self,
        what: str,
        problem: object,
        work: str,
        peers: Sequence[int],
        deadline: float = math.inf,
    ) -> BaseException:
        """Find out who failed when NCCL says that something did; on the caller's or the watchdog's thread.

        NCCL names nobody, and notices a closed connection before the peers have said anything. They
        get a moment for it, as far as the work's deadline leaves one: what one of them raised is the
        cause, else those did it who do not even say that they see it, too: those that the work waits for, or
        if all of these say so, others. Who has not come to this piece of work says less: that rank may itself
        wait for the one that is gone. A rank that waits for nobody says nothing.
        """
        if self._error is None:
            self._notes.waits(work)
            self._notes.sign(_LOST, "here")
        end = min(time.monotonic() + min(_WORDS_S, self.timeout_s / 2), deadline)
        while self._error is None:
            try:
                self.control.check()
            except PeerFailedError as error:
                return error
            if time.monotonic() > end:
                break
            time.sleep(0.05)
        if self._error is not None:
            return self._error
        others = list(self._others())
        signs = self._notes.signs(_LOST, others)
        silent = [rank for rank, sign in zip(others, signs, strict=True) if not sign]
        gone = [rank for rank in peers if rank in silent] or silent or others
        who = f"rank {gone[0]}" if len(gone) == 1 else f"one of ranks {gone}"
        peer = gone[0] if len(gone) == 1 else None
        return PeerFailedError(
            f"rank {self.rank}: {what}: {problem}; no word from {who}", peer=peer
        )

    def _failure(self, work: Work) -> BaseException | None:
        """What peers or NCCL report while work is pending; runs on the watchdog's thread."""
        try:
            self.control.check()
        except PeerFailedError as error:
            return error
        for lane in tuple(self._lanes.values()):
            problem = lane.communicator.failure()
            if problem is not None:
                deadline = work.started + self.timeout_s
                return self._lost("NCCL reports", problem, work.name, work.peers, deadline)
        return None

    def _late(self, work: Work) -> None:
        """Tell peers that this rank is there; runs on the watchdog's thread."""
        self._notes.waits(work.name)

    def _expire(self, work: Work, error: BaseException | None) -> None:
        """Remember why, then abort; runs on the watchdog's thread."""
        self._notes.sign(_LOST, "here")  # peers see connections close before they hear why
        if error is None:
            self._compare_order()
            error = self._error
        if error is None:
            place = f"slot {work.slot!r}, generation {work.generation}" if work.slot else "barrier"
            peers = self._notes.absent(work.name, work.peers) or list(work.peers)
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
