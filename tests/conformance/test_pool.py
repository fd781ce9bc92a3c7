# SPDX-License-Identifier: Apache-2.0
"""The rank pool itself: results, failures, hangs, deaths, both modes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptransport.testing import CaseError, RankPool, Ranks, run_ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot


def describe(transport: BoundaryTransport, word: str) -> list[Any]:
    return [transport.name, transport.rank, transport.world_size, word, os.getpid()]


def exchange(transport: BoundaryTransport) -> list[float]:
    slot = Slot("values", (PartSpec("value", (2,), torch.float32),))
    transport.stage(slot)["value"].fill_(transport.rank)
    transport.publish(slot)
    gathered = transport.gather(slot)
    return [gathered.tensor("value", rank)[1].item() for rank in range(transport.world_size)]


def one_raises(transport: BoundaryTransport) -> None:
    if transport.rank == 1:
        raise ValueError("rank 1 does not like this")


def one_hangs_deep_inside(ranks: Ranks) -> None:
    if ranks.rank == 1:
        threading.Event().wait(20)  # as a thread it outlives its test; not the test run, though


def one_leaves(ranks: Ranks, code: int) -> int:
    if ranks.rank == 1:
        os._exit(code)
    return ranks.rank


def forgets_nothing(ranks: Ranks) -> bool:
    ranks.create()
    return True


def draws(ranks: Ranks) -> float:
    return torch.rand(()).item()


def pairs(ranks: Ranks) -> list[int]:
    group = ranks.subgroup([0, 2], [1, 3])
    values = [None, None]
    dist.all_gather_object(values, ranks.rank, group=group)
    transport = ranks.create(group)
    return [*values, transport.rank, transport.world_size]  # type: ignore[list-item]


def environment(ranks: Ranks) -> list[str | None]:
    return [os.environ.get("CPT_TEST_A"), os.environ.get("CPT_TEST_B")]


def test_ranks_are_processes_that_persist() -> None:
    first = run_ranks(describe, backend="gloo", world_size=2, word="a")
    second = run_ranks(describe, backend="gloo", world_size=2, word="b")
    assert [row[:4] for row in first] == [["gloo", 0, 2, "a"], ["gloo", 1, 2, "a"]]
    assert [row[4] for row in first] == [row[4] for row in second]
    assert len({os.getpid(), first[0][4], first[1][4]}) == 3


def test_threads_have_the_same_interface() -> None:
    rows = run_ranks(describe, backend="threads", world_size=3, word="a")
    assert [row[:4] for row in rows] == [["threads", rank, 3, "a"] for rank in range(3)]
    assert {row[4] for row in rows} == {os.getpid()}


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_transports_of_a_case_work(backend: str) -> None:
    assert run_ranks(exchange, backend=backend, world_size=2) == [[0.0, 1.0]] * 2


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_failure_names_the_rank_and_drops_the_ranks(backend: str) -> None:
    with RankPool(backend, 2) as pool:
        with pytest.raises(CaseError, match="rank 1 does not like this") as caught:
            pool.run(one_raises, transport_timeout_s=5)
        assert "ValueError" in caught.value.failures[1]
        assert pool.run(exchange) == [[0.0, 1.0]] * 2
        assert pool.starts == (2 if backend == "gloo" else 0)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_a_hang_ends_with_the_stacks_of_the_ranks(backend: str) -> None:
    with RankPool(backend, 2) as pool:
        start = time.monotonic()
        with pytest.raises(CaseError, match=r"no answer after 2 s") as caught:
            pool.run(one_hangs_deep_inside, transport=False, timeout_s=2)
        assert time.monotonic() - start < 15
        assert "in one_hangs_deep_inside" in str(caught.value)  # faulthandler's stack
        assert list(caught.value.failures) == [1]
        assert pool.run(exchange) == [[0.0, 1.0]] * 2


def test_a_rank_that_ends_is_reported_with_its_exit_code() -> None:
    with RankPool("gloo", 2) as pool:
        with pytest.raises(CaseError, match="exit code 3"):
            pool.run(one_leaves, transport=False, code=3)
        assert pool.run(one_leaves, transport=False, code=4, exits={1: 4}) == [0, None]
        with pytest.raises(CaseError, match="exit code 5"):
            pool.run(one_leaves, transport=False, code=5, exits={1: 4})
        with pytest.raises(CaseError, match="should have ended"):
            pool.run(forgets_nothing, transport=False, exits={1: 4})


def test_every_case_starts_from_the_same_seed_on_all_ranks() -> None:
    first = run_ranks(draws, backend="gloo", world_size=2, transport=False)
    second = run_ranks(draws, backend="gloo", world_size=2, transport=False)
    assert first[0] == first[1] != second[0] == second[1]


def test_cases_may_use_process_groups_of_their_own() -> None:
    rows = run_ranks(pairs, backend="gloo", world_size=4, transport=False)
    assert rows == [[0, 2, 0, 2], [1, 3, 0, 2], [0, 2, 1, 2], [1, 3, 1, 2]]


def test_environment_variables_may_differ_by_rank() -> None:
    with RankPool("gloo", 2, env={"CPT_TEST_A": "x", "CPT_TEST_B": "host{rank}"}) as pool:
        assert pool.run(environment, transport=False) == [["x", "host0"], ["x", "host1"]]


def test_a_case_runs_by_hand() -> None:
    command = [sys.executable, "-m", "cptransport.testing.worker", "--case", f"{__file__}:describe"]
    command += ["--world-size", "2", "--backend", "gloo", "--kwargs", '{"word": "hand"}']
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert [row[:4] for row in json.loads(ran.stdout)] == [
        ["gloo", 0, 2, "hand"],
        ["gloo", 1, 2, "hand"],
    ]
    assert ran.stderr == ""
