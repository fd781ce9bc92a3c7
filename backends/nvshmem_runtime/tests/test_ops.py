# SPDX-License-Identifier: Apache-2.0
"""Ops on both NVSHMEM backends over the stand-ins: right, with the bytes of the plan, and bit-equal to gloo."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from cptransport.testing import pool
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


def runs(backend: str, env: dict[str, str], calls: list[OpSpec]) -> list[list[RankRun]]:
    ranks = pool(backend, RANKS, 1, device="cpu", env=env)
    found = ranks.run(run_specs, timeout_s=120, specs=[call.to_json() for call in calls])
    return [[rank[number] for rank in found] for number in range(len(calls))]


@pytest.mark.parametrize(
    ("backend", "composition"),
    [("SIGNAL", ["gather", "handoff", "scan"]), ("BARRIER", ["gather", "scan"])],
)
def test_ops(heaps: str, backend: str, composition: list[str]) -> None:
    env = {"NVSHMEM_SYMMETRIC_SIZE": "64M", "FAKE_NVSHMEM_FOLDER": heaps}
    calls = specs(composition)
    mine = runs(f"fake_nvshmem:{backend}", env, calls)
    other = runs("gloo", {}, calls)
    for call, ranks, right in zip(calls, mine, other, strict=True):
        check(OpCase.of(call), ranks)
        for rank, (a, b) in enumerate(zip(ranks, right, strict=True)):
            assert a.record is not None
            assert a.record.transport == f"nvshmem_{backend.lower()}"
            different = [name for name in values(b) if not same(values(a)[name], values(b)[name])]
            assert not different, f"{call}, rank {rank}: {different}"


def values(run: RankRun) -> dict[str, Any]:
    return {"output": run.output, "final": run.final, **run.grads}


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or torch.equal(a, b)
