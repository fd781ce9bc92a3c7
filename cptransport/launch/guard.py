# SPDX-License-Identifier: Apache-2.0
"""Owns a private MPS daemon: starts it, and ends it when this process's standard input ends.

A program of its own, so that the daemon goes however the one that wanted it ends, ``kill -9``
included: the kernel closes the pipe. Run as ``python guard.py DIRECTORY`` with the daemon's
environment; prints ``ready`` or why not, then waits. The directory is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"

_START_S = 30.0
_FORCE_S = 5  # how long the daemon waits for clients before it ends its servers
_END_S = 5.0


def main() -> int:
    """Run the guard."""
    directory = Path(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # those are for the one that holds our input
    try:
        problem = _start(directory)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write((problem or "ready") + "\n")
            sys.stdout.flush()
        if not problem:
            while sys.stdin.buffer.read(4096):
                pass
    finally:
        _end(directory)
        shutil.rmtree(directory, ignore_errors=True)
    return 1 if problem else 0


def _start(directory: Path) -> str | None:
    """Start the daemon; return why it did not."""
    log = directory / "start.log"
    try:
        # A file, not a pipe: the daemon keeps what it inherits, and a reader would wait for it.
        with log.open("wb") as stream:
            done = subprocess.run(
                [CONTROL, "-d"],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                timeout=_START_S,
            )
    except FileNotFoundError:
        return f"{CONTROL} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{CONTROL} -d: {error}"
    if done.returncode:
        said = " ".join(log.read_text(errors="replace").split())
        return f"{CONTROL} -d ended with exit code {done.returncode}" + (
            f": {said}" if said else ""
        )
    return None


def _end(directory: Path) -> None:
    """Ask the daemon to end, then see that it has."""
    if not _processes(directory):
        return
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            [CONTROL],
            input=f"quit -t {_FORCE_S}\n".encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=2 * _FORCE_S + 5,
        )
    for number in (0, signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _END_S
        while running := _processes(directory):
            for process in running if number else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)


def _processes(directory: Path) -> list[int]:
    """Return the processes of the daemon that has this directory."""
    mark = f"CUDA_MPS_PIPE_DIRECTORY={directory}\0".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named = (entry / "comm").read_text().startswith(CONTROL[:15])
            if named and mark in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


if __name__ == "__main__":
    sys.exit(main())
