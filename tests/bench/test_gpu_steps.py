# SPDX-License-Identifier: Apache-2.0
"""The driver of the GPU programme: which MPS daemon and which cache a step has, and what is told of failures."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import ClassVar

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "gpu"))

import run_all
from daemons import SharedDaemon
from logs import reasons


def programme(code: str, name: str, mps: str = "shared") -> run_all.Step:
    return run_all.Step(name, "A", command=("python", "-c", code), mps=mps)


class Daemon:
    """Stands in for an MPS daemon."""

    made: ClassVar[list[Daemon]] = []

    def __init__(self, environment: object = None) -> None:
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(len(self.made))}
        self.open = True
        self.made.append(self)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *error: object) -> None:
        self.open = False


def test_a_broken_daemon_serves_no_later_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What shares one gets the next one after it broke; what has its own, or none, breaks no other's."""
    monkeypatch.setattr(Daemon, "made", [])
    monkeypatch.setattr("cptransport.launch.MpsDaemon", Daemon)
    said = (
        "import os; print('pipes', os.environ.get('CUDA_MPS_PIPE_DIRECTORY'), "
        "os.environ.get('CPTRANSPORT_NO_MPS'))"
    )
    lost = "; raise SystemExit('Error 807: MPS server is not ready')"
    steps = [
        programme(said, name="first"),
        programme(f"{said}; raise SystemExit(1)", name="wrong"),
        programme(said + lost, name="own", mps="own"),
        programme(said + lost, name="none", mps="no"),
        programme(said, name="second"),
        programme(said + lost, name="lost"),
        programme(said, name="third"),
        programme(said, name="fourth"),
    ]
    run = run_all.Run(run_all.parse(["--out", str(tmp_path)]), tmp_path)
    run_all.run_all(run, steps, jobs=1, shares=True)
    seen = {step.name: run.log(step.name).split("\n")[0] for step in steps}
    assert seen == {
        "first": "pipes 0 None",
        "wrong": "pipes 0 None",
        "own": "pipes 1 None",
        "none": "pipes None 1",
        "second": "pipes 0 None",
        "lost": "pipes 0 None",
        "third": "pipes 2 None",
        "fourth": "pipes 2 None",
    }
    assert [daemon.open for daemon in Daemon.made] == [False] * 3
    assert run.machine["mps"] == "a private daemon, then a private daemon"


def test_a_daemon_is_replaced_once_for_all_that_lost_it() -> None:
    def start(stack: contextlib.ExitStack) -> tuple[dict[str, str], str]:
        made = stack.enter_context(Daemon())
        return made.environment, "one"

    shared = SharedDaemon(start)
    with contextlib.closing(shared):
        first = shared.variables()
        shared.broken(first)
        second = shared.variables()
        shared.broken(first)  # by another step that had it
        assert shared.variables() is second
        assert second != first
    assert shared.said == ["one", "one"]


def test_a_bench_tunes_for_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It begins with the kernels of tests, but tunes while nothing else runs; tunings are kept."""
    cache = tmp_path / "cache"
    (cache / "key").mkdir(parents=True)
    (cache / "key" / "kernel.cubin").write_text("compiled beside others")
    (cache / "key" / "kernel.autotune.json").write_text("tuned beside others")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    run = run_all.Run(run_all.parse(["--out", str(tmp_path)]), tmp_path)
    code = "import os; print(os.environ['TRITON_CACHE_DIR'], os.environ['TRITON_CACHE_AUTOTUNING'])"
    run.command = lambda step: [sys.executable, "-c", code]
    said = []
    for name in ("tests", "bench"):
        assert run.start(run_all.Step(name, "C", bench=name == "bench"), {}, "").ok
        said.append(run.log(name).split())
    (tests, kept), (bench_cache, kept_too) = said
    assert bench_cache == f"{tests}-bench"
    assert kept == kept_too == "1"
    assert {path.name for path in Path(bench_cache).rglob("*.*")} == {"kernel.cubin"}
    (Path(bench_cache) / "key" / "kernel.autotune.json").write_text("tuned by itself")
    assert run.start(run_all.Step("bench", "C", bench=True), {}, "").ok
    assert (Path(bench_cache) / "key" / "kernel.autotune.json").read_text() == "tuned by itself"


def test_the_summary_tells_why() -> None:
    log = """\
a.py::test_one FAILED
=================================== FAILURES ===================================
______________________ test_one[2] _______________________
a.py:3: in test_one
E   pool.CaseError: case on nccl, 2 ranks
E   --- rank 0: FAILED
E   Traceback (most recent call last):
E     File "worker.py", line 47, in serve
E   torch.AcceleratorError: CUDA error: an illegal memory access was encountered
E   For debugging consider passing CUDA_LAUNCH_BLOCKING=1
E   --- rank 1: FAILED
E   no answer after 60 s
E       stderr of rank 1:
_________________________ test_two _________________________
E   assert 3 == 4
_________________________ test_three _________________________
E   assert 3 == 4
=========================== short test summary info ============================
nanobind: leaked 16 instances!
 - leaked instance 0x7f2a94457e28 of type "cudnn"
"""
    assert reasons(log) == [
        "test_one[2]",
        "    pool.CaseError: case on nccl, 2 ranks",
        "    --- rank 0: FAILED",
        "    torch.AcceleratorError: CUDA error: an illegal memory access was encountered",
        "    --- rank 1: FAILED",
        "    no answer after 60 s",
        "test_two and 1 more",
        "    assert 3 == 4",
    ]
    assert reasons("bench: wrong\nnanobind: leaked 1 types!\n") == ["bench: wrong"]
