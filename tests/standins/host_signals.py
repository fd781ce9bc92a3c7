# SPDX-License-Identifier: Apache-2.0
"""``cptransport_kernels.signals`` as plain loops of the host, for ranks that are processes without a GPU.

The kernels themselves run in ``tests/kernels/test_signals.py``; this lets everything around them run.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

from torch import Tensor

STEP_BITS = 20
TABLE_PARTS = 4
_PUBLISHED, _RELEASED = 0, 1


def lanes(world_size: int) -> int:
    return max(32, 1 << (world_size - 1).bit_length())


def board_numel(slots: int, world_size: int) -> int:
    return slots * 2 * lanes(world_size)


def _cell(address: int, index: int) -> ctypes.c_int64:
    return ctypes.c_int64.from_address(address + 8 * index)


def _ranks(mask: int) -> list[int]:
    return [rank for rank in range(64) if mask >> rank & 1]


class _Rank:
    """The tables of a rank, as every kernel gets them."""

    def __init__(self, counters: Tensor, table: Tensor, error: Tensor, slot: int) -> None:
        self.failed = _cell(counters.data_ptr(), 0)
        self.counter = _cell(counters.data_ptr(), slot)
        self.error = [_cell(error.data_ptr(), word) for word in range(5)]
        self.table = table
        self.lanes = table.numel()
        self.slot = slot

    def raise_flags(self, kind: int, rank: int, mask: int, value: int) -> None:
        for peer in _ranks(mask):
            board = int(self.table[peer])
            _cell(board, (self.slot * 2 + kind) * self.lanes + rank).value = value

    def wait(
        self, board: Tensor, kind: int, mask: int, value: int, shift: int, timeout_ns: int
    ) -> list[int]:
        """Return the ranks whose flags did not come to the value."""
        first = (self.slot * 2 + kind) * self.lanes
        flags = {rank: _cell(board.data_ptr(), first + rank) for rank in _ranks(mask)}
        deadline = time.monotonic_ns() + timeout_ns
        while True:
            late = [rank for rank, flag in flags.items() if flag.value >> shift < value]
            if not late or self.failed.value or self.error[3].value:
                return late
            if time.monotonic_ns() > deadline:
                return late
            self.error[4].value = 1
            time.sleep(0.0001)

    def strayed(self, board: Tensor, mask: int, generation: int, step: int) -> list[int]:
        first = self.slot * 2 * self.lanes
        stamp = (generation << STEP_BITS) + step
        flags = {rank: _cell(board.data_ptr(), first + rank).value for rank in _ranks(mask)}
        return [r for r, flag in flags.items() if flag >> STEP_BITS == generation and flag != stamp]

    def report(self, late: Sequence[int], strayed: Sequence[int], generation: int) -> None:
        if self.failed.value or not (late or strayed):
            return
        self.failed.value = 1
        self.error[1].value, self.error[2].value = self.slot, generation
        self.error[0].value = 1 + min(late) if late else -(1 + min(strayed))

    def take(self, board: Tensor, mask: int, step: int, timeout_ns: int) -> tuple[set[int], int]:
        generation = self.counter.value
        late = self.wait(board, _PUBLISHED, mask, generation, STEP_BITS, timeout_ns)
        strayed = self.strayed(board, mask, generation, step)
        self.report(late, strayed, generation)
        return {*late, *strayed}, generation


def stage(
    counters: Tensor, board: Tensor, boards: Tensor, error: Tensor, *,
    slot: int, rank: int, releases: int, waits: int, depth: int, timeout_ns: int,
) -> None:  # fmt: skip
    me = _Rank(counters, boards, error, slot)
    me.counter.value += 1
    generation = me.counter.value
    me.raise_flags(_RELEASED, rank, releases, generation - 1)
    me.report(me.wait(board, _RELEASED, waits, generation - depth, 0, timeout_ns), (), generation)


def publish(
    counters: Tensor, boards: Tensor, *, slot: int, rank: int, targets: int, step: int
) -> None:
    me = _Rank(counters, boards, counters, slot)
    me.raise_flags(_PUBLISHED, rank, targets, (me.counter.value << STEP_BITS) + step)


def barrier(
    counters: Tensor, board: Tensor, boards: Tensor, error: Tensor, *,
    slot: int, rank: int, everyone: int, step: int, timeout_ns: int, count: bool,
) -> None:  # fmt: skip
    me = _Rank(counters, boards, error, slot)
    me.counter.value += count
    me.raise_flags(_PUBLISHED, rank, everyone, (me.counter.value << STEP_BITS) + step)
    me.take(board, everyone, step, timeout_ns)


def locate(
    counters: Tensor, board: Tensor, regions: Tensor, error: Tensor, table: Tensor, *,
    slot: int, sources: int, offsets: Sequence[int], present: Sequence[int], nan_address: int,
    step: int, timeout_ns: int,
) -> None:  # fmt: skip
    me = _Rank(counters, regions, error, slot)
    gone, _ = me.take(board, sources, step, timeout_ns)
    table.zero_()
    for part, (offset, mask) in enumerate(zip(offsets, present, strict=True)):
        for rank in _ranks(mask):
            table[part, rank] = nan_address if rank in gone else regions[rank] + offset


def fetch(
    counters: Tensor, board: Tensor, regions: Tensor, error: Tensor, target: Tensor, *,
    slot: int, source: int, offset: int, step: int, timeout_ns: int,
) -> None:  # fmt: skip
    me = _Rank(counters, regions, error, slot)
    gone, _ = me.take(board, 1 << source, step, timeout_ns)
    if gone:
        target.fill_(0xFF)
    else:
        ctypes.memmove(target.data_ptr(), int(regions[source]) + offset, target.numel())
