# SPDX-License-Identifier: Apache-2.0
"""``gloo``: ranks as processes, point-to-point messages of gloo; the embedded default on CPU.

The transport owns a gloo context beside the user's group, with its own deadline, so neither can
harm the other. Messages are bytes, so every dtype travels. CUDA tensors are staged through host
memory and the verbs then block the host.

Order: gloo delivers a message once its receive is posted. With routes, receives are posted at
``stage`` and sends at ``publish``; without, a receive is posted when it is asked for, so a message
that nobody takes shows as a send that does not end. Waits inside gloo cannot be cut short from
outside, so they run on a thread of the transport while the caller watches the clock and its peers;
when the transport breaks, ``_interrupt`` lets a tiny wait of its own expire, which makes gloo give
up the whole context and wakes that thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions, BarrierOptions

from cptransport.backend import BackendSpec
from cptransport.base import Generation, TransportBase
from cptransport.control import ControlPlane, group_store, require_group_member
from cptransport.errors import BackendUnavailableError, PeerFailedError, TransportTimeoutError
from cptransport.transport import TRANSPORT_API_VERSION, Capabilities, PartSpec

__all__ = ["BACKEND", "GlooTransport"]

_CAPABILITIES = Capabilities(
    device_types=("cpu", "cuda"), shared_device=True, cross_host=True, host_staged=True
)

_TAG_GENERATIONS = 256  # of one part that tags tell apart; two are under way at most
_TAG_STEPS = 64  # op steps that tags tell apart: a rank that left a step out is not understood
_TAG_MOVES = 1 << 30  # activations; far above what slots use

_BARRIER = "barrier"
_STOP_S = 1.0  # limit of waiting for a thread that has been interrupted


class _Waiter:
    """A thread that runs blocking calls one after the other, so that the caller can look up meanwhile."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="cpt-gloo-wait", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()

    def submit(self, call: Callable[[], None]) -> Callable[[float], bool]:
        """Start a call; the result waits at most the given seconds, says whether it ended, and raises its error."""
        done = threading.Event()
        errors: list[BaseException] = []

        def task() -> None:
            try:
                call()
            except BaseException as error:  # handed to the caller below
                errors.append(error)
            done.set()

        def ended(seconds: float) -> bool:
            if not done.wait(seconds):
                return False
            if errors:
                raise errors[0]
            return True

        self._tasks.put(task)
        return ended

    def stop(self) -> None:
        """End the thread. Whoever has a call under way interrupts it first.

        An interpreter that ends while a thread is on its way out of gloo aborts the process, so
        this waits for the thread; not for ever, since gloo has the last word.
        """
        self._tasks.put(None)
        self._thread.join(_STOP_S)


@dataclass
class _Message:
    """A message under way: whom it concerns, its memory, and gloo's work until it has been waited for (only once)."""

    peer: int
    payload: Tensor
    work: Any


@dataclass
class _Traffic:
    """What is under way for one generation."""

    sends: list[_Message] = field(default_factory=list)
    receives: dict[tuple[str, int], _Message] = field(default_factory=dict)


