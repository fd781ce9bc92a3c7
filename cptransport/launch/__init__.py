# SPDX-License-Identifier: Apache-2.0
"""Starting ranks on this machine, several of them on one GPU if need be.

Picture, ``cptransport launch --nproc 2 --share-gpu SCRIPT``::

    launch ──┬── guard.py ── nvidia-cuda-mps-control       ends the daemon when launch ends, however
             ├── rank.py, becomes SCRIPT (rank 0) ─┐
             └── rank.py, becomes SCRIPT (rank 1) ─┴── the GPU, through the daemon

``guard.py`` and ``rank.py`` are run by path and import nothing but the standard library.
"""

from __future__ import annotations

from cptransport.launch.elastic import RanksFailedError, run_ranks
from cptransport.launch.mps import MpsDaemon, MpsUnavailableError
from cptransport.launch.sharing import (
    MARKER,
    banner,
    daemon_environment,
    ranks_per_device,
    sharing_environment,
)

__all__ = [
    "MARKER",
    "MpsDaemon",
    "MpsUnavailableError",
    "RanksFailedError",
    "banner",
    "daemon_environment",
    "ranks_per_device",
    "run_ranks",
    "sharing_environment",
]
