# SPDX-License-Identifier: Apache-2.0
"""Ranks that find the stand-ins, and a folder for their heaps."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cptransport.testing import close_pools


@pytest.fixture(scope="module")
def heaps() -> Iterator[str]:
    """Where the ranks of a module keep their heaps; the ranks end with it."""
    sys.path.insert(0, str(Path(__file__).parent))
    folder = tempfile.mkdtemp(prefix="nvshmem-", dir="/dev/shm")
    yield folder
    close_pools()
    shutil.rmtree(folder)
    sys.path.remove(str(Path(__file__).parent))
