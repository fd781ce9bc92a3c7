# SPDX-License-Identifier: Apache-2.0
"""A pool never gives one case the answer to another, and leaves nothing running."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from cptransport.testing.pool import CaseError, RankPool


class OnlyHere:
    """Ranks load this file under another name, so its pickles do not load in the test's process."""


def a_class_of_its_own(ranks: Any) -> OnlyHere:
    return OnlyHere()


def its_rank(ranks: Any) -> int:
    return ranks.rank


def leaves_a_child(ranks: Any, path: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))
    os._exit(3)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_result_that_does_not_load_is_a_failure_and_not_the_next_answer(tmp_path: Path) -> None:
    with RankPool("gloo", 2) as pool:
        with pytest.raises(CaseError, match="its result does not load here"):
            pool.run(a_class_of_its_own, transport=False)
        assert pool.run(its_rank, transport=False) == [0, 1]


def test_children_of_a_rank_that_ended_end_with_the_pool(tmp_path: Path) -> None:
    with RankPool("gloo", 1) as pool, pytest.raises(CaseError, match="exit code 3"):
        pool.run(leaves_a_child, transport=False, path=str(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        if not runs(pid):
            return
        time.sleep(0.02)
    raise AssertionError("the child of the rank still runs")


def test_what_stops_all_threads_before_they_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_STRICT", "maybe")
    start = time.monotonic()
    with pytest.raises(CaseError, match="EnvVarError: CULA_CP_STRICT=maybe"):
        RankPool("threads", 2).run(its_rank, transport=False, timeout_s=20.0)
    assert time.monotonic() - start < 10
