# SPDX-License-Identifier: Apache-2.0
"""Halo tables, executed with what the routes move, against windows cut from whole sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport.errors import OpInputError
from cptransport.halo import Halo, RowCopy, halo
from cptransport.plan import build_plan
from cptransport.transport import PartSpec, Slot

WIDTHS = (1, 2, 4, 6)


def numbered(case: Any, h: int) -> tuple[Tensor, Tensor]:
    """Return x [T] and initial_state [N, h] of distinct numbers; padding rows are -1."""
    x = torch.arange(1, len(case.ranks) + 1)
    x[[row for row, sequence in enumerate(case.sequences) if sequence is None]] = -1
    return x, 10_000 + torch.arange(case.plan.num_sequences * h).reshape(case.plan.num_sequences, h)


def before(case: Any, segment: Any, x: Tensor, initial: Tensor) -> Tensor:
    """Return the h inputs of the segment's sequence before it, initial state first."""
    rows = [
        row
        for row, sequence in enumerate(case.sequences)
        if sequence == segment.sequence and row < segment.start
    ]
    history = torch.cat([initial[segment.sequence], x[rows]])
    return history[len(history) - initial.shape[1] :]


def moved(table: list[Tensor], copy: RowCopy, rank: int, routes: Any) -> Tensor:
    """Read a peer's table, of which only the routes' rows arrive."""
    if copy.peer != rank:
        for row in copy.source.tolist():
            assert (copy.peer, rank, row) in routes
    return table[copy.peer][copy.source]


def published(case: Any, tables: Halo, x: Tensor) -> list[Tensor]:
    plan, h = case.plan, tables.width - 1
    parts = []
    for rank in range(plan.world_size):
        part = torch.full((plan.max_segments * h,), -7)
        copy = tables.ranks[rank].publish
        part[copy.target] = plan.shard(x, rank, 0)[copy.source]
        for i, segment in enumerate(plan.for_rank(rank).segments):
            kept = min(h, segment.length)
            rows = part[i * h : (i + 1) * h].tolist()
            assert rows == [-7] * (h - kept) + x[segment.stop - kept : segment.stop].tolist()
        parts.append(part)
    return parts


@pytest.mark.parametrize("width", WIDTHS)
def test_forward_fetches_the_inputs_before_every_segment(cases: list[Any], width: int) -> None:
    h = width - 1
    for case in cases:
        plan, tables = case.plan, halo(case.plan, width)
        x, initial = numbered(case, h)
        parts = published(case, tables, x)
        final = torch.zeros_like(initial).reshape(-1)
        for rank in range(plan.world_size):
            mine = tables.ranks[rank]
            got = torch.full((plan.max_segments * h,), -9)
            for copy in mine.receive:
                got[copy.target] = moved(parts, copy, rank, tables.forward)
            got[mine.initial.target] = initial.reshape(-1)[mine.initial.source]
            segments = plan.for_rank(rank).segments
            expected = [before(case, segment, x, initial) for segment in segments]
            assert got[: len(segments) * h].tolist() == torch.cat([x[:0], *expected]).tolist()
            final[mine.final_halo.target] += got[mine.final_halo.source]
            final[mine.final_rows.target] += plan.shard(x, rank, 0)[mine.final_rows.source]
            assert {t // h for t in mine.final_rows.target.tolist()} <= {
                s for s in range(plan.num_sequences) if plan.owner(s) == rank
            }
        ends = [
            torch.cat([initial[s], x[[r for r, q in enumerate(case.sequences) if q == s]]])
            for s in range(plan.num_sequences)
        ]
        assert final.tolist() == torch.cat([x[:0], *(e[len(e) - h :] for e in ends)]).tolist()


@pytest.mark.parametrize("width", WIDTHS)
def test_backward_returns_every_gradient_to_its_token(cases: list[Any], width: int) -> None:
    h = width - 1
    for case in cases:
        plan, tables = case.plan, halo(case.plan, width)
        x, initial = numbered(case, h)
        generator = torch.Generator().manual_seed(width)
        grads = [
            torch.randint(1, 1000, (plan.max_segments * h,), generator=generator)
            for _ in range(plan.world_size)
        ]
        expected = dict.fromkeys([*x.tolist(), *initial.reshape(-1).tolist()], 0)
        for rank in range(plan.world_size):
            for i, segment in enumerate(plan.for_rank(rank).segments):
                inputs = before(case, segment, x, initial).tolist()
                for value, grad in zip(inputs, grads[rank][i * h :].tolist(), strict=False):
                    expected[value] += grad
        got_initial = torch.zeros(initial.numel(), dtype=torch.int64)
        for rank in range(plan.world_size):
            mine, rows = tables.ranks[rank], plan.for_rank(rank).index
            got = torch.zeros(len(rows), dtype=torch.int64)
            for copy in mine.give_back:
                assert len(set(copy.target.tolist())) == len(copy.target)
                got[copy.target] += moved(grads, copy, rank, tables.backward)
            assert got.tolist() == [expected[value] for value in x[rows].tolist()]
            for copy in mine.give_back_initial:
                assert len(set(copy.target.tolist())) == len(copy.target)
                got_initial[copy.target] += grads[rank][copy.source]
        assert got_initial.tolist() == [expected[value] for value in initial.reshape(-1).tolist()]


