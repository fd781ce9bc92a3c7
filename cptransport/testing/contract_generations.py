# SPDX-License-Identifier: Apache-2.0
"""Contract tests: generations count, verbs keep their order, buffers stay valid as long as promised."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from cptransport.errors import CapabilityError, GenerationError
from cptransport.testing.contract_base import ContractTests, Figures, clause
from cptransport.testing.contract_bytes import exchange_all
from cptransport.testing.oracle import assert_bytes, bytes_of, fill, payload, spoil
from cptransport.testing.ranks import Ranks
from cptransport.transport import PartSpec, Route, Slot

__all__ = ["GenerationsContract"]


def _many_generations(ranks: Ranks, figures: dict[str, Any]) -> None:
    """Random pauses on every rank, sources taken in random order, some left for the next stage."""
    transport = ranks.create()
    limits = Figures(**figures)
    chance = random.Random(ranks.rank)
    size = ranks.world_size
    part = PartSpec("x", (257,), torch.float32, _all_pairs(size))
    plain = PartSpec("y", (3,), torch.int64)
    slot = Slot("many", (part, plain))
    for number in range(1, limits.rounds + 1):
        _pause(chance, limits)
        fill(transport, slot, number)
        _pause(chance, limits)
        transport.publish(slot)
        _pause(chance, limits)
        order = [(p, s) for p in slot.parts for s in range(size)]
        chance.shuffle(order)
        for spec, source in order:
            if spec is part and (source == ranks.rank or chance.random() < 0.3):
                continue
            got = transport.fetch(slot, spec.name, source=source)
            assert_bytes(got, spec, rank=source, slot=slot.name, generation=number)
            if source != ranks.rank and not transport.capabilities.in_place:
                spoil(got)


def _all_pairs(size: int) -> frozenset[Route]:
    return frozenset((s, d) for s in range(size) for d in range(size) if s != d)


def _pause(chance: random.Random, limits: Figures) -> None:
    if chance.random() < 0.2:
        time.sleep(chance.random() * limits.jitter_s)


def _out_of_order(ranks: Ranks) -> None:
    transport = ranks.create()
    part = PartSpec("x", (4,), torch.float32)
    slot = Slot("order", (part,))
    for verb in (
        lambda: transport.publish(slot),
        lambda: transport.fetch(slot, "x", source=ranks.rank),
        lambda: transport.gather(slot),
    ):
        with pytest.raises(GenerationError):  # before the first stage
            verb()
    for number in range(1, 4):
        fill(transport, slot, number)
        transport.publish(slot)
        with pytest.raises(GenerationError):
            transport.publish(slot)
        other = Slot("order", (PartSpec("x", (5,), torch.float32),))
        with pytest.raises(GenerationError):
            transport.publish(other)  # staged with other parts
        with pytest.raises(GenerationError):
            transport.fetch(other, "x", source=0)
        for source in range(ranks.world_size):
            got = transport.fetch(slot, "x", source=source)
            assert_bytes(got, part, rank=source, slot="order", generation=number)
            with pytest.raises(GenerationError):
                transport.fetch(slot, "x", source=source)
        with pytest.raises(GenerationError):
            transport.gather(slot)  # everything was taken


def _idle_ranks(ranks: Ranks) -> None:
    """A rank that neither sends nor receives stages, and that is all it does."""
    transport = ranks.create()
    size = ranks.world_size
    for number in range(1, 9):
        pair = (number % size, (number + 1) % size)
        slot = Slot("idle", (PartSpec("x", (6,), torch.float32, frozenset({pair})),))
        fill(transport, slot, number)
        if ranks.rank == pair[0] or not transport.capabilities.pairwise:
            transport.publish(slot)
        if ranks.rank == pair[1]:
            got = transport.fetch(slot, "x", source=pair[0])
            assert_bytes(got, slot.parts[0], rank=pair[0], slot="idle", generation=number)


def _interleaved(ranks: Ranks) -> None:
    """Generations of one slot open and close between the verbs of others."""
    transport = ranks.create()
    size = ranks.world_size
    part = PartSpec("x", (9,), torch.int32)
    slow, fast = Slot("slow", (part,)), Slot("fast", (part,))
    fast_number = 0
    for number in range(1, 5):
        fill(transport, slow, number)
        for _ in range(3):
            fast_number += 1
            exchange_all(transport, fast, fast_number)
        transport.publish(slow)
        for _ in range(2):
            fast_number += 1
            exchange_all(transport, fast, fast_number)
        held = [transport.fetch(slow, "x", source=source) for source in range(size)]
        for _ in range(2):  # both buffers: what was fetched from one slot is no other's
            fast_number += 1
            exchange_all(transport, fast, fast_number)
        for source, got in enumerate(held):
            assert_bytes(got, part, rank=source, slot="slow", generation=number)


def _handoff(ranks: Ranks, figures: dict[str, Any]) -> list[int]:
    """There and back along a chain: acc = 2 acc + rank; a rank fetches before it publishes."""
    transport = ranks.create()
    size, me = ranks.world_size, ranks.rank
    chance = random.Random(me)
    limits = Figures(**figures)
    there = frozenset((r, r + 1) for r in range(size - 1))
    back = frozenset((r + 1, r) for r in range(size - 1))
    results = []
    for turn in range(limits.rounds // 10):
        accumulated = turn
        for name, routes, first, step in (("there", there, 0, 1), ("back", back, size - 1, -1)):
            slot = Slot(name, (PartSpec("acc", (), torch.int64, routes),))
            staged = transport.stage(slot)["acc"]
            if me != first:
                accumulated = int(transport.fetch(slot, "acc", source=me - step).item())
            _pause(chance, limits)
            accumulated = 2 * accumulated + me
            staged.fill_(accumulated)
            transport.publish(slot)
        results.append(accumulated)
    return results


def _handoff_result(size: int, turn: int, rank: int) -> int:
    accumulated = turn
    for visited in (*range(size), *range(size - 1, rank - 1, -1)):
        accumulated = 2 * accumulated + visited
    return accumulated


def _not_pairwise(ranks: Ranks) -> None:
    transport = ranks.create()
    part = PartSpec("x", (2,), torch.float32)
    slot = Slot("early", (part,))
    fill(transport, slot, 1)
    with pytest.raises(CapabilityError):
        transport.fetch(slot, "x", source=(ranks.rank + 1) % ranks.world_size)
    with pytest.raises(CapabilityError):
        transport.gather(slot)
    transport.publish(slot)
    for source in range(ranks.world_size):
        got = transport.fetch(slot, "x", source=source)
        assert_bytes(got, part, rank=source, slot="early", generation=1)


def _slow_readers(ranks: Ranks, figures: dict[str, Any]) -> None:
    """Rank 0 only sends, and spoils what it stages at once; the others hold each generation for a while."""
    transport = ranks.create()
    size, me = ranks.world_size, ranks.rank
    chance = random.Random(me)
    delay = Figures(**figures).delay_s / 6
    routes = frozenset((0, d) for d in range(1, size))
    part = PartSpec("x", (4096,), torch.float32, routes)
    for number in range(1, 9):
        slot = Slot("held", (part,))
        staged = transport.stage(slot)["x"]
        if me == 0:
            spoil(staged)
            staged.copy_(payload(part, rank=0, slot="held", generation=number))
        if me == 0 or not transport.capabilities.pairwise:
            transport.publish(slot)
        if me > 0:
            got = transport.fetch(slot, "x", source=0)
            time.sleep(delay * chance.choice((0, 1)))
            assert_bytes(got, part, rank=0, slot="held", generation=number)


def _staged_survives_publish(ranks: Ranks) -> None:
    """A staged tensor can be read by its owner until the next stage, and is not handed out again at g+1."""
    transport = ranks.create()
    part = PartSpec("x", (33,), torch.float32)
    slot = Slot("mine", (part,))
    before = None
    for number in range(1, 6):
        staged = transport.stage(slot)["x"]
        if before is not None:
            assert staged.data_ptr() != before
        staged.copy_(payload(part, rank=ranks.rank, slot="mine", generation=number))
        transport.publish(slot)
        for source in range(ranks.world_size):
            got = transport.fetch(slot, "x", source=source)
            assert torch.equal(
                bytes_of(got),
                bytes_of(payload(part, rank=source, slot="mine", generation=number)),
            )
        right = payload(part, rank=ranks.rank, slot="mine", generation=number)
        assert torch.equal(bytes_of(staged), bytes_of(right))
        before = staged.data_ptr()


class GenerationsContract(ContractTests):
    """Counting, order of verbs, ownership."""

    @clause("C12", "C16", "C17", "C19")
    def test_many_generations_with_jitter(self, world_size: int, figures: Figures) -> None:
        """Hundreds of generations, random pauses, random order of taking, received buffers spoilt."""
        self.run(_many_generations, world_size, figures=figures)

    @clause("C13", "C10")
    def test_verbs_out_of_order(self, world_size: int) -> None:
        """GenerationError on the caller; the transport and its peers go on."""
        self.run(_out_of_order, world_size)

    @clause("C12", ranks=2)
    def test_ranks_that_take_no_part(self, world_size: int) -> None:
        """They stage, nothing else; the others do not wait for more."""
        self.run(_idle_ranks, world_size)

    @clause("C15", "C24")
    def test_slots_do_not_disturb_each_other(self, world_size: int) -> None:
        """Verbs of one slot between verbs of another."""
        self.run(_interleaved, world_size)

    @clause("C14", "C19", ranks=2, pairwise=True)
    def test_handoff_along_a_chain(self, world_size: int, figures: Figures) -> None:
        """A fold that does not commute, there and back, by one slot per visit of a rank."""
        found = self.run(_handoff, world_size, figures=figures)
        for rank, results in enumerate(found):
            expected = [_handoff_result(world_size, turn, rank) for turn in range(len(results))]
            assert results == expected

    @clause("C14", "C24", "C25", ranks=2, pairwise=False)
    def test_fetch_before_publish_without_pairwise(self, world_size: int) -> None:
        """CapabilityError on the caller, and the transport stays usable."""
        self.run(_not_pairwise, world_size)

    @clause("C16", "C17", ranks=2)
    def test_slow_readers_keep_their_data(self, world_size: int, figures: Figures) -> None:
        """While the sender stages and rewrites buffers as early as the contract lets it."""
        self.run(_slow_readers, world_size, figures=figures)

    @clause("C16")
    def test_staged_tensors_are_double_buffered(self, world_size: int) -> None:
        """Other memory at g+1; what was staged stays readable until then."""
        self.run(_staged_survives_publish, world_size)
