# SPDX-License-Identifier: Apache-2.0
"""The MPS daemons of the GPU programme."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Mapping

#: What clients of an MPS server that lost one say.
BROKEN = re.compile(
    r"illegal memory access|Error 807\b|MPS server is not ready|MpsServerNotReady|MPS_SERVER_NOT_READY"
)


def daemon(stack: contextlib.ExitStack, wanted: bool) -> tuple[dict[str, str], str]:
    """Start an MPS daemon for as long as the stack lives; return what clients need, and a word on it."""
    if not wanted:
        return {}, "none wanted"
    from cptransport.launch import MpsDaemon, MpsUnavailableError, daemon_environment

    try:
        started = stack.enter_context(MpsDaemon(daemon_environment()))
    except MpsUnavailableError as error:
        return {}, f"none: {error}"
    # The daemon numbers its devices anew, and it has one.
    return {**started.environment, "CUDA_VISIBLE_DEVICES": "0"}, "a private daemon"


class SharedDaemon:
    """The MPS daemon that steps share; one that broke is replaced for the steps that follow.

    Args:
        start: starts one for as long as the stack lives; returns what clients need, and a word on it.

    Attributes:
        said: a word on each daemon.
    """

    def __init__(self, start: Callable[[contextlib.ExitStack], tuple[dict[str, str], str]]) -> None:
        self.said: list[str] = []
        self._start = start
        self._lock = threading.Lock()
        self._stack = contextlib.ExitStack()
        self._current: dict[str, str] | None = None

    def variables(self) -> dict[str, str]:
        """Return what a client of the current one needs; empty: there is none."""
        with self._lock:
            if self._current is None:
                self._current, said = self._start(self._stack)
                self.said.append(said)
            return self._current

    def broken(self, variables: Mapping[str, str]) -> None:
        """Have a new one started for the next client, if this one is the current one."""
        with self._lock:
            if variables and variables is self._current:
                self._current = None  # still clients' own: it is closed at the end

    def close(self) -> None:
        """End all that were started."""
        self._stack.close()
