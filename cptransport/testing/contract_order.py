# SPDX-License-Identifier: Apache-2.0
"""Contract tests: publication is a release, waiting an acquire, and a barrier holds everybody."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import torch

from cptransport.testing.contract_base import ContractTests, Figures, clause
from cptransport.testing.oracle import assert_bytes, fill
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["OrderContract", "complete", "settle"]


def settle(transport: BoundaryTransport) -> None:
    """Wait until the device has done what was enqueued; the host clock means something only then."""
    if transport.device.type == "cuda":
        torch.cuda.synchronize(transport.device)


def complete(transport: BoundaryTransport, verbs: Callable[[], object]) -> None:
    """Run verbs to their end, on the device too, and raise what a device wait has reported."""
    verbs()
    settle(transport)
    transport.check()


def _delayed_producer(ranks: Ranks, delay_s: float) -> list[float]:
    """Every rank in turn publishes late; the others must get the new payload, and wait for it."""
    transport = ranks.create()
    part = PartSpec("x", (100,), torch.float32)
    slot = Slot("late", (part,))
    waits = []
    for number in range(1, ranks.world_size + 1):
        late = number - 1
        ranks.sync()
        start = time.monotonic()
        fill(transport, slot, number)
        if ranks.rank == late:
            time.sleep(delay_s)
        transport.publish(slot)
        got = transport.fetch(slot, "x", source=late)
        assert_bytes(got, part, rank=late, slot="late", generation=number)
        settle(transport)
        waits.append(time.monotonic() - start)
        for source in range(ranks.world_size):
            if source != late:
                transport.fetch(slot, "x", source=source)
    return waits


def _delayed_gather(ranks: Ranks, delay_s: float) -> list[float]:
    transport = ranks.create()
    part = PartSpec("x", (100,), torch.bfloat16)
    slot = Slot("late", (part,))
    waits = []
    for number in range(1, ranks.world_size + 1):
        ranks.sync()
        start = time.monotonic()
        fill(transport, slot, number)
        if ranks.rank == number - 1:
            time.sleep(delay_s)
        transport.publish(slot)
        gathered = transport.gather(slot)
        for source in range(ranks.world_size):
            got = gathered.tensor("x", source)
            assert_bytes(got, part, rank=source, slot="late", generation=number)
        settle(transport)
        waits.append(time.monotonic() - start)
    return waits


def _publish_alone(ranks: Ranks) -> None:
    """Publishing does not wait for a destination that has its own work to do first."""
    transport = ranks.create()
    part = PartSpec("x", (1 << 18,), torch.float32)
    slot = Slot("alone", (part,))
    for number in range(1, 4):
        fill(transport, slot, number)
        for turn in range(ranks.world_size):  # each when the one before is done
            if ranks.rank == turn:
                transport.publish(slot)
            ranks.sync()
        for source in range(ranks.world_size):
            got = transport.fetch(slot, "x", source=source)
            assert_bytes(got, part, rank=source, slot="alone", generation=number)


def _publish_goes_out(ranks: Ranks) -> None:
    """A publication reaches its destinations though the rank calls no further verb."""
    transport = ranks.create()
    slot = Slot("prompt", (PartSpec("x", (100,), torch.float32),))
    for generation in range(1, 4):
        fill(transport, slot, generation)
        transport.publish(slot)
        last = ranks.world_size - 1
        if ranks.rank == last:
            for source in range(last):
                got = transport.fetch(slot, "x", source=source)
                assert_bytes(got, slot.part("x"), rank=source, slot="prompt", generation=generation)
            complete(transport, lambda: None)
            ranks.tell(f"arrived/{generation}", "")
        else:
            ranks.ask(f"arrived/{generation}")
        transport.gather(
            slot,
            parts={"x": [s for s in range(ranks.world_size) if ranks.rank != last or s == last]},
        )


def _late_barrier(ranks: Ranks, delay_s: float) -> list[tuple[float, float]]:
    """Every rank in turn is late; returns when this rank arrived and left, on the host's clock."""
    transport = ranks.create()
    transport.barrier()
    times = []
    for late in range(ranks.world_size):
        if ranks.rank == late:
            time.sleep(delay_s)
        arrived = time.monotonic()
        transport.barrier()
        settle(transport)
        times.append((arrived, time.monotonic()))
    return times


def _many_barriers(ranks: Ranks, figures: dict[str, Any]) -> list[tuple[float, float]]:
    transport = ranks.create()
    limits = Figures(**figures)
    chance = random.Random(ranks.rank)
    times = []
    for _ in range(limits.barriers):
        if chance.random() < 0.5:
            time.sleep(chance.random() * limits.jitter_s)
        arrived = time.monotonic()
        transport.barrier()
        settle(transport)
        times.append((arrived, time.monotonic()))
    return times


