# SPDX-License-Identifier: Apache-2.0
"""The rig: all ranks of these tests share one GPU, through a private MPS daemon where one starts."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from cptransport.launch import MpsDaemon, MpsUnavailableError, daemon_environment
from cptransport.testing import close_pools

_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_notes: list[str] = []


@pytest.fixture(scope="session", autouse=True)
def mps() -> Iterator[None]:
    """Start the daemon, unless the one that started pytest has: rank processes inherit its environment."""
    if not torch.cuda.device_count() or _PIPES in os.environ:
        yield
        return
    try:
        daemon = MpsDaemon(daemon_environment())
    except MpsUnavailableError as error:
        _notes.append(f"no MPS, ranks took turns on the GPU: {error}")
        yield
        return
    with daemon:
        os.environ.update(daemon.environment)
        yield
        close_pools()
        for name in daemon.environment:
            del os.environ[name]


@pytest.fixture(scope="class", autouse=True)
def one_pool() -> Iterator[None]:
    """End the ranks of a class after it: shares of the GPU must not add up to more than all of it."""
    yield
    close_pools()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for note in _notes:
        terminalreporter.write_line(note)
