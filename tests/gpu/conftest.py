# SPDX-License-Identifier: Apache-2.0
"""The rig: ranks that share a GPU do so through a private MPS daemon where one starts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cptransport.launch import MpsDaemon, MpsUnavailableError, daemon_environment

sys.path.insert(0, str(Path(__file__).parent))  # rank processes find the helpers there, too

import rig

_PIPES = "CUDA_MPS_PIPE_DIRECTORY"
_notes: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In a rehearsal nothing needs a GPU but what says so by ``needs_cuda``."""
    if not rig.REHEARSAL:
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.own_markers = [m for m in item.own_markers if m.name not in ("gpu", "multigpu")]
            for node in item.listchain():
                node.own_markers = [m for m in node.own_markers if m.name != "gpu"]


@pytest.fixture
def needs_cuda() -> None:
    """Skip in a rehearsal."""
    if rig.REHEARSAL:
        pytest.skip("a rehearsal has no CUDA device")


@pytest.fixture(scope="session", autouse=True)
def mps() -> Iterator[None]:
    """Start the daemon, unless the one that started pytest has: rank processes inherit its environment."""
    # With several GPUs ranks have one each, as far as they reach; a daemon serves one GPU.
    unwanted = rig.REHEARSAL or rig.NO_MPS in os.environ or torch.cuda.device_count() != 1
    if unwanted or _PIPES in os.environ:
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
        rig.end_ranks()
        for name in daemon.environment:
            del os.environ[name]


@pytest.fixture(scope="session", autouse=True)
def end_of_all(mps: None) -> Iterator[None]:
    """End the ranks before the daemon."""
    yield
    rig.end_ranks()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for note in _notes:
        terminalreporter.write_line(note)
