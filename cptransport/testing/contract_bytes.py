# SPDX-License-Identifier: Apache-2.0
"""Contract tests: identity of a transport, and payloads that arrive bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cptransport.errors import CapabilityError, TransportError
from cptransport.testing.contract_base import ContractTests, Figures, clause
from cptransport.testing.oracle import DTYPES, assert_bytes, bytes_of, fill, payload, spoil
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, Capabilities, PartSpec, Selection, Slot

__all__ = ["BytesContract", "exchange_all"]

#: Shapes from nothing to odd; a scalar too.
SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 3), (1,), (7,), (3, 5, 2), (1, 1, 1, 129))


def exchange_all(transport: BoundaryTransport, slot: Slot, generation: int) -> None:
    """Every rank publishes its payload to all; every rank fetches and checks every part of every rank."""
    fill(transport, slot, generation)
    transport.publish(slot)
    for source in range(transport.world_size):
        for part in slot.parts:
            got = transport.fetch(slot, part.name, source=source)
            assert got.device == transport.device
            try:
                assert_bytes(got, part, rank=source, slot=slot.name, generation=generation)
            except AssertionError:
                transport.check()  # a device wait that ended early hands out no payload, and says so here
                raise
            if source != transport.rank and not transport.capabilities.in_place:
                spoil(got)  # whatever is not written anew in a later generation shows


def _identity(ranks: Ranks) -> dict[str, Any]:
    transport = ranks.create()
    assert isinstance(transport, BoundaryTransport)
    assert isinstance(transport.capabilities, Capabilities)
    assert isinstance(transport.selection, Selection)
    assert transport.device.type in transport.capabilities.device_types
    assert transport.device.type == ranks.device.type
    assert transport.stats().bytes_sent == transport.stats().bytes_received == 0
    return {
        "rank": transport.rank,
        "world_size": transport.world_size,
        "name": transport.name,
        "chosen": transport.selection.chosen,
        "capabilities": transport.capabilities,
    }


def _dtypes(ranks: Ranks) -> None:
    transport = ranks.create()
    parts = tuple(PartSpec(str(dtype), (3, 5), dtype) for dtype in DTYPES)
    for generation in range(1, 5):
        exchange_all(transport, Slot("dtypes", parts), generation)


def _sizes(ranks: Ranks) -> None:
    transport = ranks.create()
    parts = tuple(PartSpec(f"p{i}", shape, torch.bfloat16) for i, shape in enumerate(SHAPES))
    for generation in range(1, 5):
        exchange_all(transport, Slot("sizes", parts), generation)


def _large(ranks: Ranks, figures: dict[str, Any]) -> None:
    transport = ranks.create()
    rows = Figures(**figures).large_bytes // 4096
    slot = Slot("large", (PartSpec("large", (rows, 1024), torch.float32),))
    for generation in range(1, 4):
        exchange_all(transport, slot, generation)


def _several_sizes(ranks: Ranks) -> None:
    """Slots of very different sizes, staged one after another before any is published."""
    transport = ranks.create()
    slots = [
        Slot(f"bytes{size}", (PartSpec("part", (size,), torch.uint8),))
        for size in (64, 16 << 10, 512 << 10, 4 << 20)
    ]
    for generation in range(1, 3):
        for slot in slots:
            (part,) = slot.parts
            value = payload(part, rank=transport.rank, slot=slot.name, generation=generation)
            longer = torch.cat([torch.zeros(5, dtype=torch.uint8), value])
            transport.stage(slot)["part"].copy_(longer[5:])
        for slot in slots:
            transport.publish(slot)
        for slot in slots:
            for source in range(transport.world_size):
                got = transport.fetch(slot, "part", source=source)
                assert_bytes(got, slot.parts[0], rank=source, slot=slot.name, generation=generation)


def _logical(ranks: Ranks) -> None:
    """Fill staged parts from transposed, sliced, expanded and reversed tensors."""
    transport = ranks.create()
    part = PartSpec("part", (4, 6), torch.float32)
    slot = Slot("logical", tuple(PartSpec(name, (4, 6), torch.float32) for name in "abcd"))
    for generation in range(1, 4):
        staged = transport.stage(slot)
        value = payload(part, rank=transport.rank, slot="logical", generation=generation)
        wide = torch.zeros(8, 13)
        wide[::2, 1::2] = value
        staged["a"].copy_(value.t().contiguous().t())
        staged["b"].copy_(wide[::2, 1::2])
        staged["c"].copy_(value[:, :1].expand(4, 6))
        staged["d"].t().copy_(value.t())
        transport.publish(slot)
        for source in range(transport.world_size):
            right = payload(part, rank=source, slot="logical", generation=generation)
            for name in "abcd":
                expected = right[:, :1].expand(4, 6) if name == "c" else right
                got = transport.fetch(slot, name, source=source)
                assert torch.equal(bytes_of(got), bytes_of(expected)), f"filled by way of {name}"


def _staged_tensors(ranks: Ranks) -> None:
    transport = ranks.create()
    slot = Slot("staged", (PartSpec("x", (2, 3), torch.float32), PartSpec("y", (), torch.int64)))
    for _ in range(4):
        staged = transport.stage(slot)
        assert set(staged) == {"x", "y"}
        for part in slot.parts:
            tensor = staged[part.name]
            assert tensor.shape == torch.Size(part.shape)
            assert tensor.dtype == part.dtype
            assert tensor.device == transport.device
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
        transport.publish(slot, to=[])


def _grad(ranks: Ranks) -> None:
    transport = ranks.create()
    slot = Slot("grad", (PartSpec("x", (2,), torch.float32),))
    weight = torch.ones(2, device=transport.device, requires_grad=True)
    transport.stage(slot)["x"].copy_(weight * 2)
    with pytest.raises(TransportError, match="grad"):
        transport.publish(slot)
    with torch.no_grad():
        staged = transport.stage(slot)["x"]
        assert not staged.requires_grad
        staged.copy_(weight * 3)
    transport.publish(slot)
    for source in range(transport.world_size):
        got = transport.fetch(slot, "x", source=source)
        assert not got.requires_grad
        assert got.tolist() == [3.0, 3.0]


def _growing(ranks: Ranks) -> None:
    """One name, other parts and shapes in every generation: larger, smaller, other dtypes, none."""
    transport = ranks.create()
    f32, bf16 = torch.float32, torch.bfloat16
    generations: list[tuple[PartSpec, ...]] = [
        (PartSpec("x", (64, 4), f32),),
        (PartSpec("x", (256, 4), f32),),
        (PartSpec("x", (256, 4), f32), PartSpec("y", (5,), bf16)),
        (PartSpec("y", (5000,), bf16),),
        (),
        (PartSpec("x", (1, 4), f32),),
        (PartSpec("x", (1024, 16), bf16), PartSpec("y", (5,), torch.int64)),
        (PartSpec("x", (1024, 17), f32),),
    ]
    for generation, parts in enumerate(generations, 1):
        exchange_all(transport, Slot("growing", parts), generation)


def _many_slots(ranks: Ranks) -> None:
    """More slots and parts than small tables hold, used in turn."""
    transport = ranks.create()
    parts = tuple(PartSpec(f"part {i}", (2,), torch.int16) for i in range(20))
    for generation in range(1, 4):
        for number in range(12):
            exchange_all(
                transport, Slot(f"slot {number}", parts[: 1 + 2 * number % 20]), generation
            )


def _random_payloads(ranks: Ranks, seed: int) -> None:
    """Random parts, dtypes and shapes over many generations of a few slots."""
    transport = ranks.create()
    random_ = random.Random(seed)  # the same on all ranks
    counts = {"a": 0, "b": 0, "c": 0}
    for _ in range(30):
        name = random_.choice("abc")
        parts = tuple(
            PartSpec(
                f"p{i}",
                tuple(random_.choice((0, 1, 2, 3, 9, 33)) for _ in range(random_.randrange(4))),
                random_.choice(DTYPES),
            )
            for i in range(random_.randrange(1, 4))
        )
        counts[name] += 1
        exchange_all(transport, Slot(name, parts), counts[name])


def _no_capture(ranks: Ranks) -> None:
    transport = ranks.create()
    slot = Slot("captured", (PartSpec("x", (2,), torch.float32),))
    transport.stage(slot)
    transport.publish(slot)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(CapabilityError), torch.cuda.graph(graph):
        transport.stage(slot)


class BytesContract(ContractTests):
    """Identity and payloads."""

    @clause("C1")
    def test_identity_and_world_size(self, world_size: int) -> None:
        """Every rank knows its place, its name and what it can do, alike everywhere."""
        found = self.run(_identity, world_size)
        assert [row["rank"] for row in found] == list(range(world_size))
        assert {row["world_size"] for row in found} == {world_size}
        assert len({row["name"] for row in found}) == 1
        assert all(row["chosen"] == row["name"] for row in found)
        assert all(row["capabilities"] == found[0]["capabilities"] for row in found)

    @clause("C3", "C5")
    def test_every_dtype_between_every_pair(self, world_size: int) -> None:
        """All dtypes, NaN patterns included, between every ordered pair of ranks."""
        self.run(_dtypes, world_size)

    @clause("C4", "C5")
    def test_every_size_between_every_pair(self, world_size: int) -> None:
        """Sizes from 0, scalars, odd ones."""
        self.run(_sizes, world_size)

    @clause("C4")
    def test_large_parts(self, world_size: int, figures: Figures) -> None:
        """Parts of megabytes."""
        self.run(_large, world_size, figures=figures)

    @clause("C3", "C4")
    def test_slots_of_different_sizes_together(self, world_size: int) -> None:
        """64 bytes, 16 KiB, 512 KiB, 4 MiB staged together, filled from a slice with an offset."""
        self.run(_several_sizes, world_size)

    @clause("C5")
    def test_payload_is_the_logical_tensor(self, world_size: int) -> None:
        """Strides of what fills a staged tensor do not matter."""
        self.run(_logical, world_size)

    @clause("C5")
    def test_staged_tensors_are_as_specified(self, world_size: int) -> None:
        """Shape, dtype, device, contiguity; no autograd history."""
        self.run(_staged_tensors, world_size)

    @clause("C6")
    def test_publishing_what_requires_grad_is_an_error(self, world_size: int) -> None:
        """TransportError, and the transport stays usable."""
        self.run(_grad, world_size)

    @clause("C2")
    def test_parts_may_change_and_grow(self, world_size: int) -> None:
        """Parts, shapes and dtypes of a name change from one generation to the next."""
        self.run(_growing, world_size)

    @clause("C2", "C3")
    def test_many_slots_and_parts(self, world_size: int) -> None:
        """Slots and parts are told apart however many there are."""
        self.run(_many_slots, world_size)

    @clause("C2", "C3", "C4")
    def test_random_slots(self, world_size: int) -> None:
        """A random sequence of slots, parts, shapes and dtypes."""
        for seed in range(3):
            self.run(_random_payloads, world_size, seed=seed)

    @clause("C25", cuda_graph=False)
    def test_capture_without_the_capability_is_an_error(self, world_size: int) -> None:
        """A transport that does not claim ``cuda_graph`` refuses to be captured."""
        if self.device != "cuda":
            pytest.skip("needs CUDA tensors")
        self.run(_no_capture, world_size)
