# SPDX-License-Identifier: Apache-2.0
"""Segments, chains and views of plans against a count row by row; sharding; identity."""

from __future__ import annotations

import pickle
from itertools import groupby
from typing import Any

import pytest
import torch

from cptransport.errors import OpInputError, PlanError
from cptransport.plan import Segment, build_plan
from cptransport.plan import _build as build_uncached


def counted_segments(case: Any) -> list[Segment]:
    """Group rows that touch and share sequence and rank; add one segment per empty sequence."""
    found = []
    keys = list(zip(case.sequences, case.ranks, strict=True))
    for key, group in groupby(enumerate(keys), key=lambda item: item[1]):
        rows = [row for row, _ in group]
        sequence, rank = key
        if sequence is not None:
            local = case.ranks[: rows[0]].count(rank)
            found.append(Segment(sequence, rows[0], rows[-1] + 1, rank, local))
    starts = case.arguments.get("padded_cu_seqlens", case.arguments["cu_seqlens"])
    for sequence, rank in case.empty_ranks.items():
        row = starts[sequence]
        found.append(Segment(sequence, row, row, rank, case.ranks[:row].count(rank)))
    return sorted(found, key=lambda s: (s.sequence, s.start))


def test_segments_are_the_runs_of_a_sequence_on_a_rank(cases: list[Any]) -> None:
    for case in cases:
        assert list(case.plan.segments) == counted_segments(case), case.arguments


def test_chains_owners_and_indices_agree_with_segments(cases: list[Any]) -> None:
    for case in cases:
        plan, expected = case.plan, counted_segments(case)
        assert plan.num_sequences == len(case.arguments["cu_seqlens"]) - 1
        for sequence in range(plan.num_sequences):
            chain = [i for i, s in enumerate(expected) if s.sequence == sequence]
            assert list(plan.chain(sequence)) == chain
            assert plan.owner(sequence) == expected[chain[-1]].rank
            ranks = [expected[i].rank for i in chain]
            assert all(a != b for a, b in zip(ranks[:-1], ranks[1:], strict=True))
        per_rank = [
            [i for i, s in enumerate(expected) if s.rank == rank] for rank in range(plan.world_size)
        ]
        assert [list(plan.owned(rank)) for rank in range(plan.world_size)] == per_rank
        assert plan.max_segments == max(1, *map(len, per_rank))
        for owned in per_rank:
            assert [plan.local_index(i) for i in owned] == list(range(len(owned)))


def test_rank_views_describe_local_rows(cases: list[Any]) -> None:
    for case in cases:
        for rank in range(case.plan.world_size):
            view = case.plan.for_rank(rank)
            assert view is case.plan.for_rank(rank)
            assert view.index.dtype == torch.int64
            for s in view.segments:
                local = view.index[s.local_start : s.local_start + s.length].tolist()
                assert local == list(range(s.start, s.stop))
            if case.plan.has_padding:
                assert view.cu_seqlens is None
                continue
            assert view.cu_seqlens.dtype == torch.int64
            edges = [0]
            for s in view.segments:
                edges.append(edges[-1] + s.length)
            assert view.cu_seqlens.tolist() == edges
            assert edges[-1] == view.num_tokens


def test_shard_and_unshard_are_inverse_and_differentiable(cases: list[Any]) -> None:
    for case in cases[:20]:
        plan = case.plan
        x = torch.randn(plan.total_rows, 2, dtype=torch.float64, requires_grad=True)
        for dim in (0, 1, -1):
            moved = x.movedim(0, dim)
            parts = [plan.shard(moved, rank, dim) for rank in range(plan.world_size)]
            for rank, part in enumerate(parts):
                assert part.equal(moved.index_select(dim, plan.for_rank(rank).index))
            assert plan.unshard(parts, dim).equal(moved)
        parts = [plan.shard(x, rank, 0) for rank in range(plan.world_size)]
        weight = torch.randn_like(x)
        (grad,) = torch.autograd.grad((plan.unshard(parts, 0) * weight).sum(), x)
        assert grad.equal(weight)
        for rank, part in enumerate(parts):
            index = plan.for_rank(rank).index
            (grad,) = torch.autograd.grad((part * weight[index]).sum(), x)
            assert grad.equal(torch.zeros_like(x).index_copy(0, index, weight[index]))


def test_unshard_keeps_empty_parts_in_the_graph() -> None:
    plan = build_plan([0, 2], world_size=3)
    parts = [torch.ones(1, n, 4, requires_grad=True) for n in (1, 1, 0)]
    grads = torch.autograd.grad(plan.unshard(parts).sum(), parts)
    assert [grad.shape for grad in grads] == [part.shape for part in parts]


def test_shard_of_one_run_is_a_view() -> None:
    x = torch.arange(10.0).reshape(1, 10)
    part = build_plan([0, 10], world_size=2).shard(x, 1)
    assert part.data_ptr() == x[:, 5:].data_ptr()


def test_wrong_tensors_and_indices_are_refused() -> None:
    plan = build_plan([0, 3, 10], world_size=2)
    with pytest.raises(OpInputError, match=r"x must have 10 rows in dimension 1, got shape"):
        plan.shard(torch.zeros(1, 9), 0)
    with pytest.raises(OpInputError, match=r"dimension 2"):
        plan.shard(torch.zeros(1, 10), 0, dim=2)
    with pytest.raises(OpInputError, match=r"needs 2 parts, one per rank, got 1"):
        plan.unshard([torch.zeros(1, 10)])
    with pytest.raises(OpInputError, match=r"part 1 must have 5 rows"):
        plan.unshard([torch.zeros(1, 5), torch.zeros(1, 4)])
    for call in (plan.for_rank, plan.owned, plan.chain, plan.owner):
        for index in (-1, 2):
            with pytest.raises(PlanError, match=rf"no (rank|sequence) {index}; the plan has 2"):
                call(index)
    with pytest.raises(PlanError, match=r"no segment 3; the plan has 3"):
        plan.local_index(3)
    with pytest.raises(PlanError, match=r"no rank 2"):
        plan.shard(torch.zeros(1, 10), 2)


