# SPDX-License-Identifier: Apache-2.0
"""The contract suite on both NVSHMEM backends over stand-ins for NVSHMEM and the kernels.

On a GPU see ``tests/gpu``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pytest

from cptransport.testing import close_pools
from cptransport.testing.contract import TransportContract


class OnTheHost(TransportContract):
    __test__ = False
    folder: ClassVar[str] = ""

    def make_options(self) -> dict[str, str]:
        return {"NVSHMEM_SYMMETRIC_SIZE": "512M", "FAKE_NVSHMEM_FOLDER": self.folder}


@pytest.fixture(autouse=True, scope="class")
def _ranks(heaps: str) -> Iterator[None]:
    OnTheHost.folder = heaps
    yield
    close_pools()


class TestSignal(OnTheHost):
    backend = "fake_nvshmem:SIGNAL"
    world_sizes = (3,)


@pytest.mark.slow
class TestSignalOtherSizes(OnTheHost):
    backend = "fake_nvshmem:SIGNAL"
    world_sizes = (1, 2, 4)


@pytest.mark.slow
class TestBarrier(OnTheHost):
    backend = "fake_nvshmem:BARRIER"
    world_sizes = (1, 2, 3, 4)
