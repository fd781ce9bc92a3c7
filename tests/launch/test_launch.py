# SPDX-License-Identifier: Apache-2.0
"""``cptransport launch`` end to end: real ranks on gloo, a stand-in for MPS."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import FakeMps  # of this folder; only the fixture is used

SCRIPT = """
import json, os, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([rank + 1.0])
dist.all_reduce(total)
found = {"rank": rank, "sum": total.item(), "argv": sys.argv[1:], "pid": os.getpid(), "env": dict(os.environ)}
with open(os.path.join(os.path.dirname(__file__), f"rank{rank}.json.part"), "w") as stream:
    json.dump(found, stream)
os.rename(stream.name, stream.name[:-5])
how = sys.argv[1] if len(sys.argv) > 1 else ""
if how == "sleep":
    time.sleep(120)
dist.destroy_process_group()
if how == "exit" and rank == 1:
    sys.exit(7)
if how == "kill" and rank == 1:
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


def start(*arguments: str | Path, cwd: Path | None = None) -> subprocess.Popen[str]:
    path = [os.path.abspath(entry) for entry in sys.path if entry]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    return subprocess.Popen(
        [sys.executable, "-m", "cptransport", "launch", *map(str, arguments)],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def launch(*arguments: str | Path, cwd: Path | None = None) -> tuple[int, str]:
    """Run the command; return its exit code and its lines on stderr."""
    process = start(*arguments, cwd=cwd)
    _, err = process.communicate(timeout=90)
    said = [line for line in err.splitlines() if line.startswith("cptransport launch: ")]
    return process.returncode, "\n".join(said)


def ranks(script: Path, count: int = 2) -> list[dict]:
    return [json.loads((script.parent / f"rank{r}.json").read_text()) for r in range(count)]


def test_ranks_meet_and_get_the_arguments(script: Path) -> None:
    code, said = launch("--nproc", "2", script, "--share-gpu", "-x", "y z")
    assert (code, said) == (0, "")
    for number, found in enumerate(ranks(script)):
        assert (found["rank"], found["sum"]) == (number, 3.0)
        assert found["argv"] == ["--share-gpu", "-x", "y z"]
        assert found["env"]["LOCAL_RANK"] == str(number)
        assert "NCCL_HOSTID" not in found["env"]
        assert "CPTRANSPORT_RANKS_PER_DEVICE" not in found["env"]


def test_a_module(script: Path) -> None:
    assert launch("--nproc", "2", "-m", "script", "-m", cwd=script.parent) == (0, "")
    assert [found["argv"] for found in ranks(script)] == [["-m"]] * 2


def test_two_launches_at_once_take_no_port_from_each_other(script: Path) -> None:
    other = script.parent / "other"
    other.mkdir()
    twin = other / "script.py"
    twin.write_text(SCRIPT, encoding="utf-8")
    both = [start("--nproc", "2", each) for each in (script, twin)]
    assert [(each.communicate(timeout=90), each.returncode)[1] for each in both] == [0, 0]
    ports = [ranks(each)[0]["env"]["MASTER_PORT"] for each in (script, twin)]
    assert ports[0] != ports[1]


@pytest.mark.parametrize(
    ("how", "code", "words"), [("exit", 7, "exit code 7"), ("kill", 137, "signal 9")]
)
def test_the_exit_code_is_that_of_the_rank_that_failed(
    mps: FakeMps, script: Path, how: str, code: int, words: str
) -> None:
    found, said = launch("--nproc", "2", "--share-gpu", script, how)
    assert found == code
    assert said.splitlines()[-1] == f"cptransport launch: rank 1 ended with {words}"
    mps.assert_nothing_left()


def test_ranks_that_share_a_gpu(mps: FakeMps, script: Path) -> None:
    code, said = launch("--nproc", "2", "--share-gpu", script)
    assert code == 0
    assert re.fullmatch(r"cptransport launch: 2 ranks share one GPU: .* \(with MPS\)", said)
    (arguments, _, folder, device), (_, quitting, _, _) = mps.calls
    assert (arguments, device, quitting) == (["-d"], "0", "quit -t 5\n")
    for number, found in enumerate(ranks(script)):
        env = found["env"]
        assert env["CUDA_MPS_PIPE_DIRECTORY"] == env["CUDA_MPS_LOG_DIRECTORY"] == folder
        assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "50"
        assert env["NCCL_HOSTID"] == f"cptransport-rank{number}"
        assert env["LOCAL_RANK"] == env["CUDA_VISIBLE_DEVICES"] == "0"
        assert env["RANK"] == str(number)
        assert env["CPTRANSPORT_RANKS_PER_DEVICE"] == "2"
    mps.assert_nothing_left()


@pytest.mark.parametrize("mps", ["fails"], indirect=True)
def test_without_mps_it_says_so_once_and_goes_on(mps: FakeMps, script: Path) -> None:
    code, said = launch("--nproc", "2", "--share-gpu", script)
    assert code == 0
    first, second = said.splitlines()
    assert "no MPS, so the ranks take turns on the GPU, which is slower: " in first
    assert "Cannot find MPS control socket" in first
    assert second.endswith("(without MPS)")
    for found in ranks(script):
        assert "CUDA_MPS_PIPE_DIRECTORY" not in found["env"]
        assert found["env"]["NCCL_HOSTID"] == f"cptransport-rank{found['rank']}"


def test_one_rank_shares_with_nobody(mps: FakeMps, script: Path) -> None:
    assert launch("--nproc", "1", "--share-gpu", script) == (0, "")
    assert not mps.calls
    assert "NCCL_HOSTID" not in ranks(script, 1)[0]["env"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_signal_takes_everything_down(mps: FakeMps, script: Path, number: signal.Signals) -> None:
    """Ranks and daemon go, also when the launcher itself is killed."""
    process = start("--nproc", "2", "--share-gpu", script, "sleep")
    deadline = time.monotonic() + 60
    while not all((script.parent / f"rank{r}.json").exists() for r in range(2)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    pids = [found["pid"] for found in ranks(script)]
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == (-9 if number == signal.SIGKILL else 128 + number)
    mps.assert_nothing_left(within_s=15 if number == signal.SIGKILL else 0)
    assert not [pid for pid in pids if mps.running(pid)]


@pytest.mark.parametrize("arguments", [["x.py"], ["--nproc", "0", "x.py"], ["--nproc", "2"]])
def test_wrong_usage(arguments: list[str]) -> None:
    process = start(*arguments)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "usage: " in err
