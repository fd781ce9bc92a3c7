# SPDX-License-Identifier: Apache-2.0
"""``chunk_kda`` on the Triton engine through the whole op: exchange, compositions, layouts, options.

Ranks are threads, so these run on the CPU only, in the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cptransport
from cptransport.ops import chunk_kda
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import run_threads
from cptransport_kernels.launch import count_launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads share no CUDA device")

INSIDE = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"composition": "gather"},
        {"composition": "handoff", "layout": "zigzag"},
        {"composition": "scan", "layout": "contiguous_per_sequence"},
        {"optional": ("initial_state",), "layout": "zigzag_per_sequence"},
        {"optional": ("initial_state",), "options": {"state_v_first": True}},
        {"optional": ("A_log", "dt_bias"), "options": INSIDE, "value_heads": 2},
        {"cu_seqlens": (0, 12), "batch": 2, "world_size": 2},
        {"cu_seqlens": (0, 9, 20), "padded_cu_seqlens": (0, 12, 27), "world_size": 2},
        # Rank 0 needs nothing of others, and a later round needs it all the same.
        {"composition": "scan", "overlap": True, "world_size": 4, "cu_seqlens": (0, 19)},
        {"strided": True, "explicit": True, "overlap": True, "optional": ("initial_state",)},
    ],
    ids=lambda c: "-".join(f"{k}" for k in c),
)
def test_op_matches_recurrence(changes: dict[str, Any]) -> None:
    spec = OpSpec("kda", (0, 4, 4, 13, 19), world_size=3, heads=1, value_heads=1, engine="triton")
    case = OpCase.of(spec.with_(**changes))
    runs = run_threads(case, 120.0)
    check(case, runs)
    assert all(run.record is not None and run.record.engine == "triton" for run in runs)


def test_a_compiled_program_runs_the_kernels() -> None:
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan([0, 9, 20], world_size=1), transport)
    generator = torch.Generator().manual_seed(0)

    def layer(q: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        o, _ = chunk_kda(q, q, q, -g.exp(), beta, cp_context=context, engine="triton")
        return o.sin().sum()

    shapes = ((1, 20, 1, 16), (1, 20, 1, 16), (1, 20, 1))
    found = []
    torch._dynamo.reset()
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        x = [torch.randn(s, generator=generator.manual_seed(1)).requires_grad_() for s in shapes]
        with count_launches() as launches:
            run(*x).backward()
        found.append((launches, [value.grad for value in x]))
    (eager, want), (compiled, got) = found
    assert compiled == eager
    assert all(map(torch.equal, got, want))


def test_double_backward_is_refused() -> None:
    """Also where the loss is linear in o, so that no gradient that comes in leads back."""
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan([0, 5], world_size=1), transport)
    q = torch.rand(1, 5, 1, 16, requires_grad=True)
    o, _ = chunk_kda(q, q, q, -q.exp(), q[..., 0], cp_context=context, engine="triton")
    (grad,) = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(cptransport.OpInputError, match="double backward"):
        grad.sum().backward()
