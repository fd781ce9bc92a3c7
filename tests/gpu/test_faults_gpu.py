# SPDX-License-Identifier: Apache-2.0
"""One-sided transports with an order taken away: the wrong bytes that follow are seen.

Ranks that share a GPU share its caches, too; on GPUs of their own nothing but these orders brings
the bytes across. Each fault is tried on a case that passes without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import rig
import torch

from cptransport import create_transport
from cptransport.testing import Ranks
from cptransport.testing.oracle import assert_bytes, payload
from cptransport.testing.pool import CaseError
from cptransport.transport import BoundaryTransport, PartSpec, Slot

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("needs_cuda")]

_PART = PartSpec("x", (1 << 18,), torch.float32)
_SLOT = Slot("faulty", (_PART,))
_WAY = PartSpec("x", (1 << 18,), torch.float32, frozenset({(0, 1)}))
_ONE_WAY = Slot("one way", (_WAY,))
_CYCLES_200MS = 400_000_000  # of torch.cuda._sleep; the ranks of a busy machine drift apart


class _Faulty:
    """The signals of a transport; subclasses replace one of them."""

    def __init__(self, signals: Any) -> None:
        self._signals = signals

    def __getattr__(self, name: str) -> Any:
        return getattr(self._signals, name)


class _EarlyFlag(_Faulty):
    """Publishes beside the stream: the flag is not ordered after the writes."""

    def __init__(self, signals: Any) -> None:
        super().__init__(signals)
        self._side = torch.cuda.Stream()
        self._staged = torch.cuda.Event()

    def stage(self, *args: Any, **kwargs: Any) -> None:
        self._signals.stage(*args, **kwargs)
        self._staged.record()

    def publish(self, *args: Any, **kwargs: Any) -> None:
        self._side.wait_event(self._staged)
        with torch.cuda.stream(self._side):
            self._signals.publish(*args, **kwargs)

    def barrier(self, *args: Any, count: bool, **kwargs: Any) -> None:
        if count:
            self._signals.barrier(*args, count=count, **kwargs)
            return
        self._side.wait_event(self._staged)
        with torch.cuda.stream(self._side):
            self._signals.barrier(*args, count=count, **kwargs)
        torch.cuda.current_stream().wait_stream(self._side)


class _NoAcknowledgement(_Faulty):
    """Writes again although takers still read."""

    def stage(self, *args: Any, waits: int, **kwargs: Any) -> None:
        self._signals.stage(*args, waits=0, **kwargs)


class _LeakyBarrier(_Faulty):
    """Its barrier waits for nobody."""

    def barrier(self, *args: Any, rank: int, everyone: int, count: bool, **kwargs: Any) -> None:
        whole = everyone if count else 1 << rank
        self._signals.barrier(*args, rank=rank, everyone=whole, count=count, **kwargs)


FAULTS: dict[str, Callable[[Any], Any]] = {
    "none": lambda signals: signals,
    "early flag": _EarlyFlag,
    "no acknowledgement": _NoAcknowledgement,
    "leaky barrier": _LeakyBarrier,
}


def _values(transport: BoundaryTransport, count: int) -> list[torch.Tensor]:
    return [
        payload(_PART, rank=transport.rank, slot=_SLOT.name, generation=number).to(transport.device)
        for number in range(1, count + 1)
    ]


@contextmanager
def _transport(ranks: Ranks) -> Iterator[Any]:
    """Make the transport, whatever its backend advises: what hides these faults, among other things."""
    with create_transport(
        backend=ranks.backend, device=ranks.device, strict=False, timeout_s=ranks.timeout_s
    ) as made:
        assert made.name == ranks.backend
        yield made


def _late_write(ranks: Ranks, fault: str) -> None:
    """In turn a rank is busy for 200 ms between stage and write; what is taken must be complete."""
    with _transport(ranks) as transport:
        _write_late(ranks, transport, fault)


def _write_late(ranks: Ranks, transport: Any, fault: str) -> None:
    values = _values(transport, 6)
    _turns(ranks, transport, values[:2], 0, late=-1)  # buffers grow without a fault
    transport._signals = FAULTS[fault](transport._signals)
    for number, value in enumerate(values[2:], 2):
        _turns(ranks, transport, [value], number, late=number % ranks.world_size)


def _turns(ranks: Ranks, transport: Any, values: list[torch.Tensor], first: int, late: int) -> None:
    for number, value in enumerate(values, first + 1):
        staged = transport.stage(_SLOT)["x"]
        if ranks.rank == late:
            torch.cuda._sleep(_CYCLES_200MS)
        staged.copy_(value)
        transport.publish(_SLOT)
        taken = [transport.fetch(_SLOT, "x", source=s).clone() for s in range(ranks.world_size)]
        for source, copy in enumerate(taken):
            assert_bytes(copy, _PART, rank=source, slot=_SLOT.name, generation=number)
        transport.check()


def _slow_reader(ranks: Ranks, fault: str) -> None:
    """Rank 1 is busy for 200 ms before it takes what rank 0 sent; it must not find something later."""
    with _transport(ranks) as transport:
        _read_slowly(ranks, transport, fault)


def _read_slowly(ranks: Ranks, transport: Any, fault: str) -> None:
    for number in (1, 2):  # the buffer grows without a fault
        _one_way(transport, number, busy=False)
    torch.cuda.synchronize()
    transport._signals = FAULTS[fault](transport._signals)
    taken = [_one_way(transport, number, busy=True) for number in range(3, 9)]
    torch.cuda.synchronize()
    for number, copy in enumerate(taken, 3):
        if copy is not None:
            assert_bytes(copy, _WAY, rank=0, slot=_ONE_WAY.name, generation=number)
    transport.check()
    ranks.sync()


def _one_way(transport: Any, number: int, *, busy: bool) -> torch.Tensor | None:
    staged = transport.stage(_ONE_WAY)["x"]
    if transport.rank == 0:
        value = payload(_WAY, rank=0, slot=_ONE_WAY.name, generation=number)
        staged.copy_(value.to(transport.device))
    transport.publish(_ONE_WAY)
    if transport.rank != 1:
        return None
    if busy:
        torch.cuda._sleep(_CYCLES_200MS)
    copy: torch.Tensor = transport.fetch(_ONE_WAY, "x", source=0).clone()
    return copy


CASES = {"late write": _late_write, "slow reader": _slow_reader}
PAIRWISE = [("late write", "none"), ("late write", "early flag")]
PAIRWISE += [("slow reader", "none"), ("slow reader", "no acknowledgement")]
BARRIER = [("late write", "none"), ("late write", "early flag"), ("late write", "leaky barrier")]


@pytest.mark.parametrize(
    ("backend", "case", "fault"),
    [(backend, *pair) for backend in ("cupy_ipc", "nvshmem_signal") for pair in PAIRWISE]
    + [("nvshmem_barrier", *pair) for pair in BARRIER],
)
def test_an_order_that_is_missing_is_seen(backend: str, case: str, fault: str) -> None:
    """Wrong bytes, and only with the fault."""

    def run() -> None:
        # With a single connection, as one backend advises, the device has one queue and keeps its order.
        serving = rig.serving(backend, 2, CUDA_DEVICE_MAX_CONNECTIONS="8")
        serving.run(CASES[case], transport=False, timeout_s=60, fault=fault)

    if fault == "none":
        run()
        return
    with pytest.raises(CaseError) as caught:
        run()
    assert "bytes differ" in str(caught.value) or "got the payload of" in str(caught.value)