class GlooTransport(TransportBase):
    """One rank's end; see the module docstring."""

    def __init__(
        self, process_group: Any, control: ControlPlane, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(
            "gloo", device=device, control=control, timeout_s=timeout_s, capabilities=_CAPABILITIES
        )
        self._pg = process_group
        self._waiter = _Waiter()
        self._lanes: dict[tuple[str, str], int] = {}  # (slot, part) -> number, alike on all ranks
        self._rounds = 0
        self._memory: dict[tuple[str, ...], Tensor] = {}
        self._traffic: dict[tuple[str, int], _Traffic] = {}
        self._limit = timedelta(seconds=2 * timeout_s)  # gloo's own; ours expires first
        self._interrupted = False
        self._barriers = 0
        this = weakref.ref(self)
        self._at_exit = partial(_interrupt_at_exit, this)
        self._waiting = False
        atexit.register(self._at_exit)

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        name, number = current.slot.name, current.number
        for part in current.slot.parts:
            self._lanes.setdefault((name, part.name), len(self._lanes))
        old = self._traffic.pop((name, number - 2), None)
        if old is not None:
            self._finish(old.sends, f"generation {number - 2} was not taken", current)
            self._finish(
                list(old.receives.values()), f"generation {number - 2} did not come", current
            )
        traffic = self._traffic[name, number] = _Traffic()
        parity = str(number % 2)
        for part in current.slot.parts:
            for source in range(self.world_size):
                if part.routes is not None and self._moves(part, source, self.rank, ()):
                    self._post_receive(current, traffic, part, source)
        return {
            part.name: self._buffer(("staged", name, part.name, parity), part, self.device)
            for part in current.slot.parts
        }

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        traffic = self._traffic[current.slot.name, current.number]
        for part in current.slot.parts:
            targets = [r for r in range(self.world_size) if self._moves(part, self.rank, r, to)]
            if not targets:
                continue
            payload = current.staged[part.name].cpu()
            for rank in targets:
                message = as_bytes(payload, part.rows(self.rank, rank))
                tag = self._tag(current, part)
                work = self._post(partial(self._pg.send, [message], rank, tag), rank)
                traffic.sends.append(_Message(rank, message, work))

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        traffic = self._traffic[current.slot.name, current.number]
        for part, source in wanted:
            if (part.name, source) not in traffic.receives:
                self._post_receive(current, traffic, part, source)
        self._finish(
            [traffic.receives[part.name, source] for part, source in wanted],
            "parts " + ", ".join(sorted({repr(part.name) for part, _ in wanted})) + " did not come",
            current,
        )
        received = {}
        parity = str(current.number % 2)
        for part, source in wanted:
            message = traffic.receives[part.name, source].payload
            key = ("received", current.slot.name, part.name, str(source), parity)
            target = self._buffer(key, part, self.device)
            rows = part.rows(source, self.rank)
            if part.nbytes:
                line = as_bytes(target)  # torch indexes rows of bytes, but not of every dtype
                if rows is None:
                    line.copy_(message)
                else:
                    values = message.to(self.device).view(len(rows), -1)
                    line.view(part.shape[0], -1)[list(rows)] = values
            received[part.name, source] = target
        return received

    def _barrier(self) -> None:
        options = BarrierOptions()
        options.timeout = self._limit
        call = lambda: self._pg.barrier(options).wait(self._limit)  # noqa: E731
        self._barriers += 1
        self.control.note("barrier", str(self._barriers))  # gloo cannot say who is missing

        def missing() -> list[int]:
            notes = self.control.notes("barrier")
            late = [rank for rank, count in enumerate(notes) if int(count or 0) < self._barriers]
            return [rank for rank in late if rank != self.rank]

        self._run(call, _BARRIER, None, missing)

    def _move(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], method: str) -> None:
        self._rounds += 1
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        sends = [line.cpu() if r in peers else line[:0].cpu() for r, line in enumerate(outgoing)]
        receives = [
            torch.empty(line.numel() if rank in peers else 0, dtype=torch.uint8)
            for rank, line in enumerate(incoming)
        ]
        if method == "a2a":
            self._all_to_all(sends, receives, peers)
        else:
            tag = _TAG_MOVES + self._rounds % _TAG_GENERATIONS
            messages = []
            for lines, verb in ((receives, self._pg.recv), (sends, self._pg.send)):
                for peer, line in enumerate(lines):
                    if line.numel():
                        work = self._post(partial(verb, [line], peer, tag), peer)
                        messages.append(_Message(peer, line, work))
            self._finish(messages, "activations did not come", None)
        for peer in peers:
            incoming[peer].copy_(receives[peer])

    def _all_to_all(
        self, sends: Sequence[Tensor], receives: Sequence[Tensor], peers: Sequence[int]
    ) -> None:
        options = AllToAllOptions()
        options.timeout = self._limit
        sizes = [line.numel() for line in receives]
        received, packed = torch.empty(sum(sizes), dtype=torch.uint8), torch.cat(list(sends))
        given = (received, packed, sizes, [line.numel() for line in sends], options)
        call = lambda: self._pg.alltoall_base(*given).wait(self._limit)  # noqa: E731
        self._run(call, "activations did not come", None, lambda: peers)
        for line, piece in zip(receives, received.split(sizes), strict=True):
            line.copy_(piece)

    def _interrupt(self) -> None:
        if self._interrupted:
            return
        self._interrupted = True
        scratch = torch.empty(1, dtype=torch.uint8)
        # What waits for a peer whose connection is closed has been woken; a wait of ours for one
        # whose connection is not expires, and that wakes all the others.
        for peer in range(self.world_size):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):  # meant to expire
                    self._pg.recv([scratch], peer, 0).wait(timedelta(milliseconds=1))

    def _close(self, broken: bool) -> None:
        atexit.unregister(self._at_exit)
        try:
            if not broken and self.world_size > 1:
                self._barrier()  # nobody tears down a connection that a peer still reads from
        except PeerFailedError as error:
            self._break(error)
        except TransportTimeoutError as error:
            self._break(error)
            raise
        finally:
            self._waiter.stop()
            self._traffic.clear()
            self._memory.clear()
            self._pg = None

    def _tag(self, current: Generation, part: PartSpec) -> int:
        lane = self._lanes[current.slot.name, part.name]
        step = current.step % _TAG_STEPS
        number = current.number % _TAG_GENERATIONS
        return 1 + (lane * _TAG_GENERATIONS + number) * _TAG_STEPS + step

    def _post_receive(
        self, current: Generation, traffic: _Traffic, part: PartSpec, source: int
    ) -> None:
        message = torch.empty(max(1, part.moved_bytes(source, self.rank)), dtype=torch.uint8)
        tag = self._tag(current, part)
        work = self._post(partial(self._pg.recv, [message], source, tag), source)
        traffic.receives[part.name, source] = _Message(
            source, message if part.moved_bytes(source, self.rank) else message[:0], work
        )

    def _post(self, call: Callable[[], Any], peer: int) -> Any:
        """Start a gloo operation on the transport's thread (where connections are lazy it may block)."""
        works: list[Any] = []
        self._run(lambda: works.append(call()), "connect", None, lambda: [peer])
        return works[0]

    def _finish(self, messages: Sequence[_Message], what: str, current: Generation | None) -> None:
        """Wait for messages; the peers of those not yet ended are the missing ones."""
        pending = [message for message in messages if message.work is not None]

        def call() -> None:
            while pending:
                pending[0].work.wait(self._limit)
                pending.pop(0).work = None

        if pending:
            self._run(call, what, current, lambda: sorted({m.peer for m in pending}))

    def _run(
        self,
        call: Callable[[], Any],
        what: str,
        current: Generation | None,
        missing: Callable[[], Sequence[int]],
    ) -> None:
        """Run a blocking gloo call on the transport's thread, watching the clock and the peers."""
        self._waiting = True
        try:
            self._wait(self._waiter.submit(call), what, current=current, missing=missing)
        except RuntimeError as error:
            self.control.check()  # a peer that left a record says more than a closed connection
            place = f" ({self._where(current)})" if current else ""
            left: Sequence[int] = [r for r in range(self.world_size) if r != self.rank]
            if what != _BARRIER:  # there, whoever has arrived may be the one that was lost
                left = missing() or left
            ranks = f"rank {left[0]}" if len(left) == 1 else f"one of ranks {left}"
            raise PeerFailedError(
                f"rank {self.rank}: {what}{place}: lost {ranks}: {error}",
                peer=left[0] if len(left) == 1 else None,
            ) from error
        finally:
            self._waiting = False

    def _buffer(self, key: tuple[str, ...], part: PartSpec, device: torch.device) -> Tensor:
        memory = self._memory.get(key)
        if memory is None or memory.numel() < part.nbytes:
            memory = self._memory[key] = torch.empty(part.nbytes, dtype=torch.uint8, device=device)
        return memory[: part.nbytes].view(part.dtype).view(part.shape)