def test_streams_without_rows_are_legal() -> None:
    for layout in ("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence"):
        plan = build_plan([0, 0, 0], world_size=3, layout=layout)
        assert plan.segments == (Segment(0, 0, 0, 0, 0), Segment(1, 0, 0, 0, 0))
        assert [plan.for_rank(r).num_tokens for r in range(3)] == [0, 0, 0]
        assert [plan.for_rank(r).cu_seqlens.tolist() for r in range(3)] == [[0, 0, 0], [0], [0]]
        assert (plan.max_segments, plan.max_tokens) == (2, 0)
        x = torch.zeros(1, 0, 4)
        assert plan.unshard([plan.shard(x, r) for r in range(3)]).shape == x.shape


def test_empty_sequences_belong_to_the_rank_of_their_row() -> None:
    plan = build_plan([0, 0, 6, 6, 9, 12, 12], world_size=4)
    assert [plan.owner(sequence) for sequence in (0, 2, 5)] == [0, 2, 0]
    assert plan.segments[plan.chain(2)[0]] == Segment(2, 6, 6, 2, 0)
    assert plan.segments[plan.chain(5)[0]] == Segment(5, 12, 12, 0, 3)


def test_padding_that_pads_nothing_is_no_padding() -> None:
    assert build_plan([0, 4], world_size=2, padded_cu_seqlens=[0, 4]) is build_plan(
        [0, 4], world_size=2
    )


def test_equal_content_is_one_plan(cases: list[Any]) -> None:
    digests: dict[str, Any] = {}
    for case in cases:
        build_uncached.cache_clear()
        again = build_plan(**case.arguments)
        assert again is not case.plan
        assert (again, hash(again), again.digest()) == (
            case.plan,
            hash(case.plan),
            case.plan.digest(),
        )
        thawed = pickle.loads(pickle.dumps(case.plan))
        assert (thawed, hash(thawed)) == (case.plan, hash(case.plan))
        assert digests.setdefault(case.plan.digest(), case.plan) == case.plan


def test_digest_tells_plans_apart_and_is_the_same_everywhere() -> None:
    pieces = [(0, 0, 4), (1, 4, 8)]
    plans = [
        build_plan([0, 8], world_size=2),
        build_plan([0, 8], world_size=3),
        build_plan([0, 4, 8], world_size=2),
        build_plan([0, 0, 8], world_size=2),
        build_plan([0, 8], world_size=2, boundaries=[0, 5, 8]),
        build_plan([0, 8], world_size=2, layout="zigzag"),
        build_plan([0, 8], world_size=2, layout="custom", boundaries=pieces),
        build_plan([0, 7], world_size=2, padded_cu_seqlens=[0, 8]),
    ]
    assert len({plan.digest() for plan in plans}) == len(set(plans)) == len(plans)
    assert plans[0].digest() == "412b99d9e0d0299ac78ee467326641dbd0b21acfedeb4fe9a86729c223fb0155"


def test_plans_are_frozen() -> None:
    plan = build_plan([0, 8], world_size=2)
    with pytest.raises(AttributeError):
        plan.world_size = 3  # type: ignore[misc]


def test_description_names_owners_chains_and_movement() -> None:
    padded = [0, 8, 8, 24]
    plan = build_plan([0, 8, 8, 20], world_size=2, layout="zigzag", padded_cu_seqlens=padded)
    assert (
        plan.describe()
        == """\
zigzag: 24 rows, 4 of them padding; 3 sequences in 5 segments on 2 ranks
rank 0: 12 rows (0:6, 18:24)
  segment 0: sequence 0, rows 0:6, local 0:6
  segment 4: sequence 2, rows 18:20, local 6:8
rank 1: 12 rows (6:18)
  segment 1: sequence 0, rows 6:8, local 0:2
  segment 2: sequence 1, rows 8:8, local 2:2
  segment 3: sequence 2, rows 8:18, local 2:12
sequence 0: 8 tokens, rank 0 -> rank 1
sequence 1: 0 tokens, rank 1
sequence 2: 12 tokens, rank 1 -> rank 0
handoff, forward: 2 rounds
  states received: rank 0 1, rank 1 1
handoff, backward: 2 rounds
  states received: rank 0 1, rank 1 1
gather, forward: 1 round
  states received: rank 0 1, rank 1 1
gather, backward: 1 round
  states received: rank 0 1, rank 1 1
scan, forward: 1 round
  states received: rank 0 1, rank 1 1
scan, backward: 1 round
  states received: rank 0 1, rank 1 1"""
    )
    long = build_plan([0, 12], world_size=3, boundaries=[0, 4, 8, 12]).describe()
    assert long.endswith(
        "gather, backward: 1 round\n  states received: rank 0 2, rank 1 1\n"
        "  transitions received: rank 0 1\n"
        "scan, forward: 2 rounds\n  states received: rank 1 1, rank 2 2\n"
        "  transitions received: rank 2 1\n"
        "scan, backward: 2 rounds\n  states received: rank 0 2, rank 1 1\n"
        "  transitions received: rank 0 1"
    )
