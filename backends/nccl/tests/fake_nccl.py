# SPDX-License-Identifier: Apache-2.0
"""NCCL and CUDA streams as threads, so that the transport's order of calls is tested without a GPU.

Stricter than NCCL where it matters: a send ends only when it is received; the first use of a pair of
ranks blocks the host, without a limit, until both ends have come or it is aborted; messages of a pair
match in order, whatever their size. The caller's own stream is the calling thread, so verbs block as on a CPU.

``BACKEND`` is the ``nccl`` transport on that, for ranks that are threads (``RankPool`` with
``processes=False``).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import queue
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import cptransport_nccl.lanes
import cptransport_nccl.transport
import cptransport_nccl.watchdog
from cptransport.backend import BackendSpec, ControlPlane
from cptransport.transport import Capabilities
from cptransport.transports.threads import current_world, selection_store
from cptransport_nccl.library import NcclError
from cptransport_nccl.notes import Notes

_WAIT_S = 60.0

#: How long a communicator takes to connect, and to be freed when it was aborted; tests set them.
connecting_s = aborting_s = 0.0


_thread = threading.local()
_captures = itertools.count(1)


@contextlib.contextmanager
def capture() -> Iterator[None]:
    """Have this thread capture: the same is done, at once, but other captures' events mean nothing."""
    _thread.capture = next(_captures)
    try:
        yield
    finally:
        _thread.capture = 0


def _capturing() -> int:
    return getattr(_thread, "capture", 0)


class Event:
    def __init__(self) -> None:
        self._done = threading.Event()
        self.capture = 0

    def record(self, stream: Any) -> None:
        self.capture = _capturing()
        stream.submit(self._done.set)

    def wait(self) -> None:
        assert self._done.wait(_WAIT_S)


class Host:
    """The caller's stream: its work is done when the call returns."""

    cuda_stream = 0

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def wait_event(self, event: Event) -> None:
        if event.capture != _capturing():
            raise RuntimeError("operation failed due to a previous error during capture")
        event.wait()


