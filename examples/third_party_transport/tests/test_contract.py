# SPDX-License-Identifier: Apache-2.0
"""The whole proof that ``posix_shm`` is a transport."""

from __future__ import annotations

from cptransport.testing.contract import TransportContract


class TestContract(TransportContract):
    backend = "posix_shm"
    world_sizes = (1, 2, 4)
