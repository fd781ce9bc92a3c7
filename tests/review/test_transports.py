# SPDX-License-Identifier: Apache-2.0
"""What an independent reading of the protocol found in transports; each case failed once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from cptransport import BoundaryTransport, PartSpec, Slot, create_transport
from cptransport.control import client_of_our_own
from cptransport.testing import run_ranks

BACKENDS = ["threads", "gloo"]


def swap_many_parts(transport: BoundaryTransport, count: int) -> bool:
    """Two slots of many parts under way at once; every part must be its own."""
    slots = [
        Slot(name, tuple(PartSpec(f"part{i}", (2,), torch.float32) for i in range(count)))
        for name in ("first", "second")
    ]
    peer = 1 - transport.rank
    for _ in range(3):
        staged = [transport.stage(slot) for slot in slots]
        for number, tensors in enumerate(staged):
            for i, tensor in enumerate(tensors.values()):
                tensor.fill_(1000 * transport.rank + 100 * number + i)
        for slot in reversed(slots):
            transport.publish(slot)
        for number, slot in enumerate(slots):
            gathered = transport.gather(slot)
            for i, part in enumerate(slot.parts):
                found = gathered.tensor(part.name, peer)
                if not torch.equal(found, torch.full((2,), 1000.0 * peer + 100 * number + i)):
                    return False
    return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_parts_of_two_slots_never_mix(backend: str) -> None:
    assert run_ranks(swap_many_parts, backend=backend, count=20) == [True, True]


def move_scattered_rows(transport: BoundaryTransport, name: str) -> list[int]:
    """Move rows 0 and 2 of three rows of two elements from rank 0 to rank 1; return their bytes."""
    dtype: torch.dtype = getattr(torch, name)
    slot = Slot("rows", (PartSpec("x", (3, 2), dtype, frozenset({(0, 1, 0), (0, 1, 2)})),))
    staged = transport.stage(slot)["x"]
    numbers = torch.arange(staged.numel() * dtype.itemsize, dtype=torch.uint8)
    staged.copy_(numbers.view(dtype).view(3, 2))
    transport.publish(slot)
    if transport.rank == 0:
        return []
    rows = transport.fetch(slot, "x", source=0).view(torch.uint8).view(3, -1)
    return [*rows[0].tolist(), *rows[2].tolist()]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "float8_e5m2", "complex64"])
def test_rows_of_dtypes_that_torch_cannot_index(backend: str, name: str) -> None:
    size = 2 * getattr(torch, name).itemsize
    moved = [*range(size), *range(2 * size, 3 * size)]
    assert run_ranks(move_scattered_rows, backend=backend, name=name) == [[], moved]


def first_in_inference_mode(transport: BoundaryTransport) -> float:
    """Use both buffers of a slot in inference mode, then both again outside."""
    slot = Slot("validated", (PartSpec("x", (3,), torch.float32),))
    for generation in range(4):
        with torch.inference_mode(generation < 2):
            transport.stage(slot)["x"].fill_(generation)
            transport.publish(slot)
            total = transport.gather(slot).tensor("x", (transport.rank + 1) % transport.world_size)
    return float(total.sum())


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_outlive_inference_mode(backend: str) -> None:
    assert run_ranks(first_in_inference_mode, backend=backend) == [9.0, 9.0]


def test_buffers_of_loopback_outlive_inference_mode() -> None:
    with create_transport(backend="loopback") as transport:
        assert first_in_inference_mode(transport) == 9.0


def test_stores_of_torch_2_7_cannot_be_cloned() -> None:
    """The oldest torch that is claimed has no ``Store.clone``; it came with 2.8."""
    old = object()
    assert client_of_our_own(old) is old
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    store.set("key", "value")
    assert client_of_our_own(store) is not store
    assert client_of_our_own(store).get("key") == b"value"