def _barrier_among_verbs(ranks: Ranks) -> None:
    """A barrier between any two verbs changes nothing, and orders what is seen without the transport."""
    transport = ranks.create()
    size, me = ranks.world_size, ranks.rank
    part = PartSpec("x", (7,), torch.float32)
    slot = Slot("fenced", (part,))
    for number in range(1, 6):
        transport.barrier()
        fill(transport, slot, number)
        transport.barrier()
        transport.publish(slot)
        if number % 2:
            settle(transport)
            ranks.tell(f"{number}/{me}", "")
            transport.barrier()
            settle(transport)
            for peer in range(size):
                ranks.ask(f"{number}/{peer}", limit_s=0.5)
        for source in range(size):
            got = transport.fetch(slot, "x", source=source)
            assert_bytes(got, part, rank=source, slot="fenced", generation=number)


def _ring_fold(ranks: Ranks, figures: dict[str, Any]) -> list[int]:
    """Fold acc = 2 acc + rank, one step of the ring per generation, plain loads of what was fetched."""
    transport = ranks.create()
    limits = Figures(**figures)
    size, me = ranks.world_size, ranks.rank
    left = (me - 1) % size
    routes = frozenset((r, (r + 1) % size) for r in range(size))
    slot = Slot("ring", (PartSpec("acc", (3,), torch.int64, routes),))
    chance = random.Random(me)
    mine = torch.full((3,), me, dtype=torch.int64, device=transport.device)
    results = []
    for _ in range(limits.rounds // 4):
        accumulated = mine
        for _ in range(size):
            transport.stage(slot)["acc"].copy_(accumulated)
            if chance.random() < 0.2:
                time.sleep(chance.random() * limits.jitter_s)
            transport.publish(slot)
            accumulated = 2 * transport.fetch(slot, "acc", source=left) + me
        results.append(int(accumulated.sum().item()))
    return results


class OrderContract(ContractTests):
    """Release, acquire, barriers."""

    @clause("C19", "C20", ranks=2)
    def test_delayed_producer(self, world_size: int, figures: Figures) -> None:
        """A fetch returns the payload of its generation, however late; on CPU it blocks until then."""
        self._waits(_delayed_producer, world_size, figures)

    @clause("C19", "C20", ranks=2)
    def test_delayed_producer_gather(self, world_size: int, figures: Figures) -> None:
        """The same for ``gather``."""
        self._waits(_delayed_gather, world_size, figures)

    def _waits(self, case: Any, world_size: int, figures: Figures) -> None:
        found = self.run(case, world_size, delay_s=figures.delay_s)
        for rank, waits in enumerate(found):
            assert min(waits) >= 0.9 * figures.delay_s, f"rank {rank} did not wait: {waits}"

    @clause("C21", ranks=2, pairwise=True)
    def test_publish_does_not_wait_for_its_destinations(self, world_size: int) -> None:
        """Ranks publish one after the other, each after the one before has returned."""
        self.run(_publish_alone, world_size)

    @clause("C19", "C21", ranks=2, pairwise=True)
    def test_a_publication_needs_no_further_verb(self, world_size: int) -> None:
        """It arrives while its rank is elsewhere."""
        self.run(_publish_goes_out, world_size)

    @clause("C19", ranks=2)
    def test_fold_that_does_not_commute(self, world_size: int, figures: Figures) -> None:
        """Fold acc = 2 acc + rank around the ring, for many generations with jitter."""
        found = self.run(_ring_fold, world_size, figures=figures)
        for rank, results in enumerate(found):
            accumulated = rank
            # The value that arrives at this rank after a whole turn started here.
            for step in range(1, world_size + 1):
                accumulated = 2 * accumulated + (rank + step) % world_size
            assert set(results) == {3 * accumulated}, f"rank {rank}"

    @clause("C22")
    def test_barrier_waits_for_a_late_rank(self, world_size: int, figures: Figures) -> None:
        """Whichever rank is late, nobody leaves before it has arrived."""
        found = self.run(_late_barrier, world_size, delay_s=figures.delay_s)
        self._nobody_leaves_early(found)

    @clause("C22", ranks=2)
    def test_many_barriers_with_jitter(self, world_size: int, figures: Figures) -> None:
        """Nobody leaves a barrier before the last one has arrived at that barrier."""
        self._nobody_leaves_early(self.run(_many_barriers, world_size, figures=figures))

    def _nobody_leaves_early(self, found: list[list[tuple[float, float]]]) -> None:
        for number, times in enumerate(zip(*found, strict=True)):
            last = max(arrived for arrived, _ in times)
            for rank, (_, left) in enumerate(times):
                assert left >= last, f"barrier {number}: rank {rank} left {last - left:.6f} s early"

    @clause("C22", "C15")
    def test_barriers_among_verbs(self, world_size: int) -> None:
        """Between stage, publish and fetch."""
        self.run(_barrier_among_verbs, world_size)
