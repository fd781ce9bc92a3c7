# SPDX-License-Identifier: Apache-2.0
"""``mamba_chunk_scan_combined`` on the Triton engine through the whole op: exchange, compositions,
layouts, options.

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

GIVEN = ("D", "z", "dt_bias", "initial_states")
INSIDE = {"chunk_size": 16, "dt_softplus": True, "dt_limit": (0.1, 1.0)}


@pytest.mark.parametrize(
    "changes",
    [
        {"world_size": 1, "optional": GIVEN},
        {"composition": "gather", "optional": ("D",), "alternate": True},
        {"composition": "handoff", "layout": "zigzag"},
        {"composition": "scan", "layout": "contiguous_per_sequence", "overlap": True},
        {"optional": GIVEN, "options": INSIDE, "layout": "zigzag_per_sequence"},
        {"cu_seqlens": (0, 12), "batch": 2, "world_size": 2},
        {"cu_seqlens": (0, 9, 20), "padded_cu_seqlens": (0, 12, 27), "world_size": 2},
        {"strided": True, "explicit": True, "overlap": True, "optional": ("initial_states", "z")},
        {"dtype": "float16", "gate_dtype": "float32", "world_size": 2, "optional": ("D", "z")},
    ],
    ids=lambda c: "-".join(f"{k}" for k in c),
)
def test_op_matches_recurrence(changes: dict[str, Any]) -> None:
    spec = OpSpec(
        "ssd",
        (0, 4, 4, 13, 40),
        world_size=3,
        heads=1,
        value_heads=2,
        options={"chunk_size": 16, "dt_softplus": True},
        engine="triton",
    )
    case = OpCase.of(spec.with_(**changes))
    runs = run_threads(case, 120.0)
    check(case, runs)
    assert all(run.record is not None and run.record.engine == "triton" for run in runs)
