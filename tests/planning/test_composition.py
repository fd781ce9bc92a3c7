# SPDX-License-Identifier: Apache-2.0
"""Schedules, executed by ranks that block, against the token-by-token recurrence.

Token t maps the state S (a 2x2 matrix) to ``M_t S + E_t``. The maps do not commute, and everything
is exact: integers modulo a prime.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from cptransport.composition import COMPOSITIONS, DIRECTIONS, expand_routes, schedule
from cptransport.errors import OpInputError, PlanError
from cptransport.plan import build_plan
from cptransport.transport import PartSpec, Slot

PRIME = 10007
ROW = {"state": 96, "transition": 200}  # bytes of one row of the slot below


def slot(plan: Any, *, batch: int = 1, parts: str = "state transition") -> Slot:
    rows = plan.max_segments * batch
    shapes = {"state": ((rows, 3, 4), torch.float64), "transition": ((rows, 5, 5), torch.float64)}
    return Slot("s", tuple(PartSpec(name, *shapes[name]) for name in parts.split()))


@dataclass
class Problem:
    """Random affine maps of every token and seeds of every sequence, and the true states.

    Attributes:
        entering: per segment the state that enters it in travel order, by the recurrence.
        summary: per segment its (M, E) in travel order; first segments have the seed in E.
    """

    case: Any
    direction: str
    entering: dict[int, np.ndarray] = field(default_factory=dict)
    summary: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(len(self.case.ranks))
        plan = self.case.plan
        maps = rng.integers(1, PRIME, (len(self.case.ranks), 2, 2))
        updates = rng.integers(1, PRIME, (len(self.case.ranks), 2, 2))
        seeds = rng.integers(1, PRIME, (plan.num_sequences, 2, 2))
        if self.direction == "backward":
            maps = maps.swapaxes(1, 2)
        step = 1 if self.direction == "forward" else -1
        for sequence in range(plan.num_sequences):
            truth = seeds[sequence]
            for position, i in enumerate(plan.chain(sequence)[::step]):
                self.entering[i] = truth
                tokens = range(plan.segments[i].start, plan.segments[i].stop)[::step]
                m, e = np.eye(2, dtype=np.int64), np.zeros((2, 2), dtype=np.int64)
                if position == 0:
                    e = truth
                for t in tokens:
                    truth = (maps[t] @ truth + updates[t]) % PRIME
                    m, e = maps[t] @ m % PRIME, (maps[t] @ e + updates[t]) % PRIME
                self.summary[i] = m, e


class Rank:
    """One rank that runs a schedule as a sequential process; yields while it would block.

    ``own`` and ``received`` hold per round what is in its slot, by (part, rank, row).
    """

    def __init__(self, problem: Problem, plan: Any, rank: int, plans: Any) -> None:
        self.problem, self.plan, self.rank, self.schedule = problem, plan, rank, plans
        self.entered: dict[int, np.ndarray] = {}
        self.published: list[dict[tuple[str, int, int], np.ndarray]] = []
        self.bytes_received = 0
        self.own: list[dict[tuple[str, int, int], np.ndarray]] = [{} for _ in plans.rounds]
        self.received: list[dict[tuple[str, int, int], np.ndarray]] = [{} for _ in plans.rounds]
        self.unused: set[tuple[int, tuple[str, int, int]]] = set()
        for row, i in enumerate(plan.owned(rank)):
            m, e = problem.summary[i]
            # The finished state of a handoff, wherever it travels, takes the place of E.
            for own in self.own if plans.receive_first else self.own[:1]:
                if plans.needs[i].state:
                    own["state", rank, row] = e
                if plans.needs[i].transition:
                    own["transition", rank, row] = m

    def run(self, peers: list[Rank]) -> Iterator[None]:
        for number, step in enumerate(self.schedule.rounds):
            mine = step.ranks[self.rank]
            assert bool(mine.windows) <= (number > 0)
            for window in mine.windows:
                self.make(window, number)
            if not self.schedule.receive_first:
                self.publish(mine, number)
            needed = {peer for sources in mine.receives.values() for peer in sources}
            while any(len(peers[peer].published) <= number for peer in needed):
                yield
            self.receive(step, peers, number)
            for fold in mine.folds:
                self.enter(fold)
            if self.schedule.receive_first:
                self.publish(mine, number)
        assert not self.unused, "something moved that nobody used"

    def publish(self, mine: Any, number: int) -> None:
        keys = [(part, self.rank, row) for part, rows in mine.sends.items() for row in rows]
        self.published.append({key: self.own[number][key] for key in keys})

    def receive(self, step: Any, peers: list[Rank], number: int) -> None:
        for part, routes in step.routes.items():
            for source, destination, row in routes:
                assert source != destination
                assert part in step.parts
                if destination == self.rank:
                    key = (part, source, row)
                    self.received[number][key] = peers[source].published[number][key]
                    self.unused.add((number, key))
                    self.bytes_received += ROW[part]
                    assert source in step.ranks[self.rank].receives[part]

    def read(self, part: str, source: Any) -> np.ndarray:
        assert self.plan.owned(source.rank)[source.row] == source.segment
        assert part in self.schedule.rounds[source.round].parts
        key = (part, source.rank, source.row)
        if source.rank == self.rank:
            return self.own[source.round][key]
        self.unused.discard((source.round, key))
        return self.received[source.round][key]

    def fold(self, fold: Any) -> np.ndarray:
        assert fold.target.rank == self.rank
        assert self.plan.owned(self.rank)[fold.target.row] == fold.target.segment
        first, *others = fold.sources
        state = self.read("state", first)
        for source in others:
            state = (self.read("transition", source) @ state + self.read("state", source)) % PRIME
        return state

    def make(self, window: Any, number: int) -> None:
        assert window.target.round == number
        assert {source.round for source in window.sources} == {number - 1}
        row = window.target.row
        self.own[number]["state", self.rank, row] = self.fold(window)
        if window.transition:
            earlier, later = (self.read("transition", source) for source in window.sources)
            self.own[number]["transition", self.rank, row] = later @ earlier % PRIME

    def enter(self, fold: Any) -> None:
        state = self.fold(fold)
        self.entered[fold.target.segment] = state
        if self.schedule.receive_first and self.schedule.needs[fold.target.segment].state:
            m, e = self.problem.summary[fold.target.segment]
            for own in self.own:
                own["state", self.rank, fold.target.row] = (m @ state + e) % PRIME


def execute(case: Any, direction: str, composition: str) -> list[Rank]:
    """Run all ranks in a random interleaving; fail when all of them wait."""
    problem = Problem(case, direction)
    plans = schedule(case.plan, direction, composition)
    ranks = [Rank(problem, case.plan, r, plans) for r in range(case.plan.world_size)]
    running = {rank.rank: rank.run(ranks) for rank in ranks}
    rng = random.Random(0)
    idle = 0
    while running:
        number = rng.choice(sorted(running))
        before = len(ranks[number].published)
        try:
            next(running[number])
        except StopIteration:
            del running[number]
            idle = 0
            continue
        idle = idle + 1 if len(ranks[number].published) == before else 0
        assert idle < 1000, f"ranks {sorted(running)} wait for ever\n{case.plan.describe()}"
    for rank in ranks:
        for i, state in rank.entered.items():
            assert (state == problem.entering[i]).all(), f"segment {i}\n{case.plan.describe()}"
    return ranks


@pytest.mark.parametrize("composition", COMPOSITIONS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_segment_gets_the_state_of_the_recurrence(
    cases: list[Any], direction: str, composition: str
) -> None:
    step = 1 if direction == "forward" else -1
    for case in cases:
        ranks = execute(case, direction, composition)
        plan = case.plan
        entered = sorted(i for rank in ranks for i in rank.entered)
        chains = [plan.chain(sequence)[::step] for sequence in range(plan.num_sequences)]
        assert entered == sorted(i for chain in chains for i in chain[1:])
        volume = plan.volume(slot(plan), composition)
        assert getattr(volume, direction) == [rank.bytes_received for rank in ranks]


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_what_moves_is_what_the_algebra_says(cases: list[Any], direction: str) -> None:
    step = 1 if direction == "forward" else -1
    for case in cases:
        plan = case.plan
        needs: list[tuple[bool, bool]] = [(False, False)] * len(plan.segments)
        states, transitions, handed = set(), set(), set()
        for sequence in range(plan.num_sequences):
            chain = plan.chain(sequence)[::step]
            for j, consumer in enumerate(chain):
                to = plan.segments[consumer].rank
                needs[consumer] = (j < len(chain) - 1, 0 < j < len(chain) - 1)
                for i, producer in enumerate(chain[:j]):
                    move = (plan.segments[producer].rank, to, plan.local_index(producer))
                    if move[0] != to:
                        states.add(move)
                        if i > 0:
                            transitions.add(move)
                    if i == j - 1:
                        handed.add(move)
        gather = schedule(plan, direction, "gather")
        assert [(need.state, need.transition) for need in gather.needs] == needs
        assert len(gather.rounds) == (1 if states else 0)
        for got in gather.rounds:
            assert got.routes == {"state": states, "transition": transitions}
        handoff = schedule(plan, direction, "handoff")
        assert handoff.needs == gather.needs
        moved = [move for got in handoff.rounds for move in got.routes["state"]]
        assert sorted(moved) == sorted(handed)
        assert not any(got.routes["transition"] for got in handoff.rounds)


def test_a_later_rank_never_reaches_an_earlier_one_forward() -> None:
    plan = build_plan([0, 30, 41], world_size=3)
    for composition in COMPOSITIONS:
        for step in schedule(plan, "forward", composition).rounds:
            assert all(source < to for source, to, _ in step.routes["state"])
            assert not step.ranks[0].folds
        for step in schedule(plan, "backward", composition).rounds:
            assert all(source > to for source, to, _ in step.routes["state"])


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("rounds", "arguments"),
    [
        (0, {"cu_seqlens": [0, 3, 7], "world_size": 1}),
        (0, {"cu_seqlens": [0, 5, 10], "world_size": 2}),
        (1, {"cu_seqlens": [0, 64], "world_size": 6}),
        (1, {"cu_seqlens": [0, 7, 30, 64], "world_size": 6}),
        (1, {"cu_seqlens": [0, 30, 64], "world_size": 4, "layout": "contiguous_per_sequence"}),
        # a chain that visits a rank twice takes one slot per visit
        (2, {"cu_seqlens": [0, 16], "world_size": 2, "layout": "zigzag"}),
        (2, {"cu_seqlens": [0, 64], "world_size": 6, "layout": "zigzag"}),
        (2, {"cu_seqlens": [0, 30, 64], "world_size": 4, "layout": "zigzag_per_sequence"}),
        # one chain runs 0 -> 1, the other 1 -> 0: in one round each rank would wait for the other
        (2, {"cu_seqlens": [0, 8, 16], "world_size": 2, "layout": "zigzag"}),
        (2, {"cu_seqlens": [0, 30, 64], "world_size": 4, "layout": "zigzag"}),
    ],
)
def test_handoffs_take_a_round_per_visit(
    make_case: Any, direction: str, rounds: int, arguments: dict[str, Any]
) -> None:
    case = make_case(**arguments)
    assert len(schedule(case.plan, direction, "handoff").rounds) == rounds
    execute(case, direction, "handoff")


def test_chains_that_cross_through_a_third_rank_do_not_deadlock(make_case: Any) -> None:
    # 0 -> 1 -> 2, 2 -> 0, and 1 -> 0: the last two must not share a round with the first.
    pieces = [(0, 0, 2), (1, 2, 4), (2, 4, 6), (2, 6, 8), (0, 8, 10), (1, 10, 12), (0, 12, 14)]
    case = make_case([0, 6, 10, 14], world_size=3, layout="custom", boundaries=pieces)
    for direction in DIRECTIONS:
        rounds = schedule(case.plan, direction, "handoff").rounds
        assert len(rounds) == 2
        execute(case, direction, "handoff")


def test_two_ranks_move_one_state_each_way() -> None:
    plan = build_plan([0, 128], world_size=2)
    for composition in COMPOSITIONS:
        volume = plan.volume(slot(plan), composition)
        assert (volume.forward, volume.backward) == ([0, ROW["state"]], [ROW["state"], 0])


def test_volume_of_a_chain_is_that_of_the_table() -> None:
    plan = build_plan([0, 128], world_size=4)
    s, t = ROW["state"], ROW["transition"]
    gather = plan.volume(slot(plan), "gather")
    assert gather.forward == [0, s, 2 * s + t, 3 * s + 2 * t]
    assert gather.backward == [3 * s + 2 * t, 2 * s + t, s, 0]
    handoff = plan.volume(slot(plan), "handoff")
    assert (handoff.forward, handoff.backward) == ([0, s, s, s], [s, s, s, 0])
    assert plan.volume(slot(plan, parts="state"), "gather").forward == [0, s, 2 * s, 3 * s]
    assert plan.volume(slot(plan, batch=3), "gather").forward == [3 * n for n in gather.forward]


def test_volume_does_not_grow_with_the_stream() -> None:
    short, long = (build_plan([0, n], world_size=4, layout="zigzag") for n in (64, 1 << 40))
    for composition in COMPOSITIONS:
        assert short.volume(slot(short), composition) == long.volume(slot(long), composition)


def test_volume_refuses_what_it_cannot_count() -> None:
    plan = build_plan([0, 4, 8], world_size=1)
    with pytest.raises(PlanError, match=r"multiple of the plan's max_segments, 2"):
        plan.volume(Slot("s", (PartSpec("state", (3, 4), torch.float32),)), "gather")
    with pytest.raises(PlanError, match=r"multiple of the plan's max_segments, 2"):
        plan.volume(Slot("s", (PartSpec("state", (), torch.float32),)), "gather")
    with pytest.raises(PlanError, match=r"not 'tails'"):
        plan.volume(Slot("s", (PartSpec("tails", (2, 4), torch.float32),)), "gather")


def test_unknown_names_are_refused() -> None:
    plan = build_plan([0, 8], world_size=2)
    words = r"unknown composition 'gathr'; valid: handoff, gather, scan"
    with pytest.raises(OpInputError, match=words):
        plan.volume(slot(plan), "gathr")
    with pytest.raises(OpInputError, match=r"unknown direction 'sideways'"):
        schedule(plan, "sideways", "gather")


def test_schedules_are_made_once_and_cannot_be_changed() -> None:
    plan = build_plan([0, 8], world_size=2)
    got = schedule(plan, "forward", "gather")
    assert schedule(build_plan([0, 8], world_size=2), "forward", "gather") is got
    with pytest.raises(TypeError):
        got.rounds[0].routes["state"] = frozenset()  # type: ignore[index]


def test_routes_expand_to_rows_of_a_batch() -> None:
    routes = frozenset({(0, 1, 0), (0, 1, 2)})
    assert expand_routes(routes, 1) == routes
    assert expand_routes(routes, 2) == {(0, 1, 0), (0, 1, 1), (0, 1, 4), (0, 1, 5)}
