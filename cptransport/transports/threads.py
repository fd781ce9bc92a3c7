# SPDX-License-Identifier: Apache-2.0
"""``threads``: N ranks as threads of one process, and the executable specification of the protocol.

It is the strictest machine that the contract allows, so that whatever runs here runs on every
backend:

* a publication is a snapshot; a staged tensor that is written after ``publish`` is an error at the
  next ``stage``;
* what a rank's ``stage`` releases (its staged and its fetched tensors of the generation before) is
  overwritten with NaN;
* staged and received tensors start as NaN, so rows that were not written, or that no route moved,
  show;
* all ranks must stage equal slots; a rank that stages another one learns it at once;
* ``stage`` of g waits until every destination of g-2 has released it, as a one-sided transport
  must.

Picture, one slot, rank 0 -> rank 1::

    rank 0   stage 1   publish 1   stage 2   publish 2   stage 3 (waits for rank 1's stage 2)
    rank 1   stage 1   fetch 1 .................. stage 2 (releases generation 1)   fetch 2
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport import env, registry
from cptransport.backend import BackendSpec
from cptransport.base import Generation, TransportBase
from cptransport.control import ControlPlane, fresh
from cptransport.errors import PeerFailedError, PlanError, TransportError
from cptransport.transport import TRANSPORT_API_VERSION, Capabilities, PartSpec, Slot

__all__ = ["BACKEND", "ThreadTransport", "World", "current_transport", "current_world", "run"]

_CAPABILITIES = Capabilities(device_types=("cpu", "cuda"))

T = TypeVar("T")


@dataclass
class _Publication:
    slot: Slot
    to: tuple[int, ...]
    parts: dict[str, Tensor]
    ready: torch.cuda.Event | None
    taken: set[tuple[str, int]] = field(
        default_factory=set
    )  # (part, destination), parts without routes


class Hub:
    """What the ranks of one transport share."""

    def __init__(self, world_size: int) -> None:
        self.lock = threading.RLock()
        # One per rank that may wait: waking hundreds of ranks for what concerns one takes seconds.
        self.changed = [threading.Condition(self.lock) for _ in range(world_size)]
        self.store = dist.HashStore()
        self.publications: dict[
            tuple[str, int, int], _Publication
        ] = {}  # (slot, source, generation)
        self.slots: dict[
            tuple[str, int], tuple[Slot, int]
        ] = {}  # (slot, generation) -> as first staged, step
        self.stages: dict[tuple[str, int], int] = {}  # (slot, rank) -> generation
        self.arrivals = [0] * world_size  # barriers entered
        # (round, source, destination) -> activations under way
        self.mail: dict[tuple[int, int, int], tuple[Tensor, torch.cuda.Event | None]] = {}
        self.open = world_size  # ranks that have not closed

    def notify(self, ranks: Iterable[int] | None = None) -> None:
        """Wake ranks that wait; None: all of them. The caller holds the lock."""
        for condition in self.changed if ranks is None else map(self.changed.__getitem__, ranks):
            condition.notify_all()


class ThreadTransport(TransportBase):
    """One rank's end of a ``Hub``."""

    def __init__(
        self, hub: Hub, rank: int, world_size: int, device: torch.device, timeout_s: float
    ) -> None:
        super().__init__(
            "threads",
            device=device,
            control=ControlPlane(hub.store, rank, world_size, timeout_s),
            timeout_s=timeout_s,
            capabilities=_CAPABILITIES,
        )
        self._hub = hub
        self._rounds = 0

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        hub, name, number = self._hub, current.slot.name, current.number
        if retired is not None:
            self._retire(retired)
        with hub.lock:
            expected, step = hub.slots.setdefault((name, number), (current.slot, current.step))
            if step != current.step:
                raise TransportError(
                    f"rank {self.rank} staged slot {name!r}, generation {number}, in its op step "
                    f"{current.step}, a peer in its step {step}: some rank left a forward or a "
                    "backward out (see join_backward)"
                )
            if expected != current.slot:
                raise TransportError(
                    f"rank {self.rank} staged slot {name!r}, generation {number}, with other parts than its peers: "
                    f"{current.slot.parts} against {expected.parts}"
                )
            hub.stages[name, self.rank] = number
            if retired is not None:
                hub.notify()
        self._await_release(current)
        return {
            part.name: poison(torch.empty(part.shape, dtype=part.dtype, device=self.device))
            for part in current.slot.parts
        }

    def _retire(self, retired: Generation) -> None:
        """End this rank's use of the generation before: check that it kept the rules, then poison what it held."""
        publication = self._hub.publications.get((retired.slot.name, self.rank, retired.number))
        for name, staged in retired.staged.items():
            if publication is not None and not same_bytes(staged, publication.parts[name]):
                raise TransportError(
                    self._where(retired) + f": staged part {name!r} was written after publish"
                )
        for tensor in (*retired.staged.values(), *retired.received.values()):
            poison(tensor)

    def _await_release(self, current: Generation) -> None:
        """Wait until every destination of generation g-2 has taken it and staged g-1."""
        name, number = current.slot.name, current.number - 2
        publication = self._hub.publications.get((name, self.rank, number))
        if publication is None:
            return

        def holders() -> list[int]:
            held = []
            for rank in range(self.world_size):
                parts = [
                    p
                    for p in publication.slot.parts
                    if self._moves(p, self.rank, rank, publication.to)
                ]
                untaken = any(
                    p.routes is None and (p.name, rank) not in publication.taken for p in parts
                )
                if parts and (untaken or self._hub.stages.get((name, rank), 0) < number + 1):
                    held.append(rank)
            return held

        self._wait(
            self._holds(lambda: not holders()),
            f"generation {number} was not released",
            current=current,
            missing=holders,
        )
        with self._hub.lock:
            del self._hub.publications[name, self.rank, number]
            self._hub.slots.pop((name, number), None)

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        parts = {name: staged.clone() for name, staged in current.staged.items()}
        publication = _Publication(current.slot, tuple(to), parts, self._record())
        concerned = [
            rank
            for rank in range(self.world_size)
            if any(self._moves(part, self.rank, rank, to) for part in current.slot.parts)
        ]
        with self._hub.lock:
            self._hub.publications[current.slot.name, self.rank, current.number] = publication
            self._hub.notify(concerned)

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        received = {}
        for part, source in wanted:
            key = (current.slot.name, source, current.number)
            self._wait(
                self._holds(partial(self._arrived_here, part, key)),
                f"part {part.name!r} did not come",
                current=current,
                missing=partial(list, [source]),
            )
            publication = self._hub.publications[key]
            received[part.name, source] = self._copy(part, source, publication)
            if part.routes is None:
                with self._hub.lock:
                    publication.taken.add((part.name, self.rank))
                    self._hub.notify()
        return received

    def _arrived_here(self, part: PartSpec, key: tuple[str, int, int]) -> bool:
        found = self._hub.publications.get(key)
        return found is not None and (part.routes is not None or self.rank in found.to)

    def _copy(self, part: PartSpec, source: int, publication: _Publication) -> Tensor:
        """Copy what the routes move; the rest of the received tensor stays poisoned."""
        payload = publication.parts[part.name]
        self._await(payload, publication.ready)
        target = poison(torch.empty(part.shape, dtype=part.dtype, device=self.device))
        rows = part.rows(source, self.rank)
        if rows is None:
            target.copy_(payload)
        else:
            for row in rows:
                target[row].copy_(payload[row])
        return target

    def _barrier(self) -> None:
        hub = self._hub
        with hub.lock:
            hub.arrivals[self.rank] += 1
            mine = hub.arrivals[self.rank]
            hub.notify()

        def missing() -> list[int]:
            return [rank for rank, count in enumerate(hub.arrivals) if count < mine]

        self._wait(self._holds(lambda: not missing()), "barrier", missing=missing)

    def _move(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], method: str) -> None:
        """Leave a copy for every peer, then take theirs; ``a2a`` takes empty ones too."""
        hub, self._rounds = self._hub, self._rounds + 1
        peers = [rank for rank in range(self.world_size) if rank != self.rank]
        posted = {
            (self._rounds, self.rank, peer): outgoing[peer].clone()
            for peer in peers
            if method == "a2a" or outgoing[peer].numel()
        }
        sent = self._record()
        with hub.lock:
            hub.mail.update((key, (line, sent)) for key, line in posted.items())
            hub.notify()
        for peer in peers:
            if not (method == "a2a" or incoming[peer].numel()):
                continue
            key = (self._rounds, peer, self.rank)
            self._wait(
                self._holds(partial(hub.mail.__contains__, key)),
                "activations did not come",
                missing=partial(list, [peer]),
            )
            with hub.lock:
                line, ready = hub.mail.pop(key)
            if line.numel() != incoming[peer].numel():
                raise TransportError(
                    f"rank {peer} sent {line.numel()} bytes of activations to rank {self.rank}, "
                    f"which expects {incoming[peer].numel()}: do the ranks hold different plans?"
                )
            self._await(line, ready)
            incoming[peer].copy_(line)

    def _close(self, broken: bool) -> None:
        hub = self._hub
        with hub.lock:
            hub.open -= 1
            if not hub.open:  # a peer may read what was published until it has closed too
                hub.publications.clear()
                hub.slots.clear()
                hub.mail.clear()
            hub.notify()

    def _interrupt(self) -> None:
        with self._hub.lock:
            self._hub.notify()

    def _record(self) -> torch.cuda.Event | None:
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def _await(self, payload: Tensor, ready: torch.cuda.Event | None) -> None:
        """Let the current stream wait for a payload that another rank's stream wrote."""
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            payload.record_stream(stream)

    def _holds(self, condition: Callable[[], bool]) -> Callable[[float], bool]:
        # What is waited for wakes this rank. That a peer failed it learns by looking, which a
        # thousand ranks must not do fifty times a second.
        least = 2e-4 * self.world_size

        def arrived(seconds: float) -> bool:
            with self._hub.lock:
                changed = self._hub.changed[self.rank]
                return changed.wait_for(condition, max(seconds, least))

        return arrived


