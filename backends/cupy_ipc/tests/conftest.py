# SPDX-License-Identifier: Apache-2.0
"""Ranks that find the stand-ins, and a folder for their device memory."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cptransport.testing import close_pools

HERE = Path(__file__).parent
STAND_INS = [str(HERE), str(HERE.parents[2] / "tests" / "standins")]


@pytest.fixture(scope="module")
def device_memory() -> Iterator[str]:
    """Where the ranks of a module keep what stands for device memory; the ranks end with it."""
    sys.path[:0] = STAND_INS
    folder = tempfile.mkdtemp(prefix="cuda-ipc-", dir="/dev/shm")
    yield folder
    close_pools()
    shutil.rmtree(folder)
    for path in STAND_INS:
        sys.path.remove(path)
