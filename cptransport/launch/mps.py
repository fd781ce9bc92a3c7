# SPDX-License-Identifier: Apache-2.0
"""A private MPS daemon, so that processes that share a GPU run on it side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from cptransport.launch import guard

__all__ = ["MpsDaemon", "MpsUnavailableError"]

_CLIENT_S = 60.0
_END_S = 40.0  # above what guard.py takes at worst

#: A client's first steps. Without a CUDA driver there is nothing that MPS could keep from working.
_CLIENT = """
import ctypes
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError:
    raise SystemExit
code = cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(ctypes.c_void_p()), 0)
if code:
    name = ctypes.c_char_p()
    cuda.cuGetErrorName(code, ctypes.byref(name))
    raise SystemExit(f"{(name.value or b'CUDA error').decode()} ({code})")
"""


class MpsUnavailableError(RuntimeError):
    """MPS cannot serve here; the message says why."""


class MpsDaemon:
    """A running daemon with pipes and logs of its own; ends with ``close()``, or with this process.

    Args:
        environment: further variables of the daemon, ``sharing.daemon_environment``.

    Raises:
        MpsUnavailableError: it did not start, or serves no client.

    Attributes:
        environment: what a process must have set to be its client.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        # Not under $TMPDIR: a socket's path has 107 bytes at most, and some of those are long.
        directory = Path(tempfile.mkdtemp(prefix="cpt-mps-", dir="/tmp"))
        self.environment = {
            "CUDA_MPS_PIPE_DIRECTORY": str(directory),
            "CUDA_MPS_LOG_DIRECTORY": str(directory),
        }
        self._guard = subprocess.Popen(
            [sys.executable, guard.__file__, str(directory)],
            env={**os.environ, **(environment or {}), **self.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        try:
            assert self._guard.stdout is not None
            said = self._guard.stdout.readline().decode().strip()
            problem = "" if said == "ready" else said or "its guard ended"
            if problem or (problem := self._client_problem()):
                raise MpsUnavailableError(problem)
        except BaseException:
            self.close()
            raise

    def _client_problem(self) -> str:
        """Return why a client cannot use the GPU through the daemon; empty: it can."""
        try:
            client = subprocess.run(
                [sys.executable, "-c", _CLIENT],
                env={**os.environ, **self.environment, "CUDA_VISIBLE_DEVICES": "0"},
                capture_output=True,
                text=True,
                timeout=_CLIENT_S,
            )
        except subprocess.TimeoutExpired:
            return f"a client got no answer for {_CLIENT_S:g} s"
        return f"a client fails: {client.stderr.strip()}" if client.returncode else ""

    def close(self) -> None:
        """End the daemon; idempotent. Its clients should have ended."""
        for stream in (self._guard.stdin, self._guard.stdout):
            if stream is not None:
                stream.close()
        self._guard.wait(_END_S)

    def __enter__(self) -> MpsDaemon:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
