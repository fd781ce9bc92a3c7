# SPDX-License-Identifier: Apache-2.0
"""The Triton engine of KDA on a GPU: what the interpreter cannot show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kda_chain import Case, errors, reference, rounded, sharded

from cptransport.engines import (
    Grads,
    KDAInputs,
    KDAOptions,
    LocalSegment,
    Need,
    OutputGrads,
)
from cptransport.engines.triton import KDA_ENGINE

pytestmark = pytest.mark.gpu

#: Relative root mean squares against float64, from docs/performance: outputs, gradients, and the rest.
LIMITS = {"o": 5e-3, "final_state": 5e-3, "dg": 2e-2, "dbeta": 2e-2, "dA_log": 2e-2}
ALL = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
}


def check(case: Case, x: dict[str, torch.Tensor] | None = None, factor: float = 1.0) -> None:
    x = rounded(case, case.inputs()) if x is None else x
    found = errors(sharded(KDA_ENGINE, case, x), reference(case, x), rms=True)
    # "not <" also when NaN.
    bad = {n: e for n, e in found.items() if not e < factor * LIMITS.get(n, 1e-2)}
    assert not bad, bad


@pytest.mark.parametrize(
    "sizes",
    [
        {"K": 128, "V": 128, "H": 2, "HV": 2},
        {"K": 64, "V": 64, "B": 2},
        {"K": 64, "V": 128},
        {"K": 128, "V": 64, "HV": 3},
        {"K": 256, "V": 256},
        {"K": 16, "V": 32},
        {"K": 32, "V": 256},
        {"K": 100, "V": 24, "options": ALL, "HV": 2},
        {"K": 128, "V": 128, "options": ALL, "HV": 2},
    ],
)
def test_bfloat16(sizes: dict[str, Any]) -> None:
    packed = [0, 300] if sizes.get("B") else [0, 130, 131, 131, 300]
    check(Case(packed, [90, 200], dtype=torch.bfloat16, device="cuda", **sizes))


@pytest.mark.parametrize("gate", [-0.01, -1.0, -5.0])
def test_gate_gradient_at_constant_gates(gate: float) -> None:
    case = Case([0, 300], [130], K=128, V=128, H=2, HV=2, dtype=torch.bfloat16, device="cuda")
    x = rounded(case, case.inputs())
    x["g"].fill_(gate)
    found = errors(sharded(KDA_ENGINE, case, x), reference(case, x))
    assert found["dg"] < 2 * torch.finfo(torch.bfloat16).eps, found


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (256, 64), (16, 32), (32, 256), (64, 16)])
def test_other_dtypes(dtype: torch.dtype, K: int, V: int) -> None:
    case = Case([0, 200], [130], K=K, V=V, HV=2, dtype=dtype, device="cuda")
    check(case, factor=0.5 if dtype == torch.float16 else 1e-3)


def interior(tokens: int, heads: int) -> Callable[[], tuple[torch.Tensor, Grads]]:
    """Return an interior rank's forward and backward, ready to run."""
    case = Case([0, tokens], H=heads, HV=heads, K=128, V=128, dtype=torch.bfloat16, device="cuda")
    x = rounded(case, case.inputs())
    table = torch.randn(1, heads, 128, 128, device="cuda")
    out = {"state": torch.empty_like(table), "transition": torch.empty_like(table)}
    inputs = KDAInputs(
        *(x[name] for name in ("q", "k", "v", "g", "beta")), None, None, None, KDAOptions(scale=0.1)
    )
    segments, need = [LocalSegment(0, tokens, 0, False, False)], [Need(True, True)]

    def step() -> tuple[torch.Tensor, Grads]:
        local = KDA_ENGINE.forward_local(inputs, segments, need, out)
        finished = KDA_ENGINE.forward_finish(local, lambda: table)
        grad = OutputGrads(x["do"], None)
        local_grad = KDA_ENGINE.backward_local(finished.saved, grad, need, out)
        return finished.output, KDA_ENGINE.backward_finish(local_grad, lambda: table)

    return step


def test_neither_waits_for_the_device_nor_breaks_capture() -> None:
    step = interior(500, 2)
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        o, grads = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, captured_grads = step()
    captured.zero_()
    graph.replay()
    assert torch.equal(captured, o)
    for name, grad in grads.inputs.items():
        assert grad is None or torch.equal(captured_grads.inputs[name], grad)


def test_offsets_beyond_32_bits() -> None:
    # Row 31 of the reports: the last token lies 2^31 elements after the first.
    heads, dim = 2, 64
    storage = torch.empty(2**31 + heads * dim, dtype=torch.bfloat16, device="cuda")
    far = storage.as_strided((1, 3, heads, dim), (2**31 + 1, 2**30, dim, 1))
    near = torch.randn(1, 3, heads, dim, device="cuda").bfloat16()
    far.copy_(near)
    beta = torch.rand(1, 3, heads, device="cuda")
    results = []
    for x in (near, far):
        inputs = KDAInputs(x, x, x, -x.float().abs(), beta, None, None, None, KDAOptions(0.1))
        segments = [LocalSegment(0, 3, 0, True, True)]
        local = KDA_ENGINE.forward_local(inputs, segments, [Need(False, False)], {})
        results.append(KDA_ENGINE.forward_finish(local, lambda: torch.empty(0)).output)
    assert torch.equal(*results)
