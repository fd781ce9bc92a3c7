# SPDX-License-Identifier: Apache-2.0
"""Verbs on several streams, without a device: which stream is made to wait for which."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import cptransport.base
import cptransport.lifecycle
from cptransport.base import TransportBase
from cptransport.control import ControlPlane
from cptransport.errors import CapabilityError, TransportError
from cptransport.transport import Capabilities


class Stream:
    def __init__(self, name: str, capturing: bool = False) -> None:
        self.name, self.capturing = name, capturing
        self.waited: list[str] = []

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)


class Cuda:
    """``torch.cuda`` as far as the order of verbs needs it."""

    Stream = Stream

    def __init__(self) -> None:
        self.stream_now = Stream("first")
        self.device_now = 0

    def current_stream(self, device: Any) -> Stream:
        return self.stream_now

    def is_current_stream_capturing(self) -> bool:
        return self.stream_now.capturing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.stream_now = self.stream_now, stream
        yield
        self.stream_now = before

    def current_device(self) -> int:
        return self.device_now

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.device_now = self.device_now, device.index
        yield
        self.device_now = before


class Transport(TransportBase):
    """A barrier is a look at where it runs."""

    def __init__(self, cuda: Cuda) -> None:
        control = ControlPlane(dist.HashStore(), 0, 2, 5.0)
        device = torch.device("cuda", 1)
        super().__init__(
            "streams",
            device=device,
            control=control,
            timeout_s=5.0,
            capabilities=Capabilities(cuda_graph=True),
        )
        self.cuda = cuda
        self.devices: list[int] = []
        self.drain_error: Exception | None = None
        self.closed: list[bool] = []

    def _barrier(self) -> None:
        self.devices.append(self.cuda.device_now)

    def _drain(self) -> None:
        if self.drain_error is not None:
            raise self.drain_error

    def _close(self, broken: bool) -> None:
        self.closed.append(broken)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()

    class Driver:
        @staticmethod
        def _cuda_getCurrentRawStream(device: int) -> int:
            return id(made.stream_now)

    class Torch:
        cuda, _C = made, Driver

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    for module in (cptransport.base, cptransport.lifecycle):
        monkeypatch.setattr(module, "torch", Torch())
    return made


def test_a_verb_waits_for_the_stream_of_the_one_before(cuda: Cuda) -> None:
    transport = Transport(cuda)
    first, second = cuda.stream_now, Stream("second")
    transport.barrier()
    transport.barrier()
    assert first.waited == []
    with cuda.stream(second):
        transport.barrier()
        transport.barrier()
    transport.barrier()
    assert (first.waited, second.waited) == (["second"], ["first"])


def test_verbs_run_on_the_device_of_the_transport(cuda: Cuda) -> None:
    transport = Transport(cuda)
    transport.barrier()
    cuda.device_now = 1
    transport.barrier()
    assert transport.devices == [1, 1]
    assert cuda.device_now == 1


@pytest.mark.parametrize(("before", "after"), [(False, True), (True, False)])
def test_a_capture_is_not_made_to_depend_on_what_is_outside_it(
    cuda: Cuda, before: bool, after: bool
) -> None:
    transport = Transport(cuda)
    cuda.stream_now.capturing = before
    transport.barrier()
    second = Stream("second", capturing=after)
    with cuda.stream(second):
        transport.barrier()
    assert second.waited == []


def test_a_transport_that_cannot_be_captured_says_so(cuda: Cuda) -> None:
    transport = Transport(cuda)
    cuda.stream_now.capturing = True
    transport.barrier()
    transport.capabilities = Capabilities()
    with pytest.raises(CapabilityError, match="captured"):
        transport.barrier()
    cuda.stream_now.capturing = False
    transport.barrier()
    assert len(transport.devices) == 2


def test_two_streams_of_one_capture_are_chained_and_those_of_a_past_one_too(cuda: Cuda) -> None:
    transport = Transport(cuda)
    first, second = cuda.stream_now, Stream("second", capturing=True)
    first.capturing = True
    transport.barrier()
    with cuda.stream(second):
        transport.barrier()
    assert second.waited == ["first"]
    first.capturing = second.capturing = False
    transport.barrier()
    assert first.waited == ["second"]


def test_an_error_of_the_device_while_closing_is_ours_and_closes_as_broken(cuda: Cuda) -> None:
    transport = Transport(cuda)
    transport.drain_error = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(TransportError, match="illegal memory access") as caught:
        transport.close()
    assert caught.value.__cause__ is transport.drain_error
    assert transport.closed == [True]
