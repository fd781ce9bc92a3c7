# SPDX-License-Identifier: Apache-2.0
"""The cost model: what it counts, what `auto` makes of it, and that every rank makes the same of it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from cptransport.composition import DIRECTIONS, schedule
from cptransport.cost import BACKENDS, Costs, choose, costs_of, predict
from cptransport.errors import OpInputError
from cptransport.plan import Plan, build_plan
from cptransport.transport import PartSpec, Slot

ROUND, BYTE, FOLD = Costs(1.0, 1e30, 1e30), Costs(0.0, 1.0, 1e30), Costs(0.0, 1e30, 1.0)


def parts(plan: Plan, *, heads: int = 1, key: int = 4, value: int = 6) -> tuple[PartSpec, PartSpec]:
    n = plan.max_segments
    return (
        PartSpec("state", (n, heads, key, value), torch.float32),
        PartSpec("transition", (n, heads, key, key), torch.float32),
    )


STATE, TRANSITION = 96, 64  # bytes of one segment's parts above


def chain(world_size: int, **more: Any) -> Plan:
    return build_plan([0, 8 * world_size], world_size=world_size, **more)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8, 9])
def test_rounds_that_wait_for_each_other(world_size: int) -> None:
    plan = chain(world_size)
    # A window that reached the start of its chain waits for nobody any more: with 3 ranks, rank 0
    # has published both rounds at once.
    waits = {"gather": 1, "scan": world_size.bit_length() - 1, "handoff": world_size - 1}
    for composition, rounds in waits.items():
        assert predict(plan, parts(plan), composition, ROUND) == pytest.approx(2 * rounds)
    together = Costs(1.0, 1e30, 1e30, lockstep=True)
    rounds = (world_size - 1).bit_length()
    assert predict(plan, parts(plan), "scan", together) == pytest.approx(2 * rounds)
    assert predict(plan, parts(plan), "handoff", together) > 0  # asked for by name, refused later


def test_bytes_and_folds_of_a_chain_of_four() -> None:
    plan = chain(4)
    s, t, step = STATE, TRANSITION, STATE + TRANSITION
    moved = {"gather": 3 * s + 2 * t, "handoff": 3 * s}
    # The last segment folds two steps onto a finished state; in a handoff the two interior ones
    # finish theirs, one after the other.
    folded = {"gather": 2 * step, "handoff": 2 * step}
    for composition in ("gather", "handoff"):
        assert predict(plan, parts(plan), composition, BYTE) == pytest.approx(
            2 * moved[composition]
        )
        assert predict(plan, parts(plan), composition, FOLD) == pytest.approx(
            2 * folded[composition]
        )
    # Scan: segment 3 receives the window 2..2, then 0..1, which segment 1 has made in the meantime.
    assert predict(plan, parts(plan), "scan", BYTE) == pytest.approx(2 * (2 * s + t))
    assert predict(plan, parts(plan), "scan", FOLD) == pytest.approx(2 * 2 * step)


def test_a_gather_is_counted_as_its_schedule_would_be(cases: list[Any]) -> None:
    costs = Costs(3.0, 7.0, 11.0)
    for case in cases:
        plan = case.plan
        sizes = {"state": STATE, "transition": TRANSITION}
        total = 0.0
        for direction in DIRECTIONS:
            ends = [0.0]
            for step in schedule(plan, direction, "gather").rounds:
                for rank, share in enumerate(step.ranks):
                    if not share.folds:
                        continue
                    moved = sum(
                        sizes[part] for part, rs in step.routes.items() for r in rs if r[1] == rank
                    )
                    steps = sum(len(fold.sources) - 1 for fold in share.folds)
                    ends.append(3.0 + moved / 7.0 + steps * (STATE + TRANSITION) / 11.0)
            total += max(ends)
        assert predict(plan, parts(plan), "gather", costs) == pytest.approx(total)


@pytest.mark.parametrize("composition", ["gather", "scan", "handoff"])
def test_bytes_of_the_model_are_those_of_the_volume(cases: list[Any], composition: str) -> None:
    """With nothing but bytes to pay, nobody ends before it has received its own."""
    for case in cases:
        plan = case.plan
        volume = plan.volume(Slot("s", parts(plan)), composition)
        most = max(volume.forward) + max(volume.backward)
        predicted = predict(plan, parts(plan), composition, BYTE)
        # Ranks that wait for ranks that wait take longer than the largest of them alone.
        assert predicted >= most - 1e-6
        if composition == "gather":
            assert predicted == pytest.approx(most)


def test_chains_that_get_in_each_others_way_count_as_one() -> None:
    # Every rank but the ends holds the end of one sequence and the start of the next: chains of two,
    # but a rank publishes in a handoff after it has received, so the last waits for all.
    plan = build_plan([0, 3, 7, 11, 14], world_size=4, boundaries=[0, 2, 5, 9, 14])
    assert max(len(plan.chain(i)) for i in range(plan.num_sequences)) == 2
    assert predict(plan, parts(plan), "handoff", ROUND) == pytest.approx(6)
    assert predict(plan, parts(plan), "gather", ROUND) == pytest.approx(2)


def test_a_dense_transport_moves_everything_to_everybody() -> None:
    plan = chain(8)
    dense = Costs(0.0, 1.0, 1e30, lockstep=True, dense=True)
    whole = 7 * (STATE + TRANSITION)
    assert predict(plan, parts(plan), "gather", dense) == pytest.approx(2 * whole)
    assert predict(plan, parts(plan), "scan", dense) == pytest.approx(2 * (2 * whole + 7 * STATE))


def test_what_is_chosen_is_what_is_predicted_to_take_the_least() -> None:
    chosen = set()
    for world_size in (2, 3, 4, 8, 32):
        for layout in ("contiguous", "zigzag"):
            for heads in (1, 4096):
                plan = chain(world_size, layout=layout)
                made = parts(plan, heads=heads, key=16, value=16)
                for backend in ("gloo", "nccl", "nvshmem_signal"):
                    choice = choose(plan, made, backend, True)
                    others = dict(choice.passed_over)
                    assert {choice.composition, *others} == {"gather", "scan", "handoff"}
                    times = {
                        name: predict(plan, made, name, costs_of(backend))
                        for name in ("gather", "scan", "handoff")
                    }
                    assert choice.predicted_s == times[choice.composition]
                    assert choice.predicted_s <= min(times.values()) + 1e-9
                    for name, reason in others.items():
                        assert reason.startswith(f"predicted {times[name] * 1e6:.0f} us, ")
                    chosen.add(choice.composition)
    assert chosen == {"gather", "scan", "handoff"}


def test_small_summaries_are_gathered_and_long_chains_of_large_ones_scanned() -> None:
    for backend in BACKENDS:
        if BACKENDS[backend].dense:
            continue
        handoff = not BACKENDS[backend].lockstep
        for world_size in (3, 8):
            plan = chain(world_size)
            assert choose(plan, parts(plan), backend, handoff).composition == "gather"
        plan = chain(64)
        large = parts(plan, heads=32, key=128, value=128)
        assert choose(plan, large, backend, handoff).composition == "scan"


def test_nothing_to_choose_where_nothing_moves() -> None:
    plan = build_plan([0, 8, 16], world_size=2)
    choice = choose(plan, parts(plan), "gloo", True)
    assert (choice.composition, choice.predicted_s, choice.passed_over) == ("gather", 0.0, ())


def test_at_a_tie_the_simplest_is_taken() -> None:
    plan = chain(2)  # one state moves, whatever the composition
    assert (
        choose(plan, parts(plan, heads=32, key=128, value=128), "nccl", True).composition
        == "gather"
    )


@pytest.mark.parametrize("backend", ["nvshmem_barrier", "cudnn_summary", "gloo"])
def test_never_a_handoff_without_pairwise(backend: str) -> None:
    picked = 0
    for world_size in (3, 4, 6):
        plan = chain(world_size, layout="zigzag")
        made = parts(plan, heads=4096, key=16, value=16)
        picked += choose(plan, made, "gloo", True).composition == "handoff"
        choice = choose(plan, made, backend, False)
        assert choice.composition != "handoff"
        assert dict(choice.passed_over)["handoff"] == f"transport {backend!r} is not pairwise"
    assert picked  # where there is a choice, some of these take it


def test_host_backends_share_one_set_and_strangers_have_it_too() -> None:
    sets = [costs_of(name) for name in ("loopback", "threads", "gloo", "somebodys_plugin")]
    assert all(one == other for one, other in pairwise(sets))


def test_plans_that_are_equal_are_predicted_alike() -> None:
    """What a rank computes depends on the plan's content alone, not on the object or the rank."""
    one = build_plan([0, 7, 30], world_size=4, layout="zigzag")
    other = build_plan(torch.tensor([0, 7, 30]), world_size=4, layout="zigzag")
    assert choose(one, parts(one), "nccl", True) == choose(other, parts(other), "nccl", True)


def test_an_unknown_composition_is_refused() -> None:
    plan = chain(2)
    with pytest.raises(OpInputError, match="unknown composition 'gathr'"):
        predict(plan, parts(plan), "gathr", ROUND)
