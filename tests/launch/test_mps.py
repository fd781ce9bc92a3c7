# SPDX-License-Identifier: Apache-2.0
"""The private MPS daemon: its calls, and that it always goes, however its owner ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cptransport.launch import MpsDaemon, MpsUnavailableError
from cptransport.launch import mps as module

if TYPE_CHECKING:
    from conftest import FakeMps  # of this folder; only the fixture is used

OWNER = """
import sys
from cptransport.launch import MpsDaemon
daemon = MpsDaemon()
print("started", flush=True)
sys.stdin.readline()
"""


def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in serves no client; a real driver would say so."""
    monkeypatch.setattr(module, "_CLIENT", "")


def test_it_starts_and_ends(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    with MpsDaemon({"CUDA_VISIBLE_DEVICES": "3"}) as daemon:
        folder = Path(daemon.environment["CUDA_MPS_PIPE_DIRECTORY"])
        assert daemon.environment["CUDA_MPS_LOG_DIRECTORY"] == str(folder)
        assert folder.is_dir()
        # The path of a socket in it must fit into 107 bytes.
        assert len(str(folder)) < 60
        assert mps.calls == [[["-d"], "", str(folder), "3"]]
        assert len(mps.daemons) == 1
    assert mps.calls[1:] == [[[], "quit -t 5\n", str(folder), "3"]]
    mps.assert_nothing_left()
    daemon.close()
    assert len(mps.calls) == 2


def test_two_daemons_do_not_meet(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    with MpsDaemon() as first, MpsDaemon() as second:
        assert first.environment != second.environment
        first.close()
        assert Path(second.environment["CUDA_MPS_PIPE_DIRECTORY"]).is_dir()
    mps.assert_nothing_left()


@pytest.mark.parametrize("mps", ["fails"], indirect=True)
def test_a_daemon_that_does_not_start(mps: FakeMps) -> None:
    with pytest.raises(MpsUnavailableError) as caught:
        MpsDaemon()
    assert "exit code 1: Cannot find MPS control socket" in str(caught.value)
    assert not Path(str(mps.calls[0][2])).exists()


def test_no_such_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MpsUnavailableError, match="nvidia-cuda-mps-control is not installed"):
        MpsDaemon()


def test_a_daemon_that_serves_no_client(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLIENT", "raise SystemExit('CUDA_ERROR_MPS_CONNECTION_FAILED')")
    with pytest.raises(MpsUnavailableError, match="a client fails: CUDA_ERROR_MPS_CONNECTION"):
        MpsDaemon()
    mps.assert_nothing_left()


@pytest.mark.parametrize("mps", ["stubborn"], indirect=True)
def test_a_daemon_that_does_not_want_to_end(mps: FakeMps, monkeypatch: pytest.MonkeyPatch) -> None:
    no_gpu(monkeypatch)
    MpsDaemon().close()
    assert [call[0] for call in mps.calls] == [["-d"], []]
    mps.assert_nothing_left()


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_it_goes_with_its_owner(mps: FakeMps, end: str) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    assert owner.stdout.readline() == b"started\n"
    getattr(owner, end)()
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    start = time.monotonic()
    mps.assert_nothing_left(within_s=15)
    assert time.monotonic() - start < 15
