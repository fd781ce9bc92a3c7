# SPDX-License-Identifier: Apache-2.0
"""The contract suite and ops on the ``nccl`` transport over a stand-in for NCCL; on a GPU see ``tests/gpu``."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cptransport.testing import RankPool
from cptransport.testing.contract import TransportContract
from cptransport.testing.op_cases import OPS, OpCase
from cptransport.testing.op_oracle import check
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import run_specs

BACKEND = "fake_nccl:BACKEND"


@pytest.fixture(autouse=True, scope="module")
def _stand_in() -> Iterator[None]:
    sys.path.insert(0, str(Path(__file__).parent))
    yield
    sys.path.remove(str(Path(__file__).parent))


class TestContract(TransportContract):
    backend = BACKEND
    processes = False


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("op", OPS)
def test_ops(op: str, world_size: int) -> None:
    """Random calls in all compositions, against the recurrence, with the bytes that the plan says."""
    with RankPool(BACKEND, world_size, processes=False) as pool:
        for seed in range(8):
            rng = random.Random(f"{op}/{seed}")
            spec = random_spec(rng, op, world_size=world_size, dtype="float64")
            # One at a time: ranks that are threads share the variables that a call is made under.
            runs = pool.run(run_specs, specs=[spec.to_json()])
            check(OpCase.of(spec), [rank[0] for rank in runs])
