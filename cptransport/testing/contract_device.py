# SPDX-License-Identifier: Apache-2.0
"""Contract tests on CUDA tensors: stream order, no host synchronisation, capture, deadlines.

On another device, or without the capability, these are skipped with that reason.
"""

from __future__ import annotations

import time

import pytest
import torch

from cptransport.errors import PeerFailedError, TransportTimeoutError
from cptransport.testing.contract_base import GRACE_S, ContractTests, clause
from cptransport.testing.contract_order import complete
from cptransport.testing.contract_routes import part_at
from cptransport.testing.oracle import assert_bytes, payload
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["DeviceContract"]

_PART = PartSpec("x", (4096,), torch.float32)
_SLOT = Slot("device", (_PART,))
_GATHERED = Slot("device gathered", (_PART,))
_CYCLES_50MS = 100_000_000  # clock cycles of torch.cuda._sleep: about 50 ms at 1.98 GHz


def _values(transport: BoundaryTransport, generations: int) -> list[torch.Tensor]:
    """Payloads of this rank on its device, so that the verbs under test copy nothing from the host."""
    made = [
        payload(_PART, rank=transport.rank, slot="device", generation=number)
        for number in range(1, generations + 1)
    ]
    return [value.to(transport.device) for value in made]


def _held_back(ranks: Ranks) -> None:
    """The producer's stream is busy for 50 ms before the payload is written; readers must not be early."""
    transport = ranks.create()
    values = _values(transport, 12)
    for number, value in enumerate(values, 1):
        if number % ranks.world_size == ranks.rank:
            torch.cuda._sleep(_CYCLES_50MS)
        transport.stage(_SLOT)["x"].copy_(value)
        transport.publish(_SLOT)
        copies = [transport.fetch(_SLOT, "x", source=s).clone() for s in range(ranks.world_size)]
        for source, copy in enumerate(copies):
            assert_bytes(copy, _PART, rank=source, slot="device", generation=number)


def _streams(ranks: Ranks) -> None:
    """Verbs on two streams in turn, unrelated work on both; successive calls are chained by events."""
    transport = ranks.create()
    values = _values(transport, 12)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for number, value in enumerate(values, 1):
        with torch.cuda.stream(streams[number % 2]):
            torch.cuda._sleep(_CYCLES_50MS // 20)
            transport.stage(_SLOT)["x"].copy_(value)
            transport.publish(_SLOT)
        reader = streams[(number + 1) % 2]
        with torch.cuda.stream(reader):
            copies = [
                transport.fetch(_SLOT, "x", source=s).clone() for s in range(ranks.world_size)
            ]
        reader.synchronize()
        for source, copy in enumerate(copies):
            assert_bytes(copy, _PART, rank=source, slot="device", generation=number)


def _no_synchronisation(ranks: Ranks) -> float:
    """Host seconds that the verbs took while the device was busy for 200 ms."""
    transport = ranks.create()
    values = _values(transport, 6)

    def turn(value: torch.Tensor) -> list[torch.Tensor]:
        transport.stage(_SLOT)["x"].copy_(value)
        transport.publish(_SLOT)
        return [transport.fetch(_SLOT, "x", source=s).clone() for s in range(ranks.world_size)]

    for value in values[:3]:
        turn(value)
        transport.barrier()
    torch.cuda.synchronize()
    ranks.sync()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(4 * _CYCLES_50MS)
        start = time.monotonic()
        copies = [turn(value) for value in values[3:]]
        transport.barrier()
        spent = time.monotonic() - start
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for number, row in enumerate(copies, 4):
        for source, copy in enumerate(row):
            assert_bytes(copy, _PART, rank=source, slot="device", generation=number)
    return spent


def _busy_device(ranks: Ranks) -> None:
    """The very first use comes while another kernel occupies the device."""
    transport = ranks.create()
    value = _values(transport, 1)[0]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(4 * _CYCLES_50MS)
    transport.stage(_SLOT)["x"].copy_(value)
    transport.publish(_SLOT)
    for source in range(ranks.world_size):
        copy = transport.fetch(_SLOT, "x", source=source).clone()
        assert_bytes(copy, _PART, rank=source, slot="device", generation=1)
    transport.barrier()


def _capture(ranks: Ranks, uses: int) -> None:
    """Capture ``uses`` generations of a fetched and a gathered slot, twice; replay both in turn, eager between."""
    transport = ranks.create()
    size = ranks.world_size
    source_value = torch.zeros(4096, device=transport.device)
    results = torch.zeros(uses, size, 4096, device=transport.device)
    gathers = torch.zeros_like(results)
    tables = torch.zeros(uses, size, dtype=torch.int64, device=transport.device)

    def turn(index: int) -> None:
        transport.stage(_SLOT)["x"].copy_(source_value + index)
        transport.publish(_SLOT)
        for source in range(size):
            results[index, source].copy_(transport.fetch(_SLOT, "x", source=source))
        transport.stage(_GATHERED)["x"].copy_(source_value + index)
        transport.publish(_GATHERED)
        gathered = transport.gather(_GATHERED)
        tables[index].copy_(gathered.addresses["x"])
        for source in range(size):
            gathers[index, source].copy_(gathered.tensor("x", source))

    def check(base: int) -> None:
        torch.cuda.synchronize()
        assert torch.equal(results, gathers)
        for source, address in enumerate(tables[-1].tolist()):  # the others are valid no more
            found = part_at(address, _PART, transport.device)
            assert torch.equal(found, gathers[-1, source].cpu()), f"source {source}"
        for index in range(uses):
            for source in range(size):
                expected = float(base + 100 * source + index)
                found = results[index, source].unique().tolist()
                assert found == [expected], f"use {index}, source {source}: {found[:4]}"

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(uses):  # once eagerly before
            turn(index)
    torch.cuda.synchronize()
    ranks.sync()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, stream=stream):
            for index in range(uses):
                turn(index)
    ranks.sync()
    for replay in range(20):
        base = 1000 * (replay + 1)
        source_value.fill_(base + 100 * ranks.rank)
        results.fill_(-1)
        gathers.fill_(-2)
        tables.zero_()
        torch.cuda.synchronize()
        if replay % 5 == 4:
            for index in range(uses):
                turn(index)
        else:
            graphs[replay % 2].replay()
        check(base)
    torch.cuda.synchronize()
    ranks.sync()