def _interrupt_at_exit(reference: weakref.ref[GlooTransport]) -> None:
    """An interpreter that exits under a wait must not leave a thread inside gloo."""
    transport = reference()
    if transport is not None and transport._waiting:
        transport._interrupt()
        transport._waiter.stop()


def as_bytes(tensor: Tensor, rows: Sequence[int] | None = None) -> Tensor:
    """View rows of the first axis (None: everything) as bytes, without a copy where they are one run.

    Nothing becomes one byte, since its arrival must still be seen.
    """
    line = tensor.reshape(-1).view(torch.uint8)
    if not line.numel():
        return torch.zeros(1, dtype=torch.uint8)
    if rows is None:
        return line
    lines = line.view(tensor.shape[0], -1)
    if rows[-1] - rows[0] + 1 == len(rows):
        return lines[rows[0] : rows[-1] + 1].view(-1)
    return lines[list(rows)].view(-1)


def _probe(group: Any, device: Any) -> str | None:
    if not dist.is_available() or not dist.is_gloo_available():
        return "this torch was built without gloo"
    return None


def _connect(store: Any, rank: int, world_size: int, limit: timedelta) -> Any:
    """Connect all pairs now, whatever TORCH_GLOO_LAZY_INIT says.

    A lazy connection to a rank that is gone blocks for a multiple of the limit, inside the first
    message.
    """
    gloo = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        devices = [gloo.create_device(interface=name, lazy_init=False) for name in interfaces]
        devices = devices or [gloo.create_default_device(lazy_init=False)]
    except TypeError:  # this torch knows no lazy connections
        return gloo(store, rank, world_size, limit)
    options = gloo._Options()  # type: ignore[attr-defined]
    options._devices = devices
    options._timeout = limit
    options._threads = 2 * len(devices)
    return gloo(store, rank, world_size, options)


def _create(
    group: Any,
    device: Any,
    timeout_s: float,
    kind: type[GlooTransport] = GlooTransport,
    **options: Any,
) -> GlooTransport:
    """Make the transport; ``kind`` is its class, for backends that build on this one."""
    rank = dist.get_rank(group)
    require_group_member(rank)
    world_size = dist.get_world_size(group)
    control = ControlPlane(group_store(group, "control"), rank, world_size, timeout_s)
    store = group_store(group, "gloo")
    try:
        process_group = _connect(store, rank, world_size, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise BackendUnavailableError(f"gloo could not connect the group: {error}") from error
    return kind(process_group, control, torch.device(device), timeout_s)


BACKEND = BackendSpec(
    name="gloo",
    api_version=TRANSPORT_API_VERSION,
    summary="processes over gloo; the embedded default on CPU",
    capabilities=_CAPABILITIES,
    probe=_probe,
    create=_create,
)
