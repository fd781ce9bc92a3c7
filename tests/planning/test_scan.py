# SPDX-License-Identifier: Apache-2.0
"""The scan: how many rounds, what moves in them, and what it is worth against a gather."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from cptransport.composition import DIRECTIONS, schedule
from cptransport.plan import Plan, build_plan
from cptransport.summary import advance, compose
from cptransport.transport import PartSpec, Slot


def chain(world_size: int, **more: Any) -> Plan:
    return build_plan([0, 4 * world_size], world_size=world_size, **more)


def slot(plan: Plan, *, heads: int = 1, key: int = 1, value: int = 1, batch: int = 1) -> Slot:
    rows = plan.max_segments * batch
    state = PartSpec("state", (rows, heads, key, value), torch.float32)
    return Slot("s", (state, PartSpec("transition", (rows, heads, key, key), torch.float32)))


def window(plan: Plan, source: Any, direction: str) -> range:
    """Return the positions in its chain that a window stands for."""
    members = plan.chain(plan.segments[source.segment].sequence)
    if direction == "backward":
        members = members[::-1]
    end = members.index(source.segment)
    return range(max(0, end - (1 << source.round) + 1), end + 1)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_exactly_the_logarithm_in_rounds(direction: str) -> None:
    for n in (*range(1, 18), 31, 32, 33, 63, 64, 65):
        rounds = schedule(chain(n), direction, "scan").rounds
        assert len(rounds) == (math.ceil(math.log2(n)) if n > 1 else 0), n
        assert all(step.routes["state"] for step in rounds)


def test_the_longest_chain_of_a_packed_stream_says_how_many() -> None:
    # 8 ranks; chains of 5, 1, 2 and 3 segments.
    cuts = [0, 4, 8, 12, 16, 20, 24, 28, 32]
    plan = build_plan([0, 18, 19, 22, 32], world_size=8, boundaries=cuts)
    assert [len(plan.chain(i)) for i in range(plan.num_sequences)] == [5, 1, 2, 3]
    first, second, third = schedule(plan, "forward", "scan").rounds
    assert {route[:2] for route in first.routes["state"]} == {
        *((r, r + 1) for r in range(4)),  # the first sequence
        (4, 5),
        *((r, r + 1) for r in range(5, 7)),
    }
    assert {route[:2] for route in second.routes["state"]} == {(0, 2), (1, 3), (2, 4), (5, 7)}
    assert {route[:2] for route in third.routes["state"]} == {(0, 4)}
    assert third.parts == ("state",)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_sources_are_windows_that_make_up_all_predecessors(
    cases: list[Any], direction: str
) -> None:
    for case in cases:
        plan = case.plan
        for step in schedule(plan, direction, "scan").rounds:
            for share in step.ranks:
                for fold in share.folds:
                    ranges = [window(plan, source, direction) for source in fold.sources]
                    together = [position for each in ranges for position in each]
                    position = window(plan, fold.target, direction)[-1]
                    assert together == list(range(position))
                    # As the algebra says, and one less at powers of two than shifting first would be.
                    length = len(plan.chain(plan.segments[fold.target.segment].sequence))
                    assert len(fold.sources) <= math.ceil(math.log2(length))
                for made in share.windows:
                    ranges = [window(plan, source, direction) for source in made.sources]
                    target = window(plan, made.target, direction)
                    assert [p for each in ranges for p in each] == list(target)
                    # Finished windows have no transition, all others do.
                    assert made.transition == (target[0] > 0)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_nothing_moves_that_nobody_needs(cases: list[Any], direction: str) -> None:
    for case in cases:
        plan = case.plan
        made = schedule(plan, direction, "scan")
        needed: set[tuple[int, str, int, int, int]] = set()
        for step in made.rounds:
            for fold in (fold for share in step.ranks for fold in share.folds):
                for source in fold.sources:
                    to = (source.rank, fold.target.rank, source.row)
                    needed.add((source.round, "state", *to))
                    if window(plan, source, direction)[0] > 0:  # else its state is finished
                        needed.add((source.round, "transition", *to))
        moved = {
            (number, part, *route)
            for number, step in enumerate(made.rounds)
            for part, routes in step.routes.items()
            for route in routes
        }
        assert moved == {each for each in needed if each[2] != each[3]}
        gather = schedule(plan, direction, "gather")
        assert made.needs == gather.needs


def test_one_segment_per_rank_never_receives_more_than_by_gathering() -> None:
    for n in range(2, 40):
        plan = chain(n)
        scanned, gathered = (plan.volume(slot(plan), name) for name in ("scan", "gather"))
        for direction in DIRECTIONS:
            pairs = zip(getattr(scanned, direction), getattr(gathered, direction), strict=True)
            assert all(ours <= theirs for ours, theirs in pairs)


def test_windows_that_nobody_reads_are_not_made() -> None:
    for n in range(2, 40):
        for step in schedule(chain(n), "forward", "scan").rounds[1:]:
            made = {fold.target[:3] for share in step.ranks for fold in share.windows}
            sent = {(source, row) for source, _, row in step.routes["state"]}
            assert {(rank, row) for _, rank, row in made} == sent


def test_a_rank_receives_a_logarithm_of_summaries_per_segment() -> None:
    for layout in ("contiguous", "zigzag"):
        for world_size in (2, 3, 8, 31, 64, 100):
            plan = chain(world_size, layout=layout)
            n = len(plan.segments)
            most = math.ceil(math.log2(n))
            for part in ("state", "transition"):
                only = Slot("s", (slot(plan).part(part),))
                volume = plan.volume(only, "scan")
                for received in (volume.forward, volume.backward):
                    for rank, count in enumerate(received):
                        assert count // 4 <= most * len(plan.owned(rank))


def test_volume_of_a_chain_of_eight() -> None:
    plan = chain(8)
    s, t = 100 * 4, 10000 * 4
    state = PartSpec("state", (1, 10, 10), torch.float32)
    both = Slot("s", (state, PartSpec("transition", (1, 100, 100), torch.float32)))
    volume = plan.volume(both, "scan")
    assert volume.forward == [
        0,
        s,
        2 * s + t,
        2 * s + t,
        3 * s + 2 * t,
        3 * s + 2 * t,
        3 * s + 2 * t,
        3 * s + 2 * t,
    ]
    assert volume.backward == volume.forward[::-1]


def test_a_rank_that_owns_a_whole_distance_moves_nothing() -> None:
    # Ranks take turns: distance 1 crosses, distances 2 and 4 stay at home.
    pieces = [(i % 2, 2 * i, 2 * i + 2) for i in range(8)]
    plan = build_plan([0, 16], world_size=2, layout="custom", boundaries=pieces)
    first, *others = schedule(plan, "forward", "scan").rounds
    assert first.routes["state"]
    assert len(others) == 2
    for step in others:
        assert not step.routes["state"] | step.routes["transition"]
        assert "state" in step.parts
        assert any(share.windows for share in step.ranks)


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_bytes_against_a_dense_gather_at_64_ranks(op: str) -> None:
    """H = 32, K = V = 128, forward and backward, against an all-gather of (M, E) and of (M, dE)."""
    plan = build_plan([0, 64 * 1024], world_size=64)
    heads, size = 32, 128
    state = PartSpec("state", (1, heads, size, size), torch.float32)
    shape = (1, heads, size, size) if op == "kda" else (1, heads)
    parts = Slot("s", (state, PartSpec("transition", shape, torch.float32)))
    volume = plan.volume(parts, "scan")
    received = [sum(both) for both in zip(volume.forward, volume.backward, strict=True)]
    dense = 2 * 63 * sum(part.nbytes for part in parts.parts)
    assert max(received) <= 0.12 * dense
    assert sum(received) <= 0.12 * dense * 64


def test_bytes_grow_with_the_logarithm_of_the_ranks() -> None:
    most = {n: max(chain(n).volume(slot(chain(n)), "scan").forward) for n in (8, 64, 512)}
    # One state and one transition more for every doubling.
    assert most[64] - most[8] == most[512] - most[64] == 3 * 8


def random_transition(op: str, layout: str, generator: torch.Generator) -> torch.Tensor:
    if op == "ssd":
        return -torch.rand(2, 3, generator=generator, dtype=torch.float64)
    return torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("layout", ["k_major", "v_major"])
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_two_segments_composed_are_both_one_after_the_other(
    op: str, direction: str, layout: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, 3, 4, 5) if layout == "k_major" else (2, 3, 5, 4)
    earlier, later = (random_transition(op, layout, generator) for _ in range(2))
    e1, e2, entering = (
        torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    step, product = advance(op, direction, layout), compose(op, direction, layout)
    one_by_one = step(later, step(earlier, entering, e1), e2)
    at_once = step(product(later, earlier), entering, step(later, e1, e2))
    torch.testing.assert_close(at_once, one_by_one, rtol=1e-12, atol=1e-12)


def test_products_of_transitions_do_not_commute_here() -> None:
    """The test above could not tell a wrong order if they did."""
    generator = torch.Generator().manual_seed(0)
    earlier, later = (random_transition("kda", "k_major", generator) for _ in range(2))
    assert not torch.allclose(earlier @ later, later @ earlier)
