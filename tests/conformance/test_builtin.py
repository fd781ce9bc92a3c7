# SPDX-License-Identifier: Apache-2.0
"""The contract suite on the transports that the library brings."""

from __future__ import annotations

from cptransport.testing.contract import TransportContract


class TestLoopback(TransportContract):
    backend = "loopback"
    world_sizes = (1,)


class TestThreads(TransportContract):
    backend = "threads"


class TestGloo(TransportContract):
    backend = "gloo"
