# SPDX-License-Identifier: Apache-2.0
"""The contract suite on both NVSHMEM backends over stand-ins for NVSHMEM and the kernels.

On a GPU see ``tests/gpu``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from cptransport.testing import close_pools
from cptransport.testing.contract import TransportContract


@pytest.fixture(autouse=True, scope="module")
def _stand_ins() -> Iterator[None]:
    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))


class OnTheHost(TransportContract):
    __test__ = False
    folder: ClassVar[str] = ""

    def make_options(self) -> dict[str, str]:
        return {"NVSHMEM_SYMMETRIC_SIZE": "256M", "FAKE_NVSHMEM_FOLDER": self.folder}


@pytest.fixture(autouse=True, scope="class")
def _ranks(_stand_ins: None) -> Iterator[None]:
    """The class's heaps, and an end of its ranks."""
    OnTheHost.folder = tempfile.mkdtemp(prefix="nvshmem-", dir="/dev/shm")
    yield
    close_pools()
    shutil.rmtree(OnTheHost.folder)


class TestSignal(OnTheHost):
    backend = "fake_nvshmem:SIGNAL"
    world_sizes = (3,)


class TestBarrier(OnTheHost):
    backend = "fake_nvshmem:BARRIER"
    world_sizes = (2,)