@pytest.mark.parametrize("width", WIDTHS)
def test_routes_move_only_what_is_read_and_volume_counts_them(cases: list[Any], width: int) -> None:
    h = width - 1
    for case in cases:
        plan, tables = case.plan, halo(case.plan, width)
        for direction, name in (("forward", "receive"), ("backward", "give_back")):
            read = {
                (copy.peer, rank, row)
                for rank in range(plan.world_size)
                for copy in getattr(tables.ranks[rank], name)
                if copy.peer != rank
                for row in copy.source.tolist()
            }
            assert tables.routes(direction) == read
            part = PartSpec("halo", (plan.max_segments * h, 2, 5), torch.float16)
            for composition in ("handoff", "gather"):
                volume = plan.volume(Slot("conv", (part,)), composition)
                assert getattr(volume, direction) == [
                    20 * sum(to == rank for _, to, _ in read) for rank in range(plan.world_size)
                ]


def test_width_one_moves_nothing() -> None:
    plan = build_plan([0, 20], world_size=4)
    tables = halo(plan, 1)
    assert not tables.forward
    assert not tables.backward
    for mine in tables.ranks:
        assert (mine.receive, mine.give_back, mine.give_back_initial) == ((), (), ())
        copies = (mine.publish, mine.initial, mine.final_halo, mine.final_rows)
        assert all(len(copy.target) == len(copy.source) == 0 for copy in copies)


def test_short_shards_reach_over_several_ranks() -> None:
    plan = build_plan([0, 4], world_size=4)
    tables = halo(plan, 4)
    assert tables.forward == {
        (0, 1, 2), (0, 2, 2), (1, 2, 2), (0, 3, 2), (1, 3, 2), (2, 3, 2)
    }  # fmt: skip
    assert tables.backward == {
        (1, 0, 2), (2, 0, 1), (2, 1, 2), (3, 0, 0), (3, 1, 1), (3, 2, 2)
    }  # fmt: skip
    assert tables.ranks[1].initial.target.tolist() == [0, 1]
    assert tables.ranks[1].initial.source.tolist() == [1, 2]


def test_a_row_moves_once_to_a_rank_and_returns_once_per_consumer() -> None:
    pieces = [(0, 0, 2), (1, 2, 3), (2, 3, 4), (1, 4, 6)]
    plan = build_plan([0, 6], world_size=3, layout="custom", boundaries=pieces)
    tables = halo(plan, 4)
    assert sorted(route for route in tables.forward if route[:2] == (0, 1)) == [
        (0, 1, 1), (0, 1, 2)
    ]  # fmt: skip
    # token 1 is read by both segments of rank 1
    assert sorted(route for route in tables.backward if route[:2] == (1, 0)) == [
        (1, 0, 1), (1, 0, 2), (1, 0, 3)
    ]  # fmt: skip
    assert [len(copy.target) for copy in tables.ranks[0].give_back if copy.peer == 1] == [2, 1]


@pytest.mark.parametrize("gap", [0, 1, 2, 3])
def test_nothing_crosses_a_sequence_start(gap: int) -> None:
    plan = build_plan([0, 8 - gap, 16], world_size=2)
    assert len(halo(plan, 4).forward) == min(gap, 3)


def test_tables_move_to_a_device_once() -> None:
    tables = halo(build_plan([0, 9], world_size=2), 3)
    device = torch.device("cpu")
    assert tables.for_rank(1, device) is tables.for_rank(1, device)
    assert tables.for_rank(1, torch.device("meta")).receive[0].target.device.type == "meta"


def test_width_below_one_is_refused() -> None:
    with pytest.raises(OpInputError, match="at least 1, got 0"):
        halo(build_plan([0, 9], world_size=2), 0)
