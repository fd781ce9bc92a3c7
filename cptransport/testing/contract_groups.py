# SPDX-License-Identifier: Apache-2.0
"""Contract tests: several transports at once, on groups that overlap, subgroups, groups that are not 0..n-1."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptransport.errors import BackendUnavailableError
from cptransport.testing.contract_base import ContractTests, Figures, clause
from cptransport.testing.contract_bytes import exchange_all
from cptransport.testing.oracle import assert_bytes, payload
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["GroupsContract"]

_PART = PartSpec("x", (65,), torch.float32)


def _exchange(transport: BoundaryTransport, word: str, generation: int, members: list[int]) -> None:
    """Exchange payloads that depend on the group's word and on global ranks, under one slot name for all groups."""
    slot = Slot("same name", (_PART,))
    mine = members[transport.rank]
    staged = transport.stage(slot)["x"]
    staged.copy_(payload(_PART, rank=mine, slot=word, generation=generation))
    transport.publish(slot)
    for source, member in enumerate(members):
        got = transport.fetch(slot, "x", source=source)
        assert_bytes(got, _PART, rank=member, slot=word, generation=generation)


def _two_transports(ranks: Ranks) -> None:
    """Two transports of all ranks, with the same slot name, verbs interleaved, generations out of step."""
    first, second = ranks.create(), ranks.create()
    members = list(range(ranks.world_size))
    slot = Slot("same name", (_PART,))
    counts = {"first": 0, "second": 0}
    for turn in range(6):
        for word, transport in (("first", first), ("second", second)):
            if word == "second" and turn % 3 == 0:
                continue
            counts[word] += 1
            _exchange(transport, word, counts[word], members)
    staged = [transport.stage(slot)["x"] for transport in (first, second)]
    for word, tensor in zip(counts, staged, strict=True):
        value = payload(_PART, rank=ranks.rank, slot=word, generation=counts[word] + 1)
        tensor.copy_(value)
    second.publish(slot)
    first.publish(slot)
    for word, transport in (("first", first), ("second", second)):
        for source in members:
            got = transport.fetch(slot, "x", source=source)
            assert_bytes(got, _PART, rank=source, slot=word, generation=counts[word] + 1)
    first.close()
    counts["second"] += 1
    _exchange(second, "second", counts["second"] + 1, members)


def _subgroups(ranks: Ranks, groups: list[list[int]]) -> None:
    """One transport per group, used in turn; a rank that is in several uses them all."""
    made: list[tuple[str, list[int], BoundaryTransport]] = []
    for members in groups:
        group = dist.new_group(members)
        if ranks.rank in members:
            transport = ranks.create(group)
            assert transport.rank == members.index(ranks.rank)
            assert transport.world_size == len(members)
            made.append((str(members), members, transport))
    for generation in range(1, 7):
        for word, members, transport in made:
            _exchange(transport, word, generation, members)
            transport.barrier()
    ranks.sync()


def _late_in_one_group(ranks: Ranks, delay_s: float) -> None:
    """Groups {0,1}, {1,2}, {0,1,2}; rank 0 is late in one: its signals must not complete waits of another."""
    groups = [[0, 1], [1, 2], [0, 1, 2]]
    made = []
    for members in groups:
        group = dist.new_group(members)
        made.append(ranks.create(group) if ranks.rank in members else None)
    for generation in range(1, 5):
        for index, members in enumerate(groups):
            transport = made[index]
            if transport is None:
                continue
            if ranks.rank == 0 and index == generation % 3:
                time.sleep(delay_s)
            _exchange(transport, str(members), generation, members)


def _among_collectives(ranks: Ranks) -> None:
    """The user's own collectives between the verbs, the first ones in another order on every rank."""
    transport = ranks.create()
    slot = Slot("beside", (_PART,))
    for generation in range(1, 5):
        exchange_all(transport, slot, generation)
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total.tolist() == [float(ranks.world_size)] * 3
        transport.barrier()


