# SPDX-License-Identifier: Apache-2.0
"""Ops on both NVSHMEM backends over the stand-ins: right, with the bytes of the plan, and bit-equal to gloo."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from cptransport.testing import RankPool
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import RankRun, run_specs

RANKS = 3


def specs(composition: list[str]) -> list[OpSpec]:
    """Packed, zigzag and uneven calls, every other one with the exchange beside local work."""
    drawn = []
    for number in range(8):
        rng = random.Random(f"nvshmem/{number}")
        op = ("kda", "ssd", "conv1d", "mixer")[number % 4]
        spec = random_spec(rng, op, world_size=RANKS, dtype="float32")
        how = composition[number % len(composition)]
        drawn.append(replace(spec, composition=how, overlap=number % 2 == 1))
    return drawn


@pytest.fixture(scope="module")
def ranks(heaps: str) -> Iterator[RankPool]:
    """Ranks whose cases run on the backend that the pool is given last."""
    env = {"NVSHMEM_SYMMETRIC_SIZE": "64M", "FAKE_NVSHMEM_FOLDER": heaps}
    with RankPool("gloo", RANKS, 1, device="cpu", env=env) as pool:
        yield pool


def runs(ranks: RankPool, backend: str, calls: list[OpSpec]) -> list[list[RankRun]]:
    ranks.backend = backend
    found = ranks.run(run_specs, timeout_s=120, specs=[call.to_json() for call in calls])
    return [[rank[number] for rank in found] for number in range(len(calls))]


@pytest.mark.parametrize(
    ("backend", "composition"),
    [("SIGNAL", ["gather", "handoff", "scan"]), ("BARRIER", ["gather", "scan"])],
)
def test_ops(ranks: RankPool, backend: str, composition: list[str]) -> None:
    calls = specs(composition)
    mine = runs(ranks, f"fake_nvshmem:{backend}", calls)
    other = runs(ranks, "gloo", calls)
    for call, here, there in zip(calls, mine, other, strict=True):
        check(OpCase.of(call), here)
        for rank, (a, b) in enumerate(zip(here, there, strict=True)):
            assert a.record is not None
            assert a.record.transport == f"nvshmem_{backend.lower()}"
            different = [name for name in values(b) if not same(values(a)[name], values(b)[name])]
            assert not different, f"{call}, rank {rank}: {different}"


def values(run: RankRun) -> dict[str, Any]:
    return {"output": run.output, "final": run.final, **run.grads}


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or torch.equal(a, b)
