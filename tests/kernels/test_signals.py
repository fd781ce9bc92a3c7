# SPDX-License-Identifier: Apache-2.0
"""The signal kernels: which flags they write, what they wait for, what they report.

On a GPU where there is one, else in Triton's interpreter. That has neither scopes nor a device clock,
so the three functions that are inline assembly are plain loads, stores and the host's clock there.
Ranks are boards in memory of one process.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor

from cptransport.signal_kernels import load_kernels
from cptransport_kernels import signals
from cptransport_kernels.launch import count_launches

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []

SLOTS = 4
LONG_NS = 60 * 10**9


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if ON_GPU:
        return

    def store(addresses: Any, values: Any, mask: Any) -> None:
        tl.store(addresses.to(tl.pointer_type(tl.int64)), values, mask=mask)

    monkeypatch.setattr(signals, "_load_acquire", lambda p: tl.load(p))
    monkeypatch.setattr(signals, "_store_release", store)
    monkeypatch.setattr(signals, "_now", lambda o: tl.full([], time.monotonic_ns(), tl.int64))


class Rank:
    """One rank's tables; ``boards`` holds the addresses of all ranks' boards."""

    def __init__(self, rank: int, boards: list[Tensor]) -> None:
        lanes = signals.lanes(len(boards))
        table = [board.data_ptr() for board in boards]
        self.rank, self.board, self.others = rank, boards[rank], boards
        self.boards = torch.tensor(table + [table[rank]] * (lanes - len(boards)), device=DEVICE)
        self.counters = torch.zeros(SLOTS, dtype=torch.int64, device=DEVICE)
        error = torch.zeros(5, dtype=torch.int64)
        self.error = error.pin_memory() if ON_GPU else error

    def stage(self, slot: int = 1, **arguments: int) -> None:
        given = {"releases": 0, "waits": 0, "depth": 2, "timeout_ns": LONG_NS, **arguments}
        signals.stage(*self._tables(self.boards), slot=slot, rank=self.rank, **given)

    def publish(self, targets: int, *, slot: int = 1, step: int = 0) -> None:
        signals.publish(
            self.counters, self.boards, slot=slot, rank=self.rank, targets=targets, step=step
        )

    def barrier(self, everyone: int, *, count: bool = False, **arguments: int) -> None:
        given = {"slot": 1, "step": 0, "timeout_ns": LONG_NS, **arguments}
        tables = self._tables(self.boards)
        signals.barrier(*tables, rank=self.rank, everyone=everyone, count=count, **given)

    def fetch(self, regions: Tensor, target: Tensor, source: int, offset: int, **more: int) -> None:
        given = {"step": 0, "timeout_ns": LONG_NS, **more}
        tables = self._tables(regions)
        signals.fetch(*tables, target, slot=1, source=source, offset=offset, **given)

    def locate(
        self, regions: Tensor, sources: int, offsets: list[int], present: list[int], **more: int
    ) -> Tensor:
        table = torch.full((len(offsets), self.boards.numel()), -1, device=DEVICE)
        given = {"slot": 1, "nan_address": -77, "step": 0, "timeout_ns": LONG_NS, **more}
        signals.locate(
            *self._tables(regions),
            table,
            sources=sources,
            offsets=offsets,
            present=present,
            **given,
        )
        return table

    def _tables(self, addresses: Tensor) -> tuple[Tensor, ...]:
        return self.counters, self.board, addresses, self.error

    @property
    def report(self) -> list[int]:
        return self.words[:3]

    @property
    def words(self) -> list[int]:
        if ON_GPU:
            torch.cuda.synchronize()
        return self.error.tolist()


def ranks_of(world_size: int) -> list[Rank]:
    lanes = signals.lanes(world_size)
    boards = [
        torch.zeros(SLOTS, 2, lanes, dtype=torch.int64, device=DEVICE) for _ in range(world_size)
    ]
    return [Rank(rank, boards) for rank in range(world_size)]


def flags(ranks: list[Rank]) -> dict[tuple[int, int, int, int], int]:
    """Every flag that is not 0: (whose board, slot, kind, lane) -> value."""
    found = {}
    for rank in ranks:
        for place in rank.board.nonzero().tolist():
            found[(rank.rank, *place)] = int(rank.board[tuple(place)])
    return found


def regions_of(ranks: list[Rank], memory: list[Tensor]) -> Tensor:
    table = [each.data_ptr() for each in memory]
    return torch.tensor(table + [table[0]] * (ranks[0].boards.numel() - len(table)), device=DEVICE)


def zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)


def stamp(generation: int, step: int = 0) -> int:
    return (generation << signals.STEP_BITS) + step


def test_stage_counts_its_slot_and_releases_the_generation_before() -> None:
    ranks = ranks_of(3)
    ranks[1].stage(slot=2)
    ranks[1].stage(slot=2, releases=0b101)
    assert ranks[1].counters.tolist() == [0, 0, 2, 0]
    assert flags(ranks) == {(0, 2, signals.RELEASED, 1): 1, (2, 2, signals.RELEASED, 1): 1}
    assert ranks[1].report == [0, 0, 0]


def test_publish_tells_the_targets_its_generation_and_step() -> None:
    ranks = ranks_of(3)
    for _ in range(3):
        ranks[2].stage()
    ranks[2].publish(0b011, step=9)
    right = stamp(3, 9)
    assert flags(ranks) == {
        (0, 1, signals.PUBLISHED, 2): right,
        (1, 1, signals.PUBLISHED, 2): right,
    }


def test_stage_waits_for_the_generation_that_it_reuses() -> None:
    first, second = ranks_of(2)
    for number in range(1, 6):  # the other is always one release ahead
        second.stage(releases=0b01)
        first.stage(waits=0b10 if number > 2 else 0)
    assert first.report == [0, 0, 0]
    first.stage(waits=0b10)
    assert first.words == [0] * 5
    first.stage(waits=0b10, timeout_ns=10**6)  # 5 is not released yet
    assert first.report == [2, 1, 7]


def test_a_captured_stage_waits_for_the_last_generation() -> None:
    first, second = ranks_of(2)
    for rank in (first, second):
        rank.stage()
    second.stage(releases=0b01)
    first.stage(waits=0b10, depth=1)
    assert first.report == [0, 0, 0]
    first.stage(waits=0b10, depth=1, timeout_ns=10**6)
    assert first.report == [2, 1, 3]


def test_the_first_expired_wait_is_reported_and_later_ones_do_not_wait() -> None:
    ranks = ranks_of(3)
    me = ranks[0]
    me.stage()
    start = time.monotonic()
    me.fetch(regions_of(ranks, [zeros(8)] * 3), zeros(8), 2, 0, timeout_ns=2 * 10**8)
    assert me.report == [3, 1, 1]
    assert time.monotonic() - start >= 0.2
    assert me.counters[0] == 1
    start = time.monotonic()
    me.barrier(0b111, slot=2, count=True)
    me.stage(slot=3, waits=0b010, depth=0)
    assert me.report == [3, 1, 1]
    assert time.monotonic() - start < 5.0


def test_the_host_ends_a_wait() -> None:
    me = ranks_of(2)[0]
    me.stage()
    me.error[3] = 1
    start = time.monotonic()
    me.barrier(0b11)
    assert me.report == [2, 1, 1]
    assert time.monotonic() - start < 20.0
    assert me.words[4] == 1


@pytest.mark.parametrize("count", [False, True])
def test_barrier_names_who_is_missing(count: bool) -> None:
    ranks = ranks_of(3)
    for rank in (2, 0):
        if not count:
            ranks[rank].stage()
        ranks[rank].barrier(0b111, timeout_ns=10**6, count=count)
        assert ranks[rank].report == [1 if rank == 2 else 2, 1, 1]
    ranks[1].counters[1] = 0 if count else 1
    ranks[1].barrier(0b111, count=count)
    assert ranks[1].report == [0, 0, 0]
    assert ranks[1].counters[1] == 1


def test_another_step_is_reported_and_gives_no_data() -> None:
    ranks = ranks_of(2)
    memory = [torch.arange(4.0, device=DEVICE), torch.arange(4.0, 8.0, device=DEVICE)]
    for rank in ranks:
        rank.stage()
    ranks[1].publish(0b01, step=5)
    got = zeros(16)
    ranks[0].fetch(regions_of(ranks, memory), got, 1, 0, step=5)
    assert got.view(torch.float32).tolist() == [4.0, 5.0, 6.0, 7.0]
    ranks[0].fetch(regions_of(ranks, memory), got, 1, 0, step=4)
    assert ranks[0].report == [-2, 1, 1]
    assert got.view(torch.float32).isnan().all()


def test_a_publisher_that_is_ahead_is_neither_late_nor_astray() -> None:
    ranks = ranks_of(2)
    memory = [zeros(16), zeros(16)]
    ranks[0].stage()
    for step in (1, 2):
        ranks[1].stage()
        ranks[1].publish(0b01, step=step)
    table = ranks[0].locate(regions_of(ranks, memory), 0b10, [4], [0b11], step=1)
    assert table[0, :2].tolist() == [memory[0].data_ptr() + 4, memory[1].data_ptr() + 4]
    assert ranks[0].report == [0, 0, 0]


@pytest.mark.parametrize("parts", [1, 2, 3, 4])
def test_locate_writes_addresses_nothing_and_nan(parts: int) -> None:
    ranks = ranks_of(3)
    memory = [zeros(256) for _ in range(3)]
    for rank in ranks:
        rank.stage()
    ranks[1].publish(0b001)
    offsets, present = [0, 8, 16, 24][:parts], [0b011, 0b001, 0b111, 0b110][:parts]
    table = ranks[0].locate(regions_of(ranks, memory), 0b010, offsets, present)
    for part, (offset, mask) in enumerate(zip(offsets, present, strict=True)):
        right = [memory[r].data_ptr() + offset if mask >> r & 1 else 0 for r in range(3)]
        assert table[part].tolist() == right + [0] * 29
    table = ranks[0].locate(regions_of(ranks, memory), 0b110, offsets, present, timeout_ns=10**6)
    assert ranks[0].report == [3, 1, 1]
    for part, mask in enumerate(present):
        assert table[part, 2].item() == (-77 if mask >> 2 & 1 else 0)
        assert table[part, 1].item() != -77


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 8, 12, 1000, 4096 * 3 + 8])
@pytest.mark.parametrize("offset", [0, 1, 4, 8])
def test_fetch_copies_bytes_of_any_count_from_any_offset(nbytes: int, offset: int) -> None:
    ranks = ranks_of(2)
    source = torch.randint(0, 256, (nbytes + offset + 8,), dtype=torch.uint8, device=DEVICE)
    for rank in ranks:
        rank.stage()
    ranks[1].publish(0b01)
    whole = torch.full((nbytes + 16,), 7, dtype=torch.uint8, device=DEVICE)
    ranks[0].fetch(regions_of(ranks, [source, source]), whole[8 : 8 + nbytes], 1, offset)
    assert torch.equal(whole[8 : 8 + nbytes], source[offset : offset + nbytes])
    assert whole[:8].eq(7).all()
    assert whole[8 + nbytes :].eq(7).all()
    assert ranks[0].report == [0, 0, 0]


def test_the_last_of_64_ranks() -> None:
    """Its bit is the sign of the mask."""
    ranks = ranks_of(64)
    first, last = ranks[0], ranks[63]
    everyone = (1 << 64) - 1
    first.stage()
    last.stage(releases=everyone & ~(1 << 63))
    last.stage(releases=everyone & ~(1 << 63))
    last.publish(1 << 0)
    first.publish(1 << 63)
    assert flags(ranks)[63, 1, signals.PUBLISHED, 0] == stamp(1)
    assert flags(ranks)[0, 1, signals.PUBLISHED, 63] == stamp(2)
    assert sum(key[2] == signals.RELEASED for key in flags(ranks)) == 63
    first.stage(waits=1 << 63, depth=1)
    assert first.report == [0, 0, 0]
    first.stage(waits=1 << 63, depth=1, timeout_ns=10**6)
    assert first.report == [64, 1, 3]
    missing = ranks_of(64)[5]
    missing.stage()
    missing.barrier(1 << 5 | 1 << 63, timeout_ns=10**6)
    assert missing.report == [64, 1, 1]


def test_loading_the_kernels_waits_for_nobody_and_leaves_nothing() -> None:
    me, peer = ranks_of(2)
    with count_launches() as launched:
        load_kernels(signals, (me.counters, me.board, me.boards, me.error), 1, me.rank)
    assert sum(launched.values()) == 3 + signals.TABLE_PARTS + 1 + 2 + 1
    assert set(launched) == {f"{n}_kernel" for n in ("fetch", "locate", "publish", "barrier", "stage")}  # fmt: skip
    assert flags([me, peer]) == {}
    assert not me.counters.any()
    assert me.report == [0, 0, 0]
