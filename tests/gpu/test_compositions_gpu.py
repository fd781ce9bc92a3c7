# SPDX-License-Identifier: Apache-2.0
"""Gather, handoff and scan side by side on every transport: bits, bytes and times, in one document."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import rig
import torch
from specs import OPTIONS
from torch import Tensor

from cptransport.composition import COMPOSITIONS
from cptransport.context import CPContext
from cptransport.testing import Ranks
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_rank import call, settings

pytestmark = pytest.mark.gpu

RANKS = 4
SIZES = (
    {"cu_seqlens": [0, 192], "heads": 2, "value_heads": 2, "engine": "torch"}
    if rig.REHEARSAL
    else {"cu_seqlens": [0, 4096], "heads": 8, "value_heads": 8, "engine": "triton"}
    | {"key_dim": 128, "value_dim": 128, "dtype": "bfloat16", "gate_dtype": "float32"}
)
#: Both: a segment per rank, and two.
LAYOUTS = ("contiguous", "zigzag")
ITERATIONS = 3 if rig.REHEARSAL else 20


def _measure(
    ranks: Ranks, specs: Sequence[Mapping[str, Any]], iterations: int
) -> list[dict[str, Any]]:
    """Return per call: output and gradients on the CPU, bytes received, seconds of every iteration."""
    transport = ranks.create()
    return [_one(ranks, transport, OpCase.of(OpSpec(**spec)), iterations) for spec in specs]


def _one(ranks: Ranks, transport: Any, case: OpCase, iterations: int) -> dict[str, Any]:
    spec, plan = case.spec, case.plan
    if spec.composition == "handoff" and not transport.capabilities.pairwise:
        return {"skipped": "the transport lacks the capability pairwise"}
    context = CPContext(plan, transport)
    local = {n: plan.shard(x, ranks.rank).to(ranks.device) for n, x in case.tokens.items()}
    leaves = {n: x.requires_grad_() for n, x in local.items()}
    grad = plan.shard(case.grad_output, ranks.rank).to(ranks.device)

    def step() -> list[Tensor]:
        with settings(spec):
            output, _ = call(spec, context, leaves)
            return [output, *torch.autograd.grad(output, list(leaves.values()), grad)]

    def synchronize() -> None:
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()

    before = transport.stats().bytes_received
    results = [x.detach().cpu() for x in step()]
    received = transport.stats().bytes_received - before
    seconds = []
    for iteration in range(iterations + 3):
        transport.barrier()
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        if iteration >= 3:
            seconds.append(time.perf_counter() - start)
    return {"results": results, "bytes": received, "seconds": seconds}


def _run(backend: str, playing: str, iterations: int) -> list[list[dict[str, Any]]]:
    """Return by rank what every layout and composition gave."""
    specs = [
        OpSpec(
            "kda",
            world_size=RANKS,
            layout=layout,
            composition=composition,
            options={"use_qk_l2norm_in_kernel": OPTIONS["kda"]["use_qk_l2norm_in_kernel"]},
            loss=("output",),
            **SIZES,
        ).to_json()
        for layout in LAYOUTS
        for composition in COMPOSITIONS
    ]
    serving = rig.serving(backend, RANKS, playing=playing)
    return serving.run(_measure, transport=False, timeout_s=150, specs=specs, iterations=iterations)


def test_compositions_side_by_side() -> None:
    """A transport changes no bit of any composition; the document has the times and bytes of all."""
    rows: list[dict[str, Any]] = []
    right: list[list[dict[str, Any]]] = []
    failures = []
    for backend in rig.BACKENDS:
        right = right or _run(backend, "gloo", 1)
        found = _run(backend, backend, ITERATIONS)
        cases = [(layout, how) for layout in LAYOUTS for how in COMPOSITIONS]
        for index, (layout, how) in enumerate(cases):
            row: dict[str, Any] = {"backend": backend, "layout": layout, "composition": how}
            own = [rank[index] for rank in found]
            if "skipped" in own[0]:
                rows.append({**row, "skipped": own[0]["skipped"]})
                continue
            differences = [
                max(
                    (a.double() - b.double()).abs().max().item()
                    for a, b in zip(mine["results"], others[index]["results"], strict=True)
                )
                for mine, others in zip(own, right, strict=True)
            ]
            slowest = [max(turn) for turn in zip(*(x["seconds"] for x in own), strict=True)]
            rows.append(
                {
                    **row,
                    "difference_to_gloo": max(differences),
                    "bytes_received": [x["bytes"] for x in own],
                    "median_us": statistics.median(slowest) * 1e6,
                    "samples_us": [seconds * 1e6 for seconds in slowest],
                }
            )
            if max(differences) != 0.0:
                failures.append(rows[-1])
    rig.report("compositions", RANKS, world_size=RANKS, sizes=SIZES, rows=rows)
    assert not failures
    assert len(rows) == len(rig.BACKENDS) * len(LAYOUTS) * len(COMPOSITIONS)