def poison(tensor: Tensor) -> Tensor:
    """Fill with NaN, or with bytes 0xA5 where the dtype has none; return the tensor."""
    with torch.no_grad():
        if tensor.dtype.is_complex or (
            tensor.dtype.is_floating_point and tensor.element_size() > 1
        ):
            return tensor.fill_(float("nan"))
        if tensor.dtype == torch.bool:
            return tensor.fill_(True)
        flat(tensor).fill_(0xA5)
        return tensor


def flat(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as a line of bytes."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes (NaN payloads included)."""
    return torch.equal(flat(a), flat(b))


class World:
    """The ranks of one ``run``; transports of the same ordinal on every rank share a hub."""

    def __init__(self, world_size: int, device: str, timeout_s: float) -> None:
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._device = device
        self.store = dist.HashStore()
        self._hubs: dict[str, Hub] = {}
        self._lock = threading.Lock()

    def device(self, rank: int) -> torch.device:
        """The device of a rank."""
        return (
            torch.device(self._device, rank)
            if self._device == "cuda"
            else torch.device(self._device)
        )

    def transport(self, rank: int, key: str, timeout_s: float) -> ThreadTransport:
        """A rank's end of the transport of that key."""
        with self._lock:
            hub = self._hubs.setdefault(key, Hub(self.world_size))
        return ThreadTransport(hub, rank, self.world_size, self.device(rank), timeout_s)


class _Member(threading.local):
    world: World | None = None
    rank: int = -1
    counters: dict[tuple[str, str], int] = {}
    transport: ThreadTransport | None = None


_member = _Member()


def current_world() -> World | None:
    """The world that this thread is a rank of, or None."""
    return _member.world


def current_transport() -> ThreadTransport | None:
    """The transport that ``run`` gave this thread, or None."""
    return _member.transport


def create_here(timeout_s: float) -> ThreadTransport:
    """Make this rank's next transport of its world; the other ranks must make theirs in the same order."""
    world = _member.world
    assert world is not None
    key = fresh("", "threads", _member.counters)
    return world.transport(_member.rank, key, timeout_s)


def selection_store() -> tuple[Any, int]:
    """Return a store of this thread's world, fresh for every call in the ranks' order, and this rank."""
    world = _member.world
    assert world is not None
    return dist.PrefixStore(fresh("", "select", _member.counters), world.store), _member.rank


@contextmanager
def _membership(world: World, rank: int) -> Iterator[None]:
    before = (_member.world, _member.rank, _member.counters, _member.transport)
    _member.world, _member.rank, _member.counters, _member.transport = world, rank, {}, None
    try:
        yield
    finally:
        _member.world, _member.rank, _member.counters, _member.transport = before


def run(
    fn: Callable[[ThreadTransport], T],
    world_size: int,
    timeout_s: float | None = None,
    *,
    device: str = "cpu",
) -> list[T]:
    """Run ``fn(transport)`` on N ranks in this process and return their results in rank order.

    Args:
        fn: called once per rank, each in a thread of its own, all with the same arguments but for
            the transport.
        world_size: N >= 1.
        timeout_s: limit of every wait; None: ``CULA_CP_TIMEOUT_S``.
        device: ``"cpu"``, or ``"cuda"`` with one device per rank.

    Returns:
        What ``fn`` returned, by rank.

    Raises:
        Exception: the first error of a rank that was not merely told of a peer's failure; its peers
            got ``PeerFailedError`` with its text. The traceback names the rank.
        EnvVarError: a ``CULA_CP_*`` variable is not valid; under strict also an unknown name.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise PlanError(f"world_size must be a positive integer, got {world_size!r}")
    seconds = env.timeout_s(timeout_s)
    env_strict = env.flag(env.STRICT)
    registry.check_environment(strict=env_strict)
    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise TransportError(
            f"threads on CUDA needs a device per rank: {world_size} ranks, {torch.cuda.device_count()} devices"
        )
    world = World(world_size, device, seconds)
    results: list[Any] = [None] * world_size
    errors: list[tuple[int, BaseException]] = []

    def rank_main(rank: int) -> None:
        with _membership(world, rank):
            transport = create_here(seconds)
            transport.strict = env_strict
            _member.transport = transport
            try:
                if device == "cuda":
                    torch.cuda.set_device(world.device(rank))
                with transport:
                    results[rank] = fn(transport)
            except BaseException as error:
                error.add_note(f"raised on rank {rank} of {world_size}") if hasattr(
                    error, "add_note"
                ) else None
                errors.append((rank, error))

    ranks = [
        threading.Thread(target=rank_main, args=(rank,), name=f"cpt-rank-{rank}", daemon=True)
        for rank in range(world_size)
    ]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    if errors:
        own = [error for _, error in errors if not isinstance(error, PeerFailedError)]
        raise (own or [errors[0][1]])[0]
    return results


def _probe(group: Any, device: Any) -> str | None:
    return (
        None
        if current_world() is not None
        else "threads serves ranks inside cptransport.threads.run only"
    )


def _create(group: Any, device: Any, timeout_s: float, **options: Any) -> ThreadTransport:
    return create_here(timeout_s)


BACKEND = BackendSpec(
    name="threads",
    api_version=TRANSPORT_API_VERSION,
    summary="N ranks as threads of one process; the executable specification",
    capabilities=_CAPABILITIES,
    probe=_probe,
    create=_create,
)
