# SPDX-License-Identifier: Apache-2.0
"""The contract suite on ``cudnn_summary``: over gloo, and over a stand-in for NCCL; on a GPU see ``tests/gpu``.

Two ranks gather nothing densely, so three show everything.
"""

from __future__ import annotations

import pytest

from cptransport.testing.contract import TransportContract


class TestGloo(TransportContract):
    backend = "cudnn_summary"
    world_sizes = (1, 3)


@pytest.mark.usefixtures("stand_in_for_nccl")
class TestNccl(TransportContract):
    backend = "fake_dense_nccl:BACKEND"
    processes = False
    world_sizes = (3,)
