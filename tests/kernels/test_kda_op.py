# SPDX-License-Identifier: Apache-2.0
"""``chunk_kda`` on the Triton engine through the whole op: exchange, compositions, layouts, options.

Ranks are threads, so these run on the CPU only, in the interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import run_threads

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
