# SPDX-License-Identifier: Apache-2.0
"""For authors of transports and engines: the conformance suite, a pool of ranks, numeric checks.

Needs ``pip install 'cptransport[testing]'`` for the suite itself; the rank pool and the checks need
only torch.
"""

from __future__ import annotations

from cptransport.testing.numerics import TOLERANCES, assert_close, relative_error
from cptransport.testing.pool import CaseError, RankPool, close_pools, pool, run_ranks
from cptransport.testing.ranks import Ranks
from cptransport.testing.recorded import RecordedTransport, Recording, RecordingTransport, record

__all__ = [
    "TOLERANCES",
    "CaseError",
    "RankPool",
    "Ranks",
    "RecordedTransport",
    "Recording",
    "RecordingTransport",
    "assert_close",
    "close_pools",
    "pool",
    "record",
    "relative_error",
    "run_ranks",
]
