# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the MPS control program that records its calls and leaves a daemon behind, as the real one does."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

CONTROL = "nvidia-cuda-mps-control"

_SOURCE = """#!{python}
import json, os, signal, sys, time
folder, mode = {folder!r}, {mode!r}
pipes = os.environ["CUDA_MPS_PIPE_DIRECTORY"]
said = "" if sys.argv[1:] else sys.stdin.read()
with open(folder + "/calls", "a") as stream:
    stream.write(json.dumps([sys.argv[1:], said, pipes, os.environ.get("CUDA_VISIBLE_DEVICES")]) + "\\n")
daemon = pipes + "/fake.pid"
if sys.argv[1:] == ["-d"]:
    if mode == "fails":
        sys.exit("Cannot find MPS\\ncontrol socket")
    if os.fork():
        sys.exit(0)
    os.setsid()
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with open(daemon, "w") as stream:
        stream.write(str(os.getpid()))
    with open(folder + "/daemons", "a") as stream:
        stream.write(str(os.getpid()) + "\\n")
    time.sleep(300)
elif mode != "stubborn":
    os.kill(int(open(daemon).read()), signal.SIGKILL)
"""


@dataclass(frozen=True)
class FakeMps:
    """What the stand-in has seen."""

    folder: Path

    @property
    def calls(self) -> list[list[object]]:
        """(arguments, input, pipe directory, visible devices) of every call."""
        text = self.folder / "calls"
        return [json.loads(line) for line in text.read_text().splitlines()] if text.exists() else []

    @property
    def daemons(self) -> list[int]:
        """Every daemon that was started."""
        text = self.folder / "daemons"
        return [int(line) for line in text.read_text().split()] if text.exists() else []

    @staticmethod
    def running(pid: int) -> bool:
        """Whether a process exists and is no zombie."""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    def assert_nothing_left(self, within_s: float = 0.0) -> None:
        """The daemons have ended and their directories are gone."""
        assert self.daemons
        deadline = time.monotonic() + within_s
        while True:
            left = [pid for pid in self.daemons if self.running(pid)]
            folders = [str(call[2]) for call in self.calls if Path(str(call[2])).exists()]
            if not left and not folders:
                return
            assert time.monotonic() < deadline, f"daemons {left}, directories {folders}"
            time.sleep(0.05)


@pytest.fixture
def mps(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMps:
    """Put the stand-in on PATH; parameters: ``works`` (default), ``fails``, ``stubborn``."""
    mode = getattr(request, "param", "works")
    program = tmp_path / CONTROL
    source = _SOURCE.format(python=sys.executable, folder=str(tmp_path), mode=mode)
    program.write_text(source, encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeMps(tmp_path)