def _device_deadline(ranks: Ranks, limit_s: float) -> None:
    """Rank 0 waits on the device for a rank that does not publish: its stream goes on, and the error is reported."""
    transport = ranks.create(timeout_s=limit_s)
    value = _values(transport, 2)
    for source in range(ranks.world_size):
        if source == 0:
            transport.stage(_SLOT)["x"].copy_(value[0])
            transport.publish(_SLOT)
        transport.fetch(_SLOT, "x", source=source)
    torch.cuda.synchronize()
    ranks.sync()
    if ranks.rank == ranks.world_size - 1:
        ranks.ask("raised")
        return
    start = time.monotonic()

    def wait() -> None:
        transport.stage(_SLOT)["x"].copy_(value[1])
        transport.publish(_SLOT)
        got = transport.fetch(_SLOT, "x", source=ranks.world_size - 1)
        torch.cuda.synchronize()
        assert got.isnan().all(), "an expired device wait hands out NaN"

    with pytest.raises((TransportTimeoutError, PeerFailedError)):
        complete(transport, wait)
    assert time.monotonic() - start < limit_s + GRACE_S
    if ranks.rank == 0:
        ranks.tell("raised", "")


class DeviceContract(ContractTests):
    """CUDA tensors."""

    @pytest.fixture
    def _cuda(self) -> None:
        if self.device != "cuda":
            pytest.skip("CUDA tensors only")

    @clause("C19", "C20")
    @pytest.mark.usefixtures("_cuda")
    def test_a_stream_that_is_held_back(self, world_size: int) -> None:
        """Order is that of the streams, not of the host."""
        self.run(_held_back, world_size)

    @clause("C20")
    @pytest.mark.usefixtures("_cuda")
    def test_verbs_on_two_streams(self, world_size: int) -> None:
        """Successive calls on different streams are ordered."""
        self.run(_streams, world_size)

    @clause("C20", host_staged=False)
    @pytest.mark.usefixtures("_cuda")
    def test_verbs_do_not_synchronise_the_host(self, world_size: int) -> None:
        """While the device is busy, the verbs return at once."""
        spent = self.run(_no_synchronisation, world_size)
        assert max(spent) < 0.15, f"host seconds per rank while the device was busy: {spent}"

    @clause("C20")
    @pytest.mark.usefixtures("_cuda")
    def test_first_use_on_a_busy_device(self, world_size: int) -> None:
        """Nothing that the first use needs waits for an idle device."""
        self.run(_busy_device, world_size)

    @clause("C35", cuda_graph=True)
    @pytest.mark.usefixtures("_cuda")
    @pytest.mark.parametrize("uses", [1, 2, 3])
    def test_capture_and_replay(self, world_size: int, uses: int) -> None:
        """Odd and even uses of a slot in a capture, and in another one; 20 replays, eager calls between them."""
        self.run(_capture, world_size, uses=uses)

    @clause("C37", "C26", ranks=2)
    @pytest.mark.usefixtures("_cuda")
    def test_device_waits_end(self, world_size: int) -> None:
        """NaN, an error at the next check, and a stream that goes on."""
        self.run(_device_deadline, world_size, limit_s=2.0)