class Stream:
    """A thread that does its work in order."""

    def __init__(self, device: Any = None) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.cuda_stream = id(self)
        _queues[self.cuda_stream] = self._queue
        threading.Thread(target=_serve, args=(self._queue,), daemon=True).start()

    def __del__(self) -> None:
        self._queue.put(None)

    def submit(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def wait_event(self, event: Event) -> None:
        self.submit(event.wait)

    def query(self) -> bool:
        return self._mark().wait(0.001)

    def synchronize(self) -> None:
        assert self._mark().wait(_WAIT_S)

    def _mark(self) -> threading.Event:
        done = threading.Event()
        self.submit(done.set)
        return done


class _AtOnce:
    """The queue of the caller's stream."""

    def put(self, work: Callable[[], None]) -> None:
        work()


_queues: dict[int, Any] = {Host.cuda_stream: _AtOnce()}


def _serve(work: queue.SimpleQueue[Any]) -> None:
    while (item := work.get()) is not None:
        item()


class _World:
    """What the ranks of one communicator share."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], list[Any]] = {}  # (source, destination, number)
        self.ends: set[tuple[str, int, int]] = set()
        self.joined: dict[int, float] = {}  # rank -> when
        self.lost = False


_worlds: defaultdict[tuple[bytes, int], _World] = defaultdict(_World)  # by identity and split
_worlds_lock = threading.Lock()


class Origin:
    """See ``cptransport_nccl.library.Origin``."""

    def __init__(self, identity: bytes, rank: int, world_size: int) -> None:
        self._identity, self._rank, self._size = identity, rank, world_size
        self._splits = 0

    def complete(self, wait: Any) -> None:
        pass

    def split(self, channels: int | None, wait: Any) -> Communicator:
        self._splits += 1
        with _worlds_lock:
            world = _worlds[self._identity, self._splits]
        made = Communicator(world, self._rank, self._size)
        wait(made.joined, "joining")
        return made

    def abort(self, held: Any = None) -> None:
        pass

    destroy = abort


class Communicator:
    """See ``cptransport_nccl.library.Communicator``."""

    def __init__(self, world: _World, rank: int, world_size: int) -> None:
        self._world, self._rank, self._size = world, rank, world_size
        self._numbers: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._calls: list[tuple[str, int, int, int]] = []
        self._own: list[tuple[int, int, int]] = []  # (target, source, size), of all-gathers
        self._stream = 0
        self._problem: str | None = None
        self.alive = True
        self.held_up = False  # the host, in the next group
        self.fault: NcclError | None = None  # of the next group
        self._world.joined[rank] = time.monotonic()

    def joined(self, seconds: float) -> bool:
        """Whether all ranks have come, and the time has passed that connecting takes."""
        joined = self._world.joined
        if len(joined) == self._size and max(joined.values()) + connecting_s < time.monotonic():
            return True
        time.sleep(seconds)
        return False

    def vanish(self) -> None:
        """What the peers see when this process ends: a connection that closes."""
        self._world.lost = True

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        if not self.alive:
            raise NcclError("the communicator was aborted")
        self._calls, self._own = [], []
        yield
        if self.fault is not None:
            raise self.fault
        for own in self._own:
            _queues[self._stream].put(lambda own=own: ctypes.memmove(*own))
        numbered = [(*call, self._number(call)) for call in self._calls]
        self._connect()
        _queues[self._stream].put(lambda: self._run(numbered))

    def _number(self, call: tuple[str, int, int, int]) -> int:
        pair = self._pair(call)
        self._numbers[pair] += 1
        return self._numbers[pair]

    def _pair(self, call: tuple[str, int, int, int]) -> tuple[int, int]:
        kind, _, _, peer = call
        return (self._rank, peer) if kind == "send" else (peer, self._rank)

    def _connect(self) -> None:
        world = self._world
        wanted = set()
        with world.changed:
            for call in self._calls:
                pair = self._pair(call)
                world.ends.add((call[0], *pair))
                wanted |= {("send", *pair), ("receive", *pair)}
            world.changed.notify_all()

        with world.changed:
            world.changed.wait_for(
                lambda: (wanted <= world.ends and not self.held_up) or not self.alive
            )
        if not self.alive:
            raise NcclError("the communicator was aborted")

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._stream = stream
        self._calls.append(("send", address, nbytes, peer))

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        self._stream = stream
        self._calls.append(("receive", address, nbytes, peer))

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        self._own.append((target + self._rank * nbytes, source, nbytes))
        for peer in range(self._size):
            if peer != self._rank:
                self.send(source, nbytes, peer, stream)
                self.receive(target + peer * nbytes, nbytes, peer, stream)

    def all_reduce(self, address: int, nbytes: int, stream: int) -> None:
        for peer in range(self._size):
            if peer != self._rank:  # only ever a barrier
                self.send(address, 0, peer, stream)
                self.receive(address, 0, peer, stream)

    def _run(self, calls: list[tuple[str, int, int, int, int]]) -> None:
        world = self._world
        sent = []
        with world.changed:
            for kind, address, nbytes, peer, number in calls:
                if kind == "send" and self.alive:
                    key = (self._rank, peer, number)
                    sent.append(key)
                    world.mail[key] = [address, nbytes]
            world.changed.notify_all()
            for kind, address, nbytes, peer, number in calls:
                if kind == "receive":
                    key = (peer, self._rank, number)
                    world.changed.wait_for(lambda key=key: key in world.mail or not self.alive)
                    if not self.alive:
                        ctypes.memset(address, 0x5A, nbytes)  # NCCL goes on with what it has
                        return
                    source, size = world.mail.pop(key)
                    world.changed.notify_all()
                    if size != nbytes:
                        self._problem = f"{size} bytes came from rank {peer} for {nbytes}"
                    ctypes.memmove(address, source, min(size, nbytes))
            world.changed.wait_for(
                lambda: not self.alive or not any(key in world.mail for key in sent)
            )

    def failure(self) -> str | None:
        return "remote process exited" if self._world.lost else self._problem

    def abort(self, held: Any) -> threading.Thread | None:
        if not self.alive:
            return None
        with self._world.changed:
            self.alive = False
            for key in [key for key in self._world.mail if key[0] == self._rank]:
                del self._world.mail[key]  # its memory goes
            self._world.changed.notify_all()
        thread = threading.Thread(
            target=lambda held: time.sleep(aborting_s), args=(held,), daemon=True
        )
        thread.start()
        return thread

    def destroy(self) -> None:
        self.alive = False


class _Cuda:
    Stream, Event = Stream, Event
    _host = Host()

    def current_stream(self, device: Any = None) -> Host:
        return self._host

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def is_current_stream_capturing(self) -> bool:
        return _capturing() > 0

    def synchronize(self, device: Any = None) -> None:
        pass


class _Torch:
    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _PinnedTorch(_Torch):
    def zeros(self, *args: Any, **kwargs: Any) -> Any:
        made = torch.zeros(*args, **kwargs)
        if "device" in kwargs:
            return made
        _kept.append(made)  # a late write must not hit what took its place
        return type("Pinned", (), {"pin_memory": lambda _: made})()


def write_value(stream: int, address: int, value: int) -> None:
    cell = ctypes.c_int64.from_address(address)
    _queues[stream].put(lambda: setattr(cell, "value", value))


_kept: list[Any] = []


def still_used(memory: Any, stream: Stream) -> None:
    stream.submit(lambda kept=memory: None)


def void(stream: Any, ended: Any, spans: Any) -> None:
    def look() -> None:
        if ended.item():
            for address, nbytes in spans:
                ctypes.memset(address, 0xFF, nbytes)

    stream.submit(look)


def create(group: Any, device: Any, timeout_s: float, kind: Any = None, **options: Any) -> Any:
    """Make the transport, or a kind of it, on this thread."""
    module: Any = cptransport_nccl.transport
    lanes: Any = cptransport_nccl.lanes
    watchdog: Any = cptransport_nccl.watchdog
    module.torch, lanes.torch, watchdog.torch = _Torch(), _PinnedTorch(), _PinnedTorch()
    lanes.Origin, lanes.void, watchdog.write_value = Origin, void, write_value
    lanes.exclusive_stream, lanes.release_stream = Stream, lambda stream: None
    module.still_used = lanes.still_used = still_used
    world = current_world()
    assert world is not None
    store, rank = selection_store()
    size = world.world_size
    control = ControlPlane(dist.PrefixStore("control", store), rank, size, timeout_s)

    def identity() -> bytes:
        mine = uuid.uuid4().hex if rank == 0 else ""
        return control.exchange(mine, "id")[0].encode()

    notes = Notes(dist.PrefixStore("notes", store), rank)
    if kind is not None:
        return kind(control, torch.device("cpu"), timeout_s, identity, notes)
    made = module.NcclTransport(control, torch.device("cpu"), timeout_s, identity, notes)
    made.capabilities = BACKEND.capabilities
    return made


BACKEND = BackendSpec(
    name="nccl",
    api_version=1,
    summary="the nccl transport on threads",
    capabilities=Capabilities(device_types=("cpu",), cuda_graph=True),
    probe=lambda group, device: None,
    create=create,
)