def _create_in_serial_order(ranks: Ranks) -> None:
    """Ranks 0 and 1, then 1 and 2, then all: only an order that some serial order explains."""
    groups = [dist.new_group(members) for members in ([0, 1], [1, 2])]
    if ranks.rank == 0:
        time.sleep(0.2)
    for group, members in zip(groups, ([0, 1], [1, 2]), strict=True):
        if ranks.rank in members:
            _exchange(ranks.create(group), str(members), 1, members)
    _exchange(ranks.create(), "all", 1, list(range(ranks.world_size)))


def _refused_group(ranks: Ranks) -> None:
    """While ranks 0 and 1 have a transport, 1 and 2 get none; afterwards they do."""
    ranks.create().close()  # what a case before has left behind is gone when all have met
    groups = [dist.new_group(members) for members in ([0, 1], [1, 2])]
    first = ranks.create(groups[0]) if ranks.rank in (0, 1) else None
    ranks.sync()
    if ranks.rank in (1, 2):
        with pytest.raises(BackendUnavailableError, match=r"\[0, 1\]"):
            ranks.create(groups[1])
    if first is not None:
        _exchange(first, "first", 1, [0, 1])
        first.close()
    ranks.sync()
    if ranks.rank in (1, 2):
        _exchange(ranks.create(groups[1]), "second", 1, [1, 2])


def _forget(ranks: Ranks) -> None:
    """Rank 0 drops a transport and collects garbage while rank 1 keeps its end: nothing may communicate."""
    transport: Any = ranks.create()
    _exchange(transport, "kept", 1, list(range(ranks.world_size)))
    other = ranks.create()
    if ranks.rank == 0:
        ranks.forget(transport)
        start = time.monotonic()
        del transport
        gc.collect()  # who waits here for others waits until its limit: they come later
        limit_s = ranks.timeout_s / 2
        assert time.monotonic() - start < limit_s, "collecting a transport waited for somebody"
    _exchange(other, "other", 1, list(range(ranks.world_size)))
    ranks.sync()
    if ranks.rank != 0:
        ranks.forget(transport)  # its peer is gone: closing it is no part of this case


class GroupsContract(ContractTests):
    """Several transports."""

    @clause("C36")
    def test_two_transports_with_the_same_slots(self, world_size: int) -> None:
        """Nothing is shared; closing one leaves the other."""
        self.run(_two_transports, world_size)

    @clause("C36", ranks=4, processes=True, several_groups=True)
    def test_subgroups(self, world_size: int) -> None:
        """{0,2} and {2,3}; {0,2} and {1,3}; a group in another order of use; one rank alone."""
        for groups in ([[0, 2], [2, 3]], [[0, 2], [1, 3]], [[0, 1], [2, 3]], [[1, 2, 3], [0, 3]]):
            self.run(_subgroups, world_size, groups=groups)

    @clause("C36", "C19", ranks=3, processes=True, several_groups=True)
    def test_a_signal_stays_in_its_group(self, world_size: int, figures: Figures) -> None:
        """Overlapping groups in turn, one rank late in one of them."""
        self.run(_late_in_one_group, world_size, delay_s=figures.delay_s / 3)

    @clause("C36", "C25", ranks=3, processes=True, several_groups=False)
    def test_another_group_is_refused(self, world_size: int) -> None:
        """On all its ranks, with the ranks that are served; the transport there is not disturbed."""
        self.run(_refused_group, world_size)

    @clause("C36", ranks=2, processes=True)
    def test_collectives_of_the_user_between_the_verbs(self, world_size: int) -> None:
        """The user's group and the transport do not disturb each other."""
        self.run(_among_collectives, world_size)

    @clause("C36", ranks=3, processes=True, several_groups=True)
    def test_creation_needs_no_order_beyond_a_serial_one(self, world_size: int) -> None:
        """Groups with common members, made and used as each rank comes to them."""
        self.run(_create_in_serial_order, world_size)

    @clause("C33", ranks=2)
    def test_garbage_collection_does_not_communicate(self, world_size: int) -> None:
        """A transport that is dropped, not closed, disturbs nobody."""
        self.run(_forget, world_size)
