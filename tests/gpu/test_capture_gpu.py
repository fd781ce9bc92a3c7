# SPDX-License-Identifier: Apache-2.0
"""A whole op, forward and backward, in a CUDA graph over real transports: replays compute with new inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import rig
import torch
from specs import SPECS, why_not
from torch import Tensor

from cptransport.context import CPContext
from cptransport.testing import Ranks
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_rank import call, settings

pytestmark = pytest.mark.gpu

NAMES = [
    "kda-triton-bf16",
    "kda-triton-scan",
    "kda-triton-handoff",
    "kda-cudnn-bound-contiguous",
    "ssd-triton-bf16",
]


class _Step:
    """Forward and backward of this rank on fixed leaves."""

    def __init__(self, ranks: Ranks, case: OpCase) -> None:
        self.transport = ranks.create()
        self.spec, self.case = case.spec, case
        self.context = CPContext(case.plan, self.transport)
        inputs = {n: case.plan.shard(x, ranks.rank) for n, x in case.tokens.items()}
        inputs.update(case.parameters)
        self.leaves = {n: x.to(ranks.device).requires_grad_() for n, x in inputs.items()}
        self.grad = case.plan.shard(case.grad_output, ranks.rank).to(ranks.device)

    def __call__(self) -> list[Tensor]:
        with settings(self.spec):
            output, _ = call(self.spec, self.context, self.leaves)
            grads = torch.autograd.grad(
                output, list(self.leaves.values()), self.grad, allow_unused=True
            )
        return [output, *(grad for grad in grads if grad is not None)]

    def change(self, factor: float) -> None:
        """Give the stream's first input other values, in place."""
        first = next(iter(self.leaves.values()))
        with torch.no_grad():
            first.mul_(factor)

    def capture(self) -> tuple[Any, list[Tensor]]:
        """Return the graph of a step and what its replays write."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = self()
        return graph, results


def _captured(ranks: Ranks, spec: Mapping[str, Any], replays: int) -> int:
    """Return how many tensors of how many replays were compared with eager runs, bit for bit."""
    step = _Step(ranks, OpCase.of(OpSpec(**spec)))
    for _ in range(3):
        step()
    compared = 0
    graph, results = step.capture() if ranks.device.type == "cuda" else (None, [])
    for replay in range(replays):
        step.change(-1.25)
        ranks.sync()
        if graph is not None:
            graph.replay()
            found = [x.clone() for x in results]
        else:
            found = [x.clone() for x in step()]
        eager = step()
        for number, (one, other) in enumerate(zip(found, eager, strict=True)):
            assert torch.equal(one, other), f"replay {replay}, tensor {number}"
            assert one.isfinite().all()
            compared += 1
    step.transport.check()
    return compared


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", rig.RANKS)
@pytest.mark.parametrize("backend", rig.BACKENDS)
def test_replays_equal_eager_runs(backend: str, ranks: int, name: str) -> None:
    """Eager calls and replays alternate; inputs change between them."""
    spec = SPECS[name]
    if rig.REHEARSAL:
        spec = spec.with_(engine="torch", key_dim=8, value_dim=8)
    elif (reason := why_not(name)) is not None:
        pytest.skip(reason)
    claimed = rig.capabilities(backend, ranks)
    if not claimed.cuda_graph and not rig.REHEARSAL:
        pytest.skip("the transport lacks the capability cuda_graph")
    if spec.composition == "handoff" and not claimed.pairwise:
        pytest.skip("the transport lacks the capability pairwise")
    serving = rig.serving(backend, ranks)
    given = spec.with_(world_size=ranks).to_json()
    found = serving.run(
        _captured, transport=False, timeout_s=2 * rig.WATCHDOG_S, spec=given, replays=3
    )
    assert min(found) >= 3 * 5
