# SPDX-License-Identifier: Apache-2.0
"""The Triton engine of KDA compiled for sm_90 without a GPU: that it compiles, and what it costs the host."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

#: Shared memory of a program on sm_90.
SHARED = 227 * 1024
#: Python calls in our code for a forward and backward of one op call on recorded peers.
CALLS = 450
LAUNCHES = {
    "kda_prepare_kernel": 1,
    "kda_forward_pass_kernel": 1,
    "kda_correct_kernel": 1,
    "fold_kernel": 2,  # forward; the end of the backward, whose scan has two rounds
    "ssd_fold_kernel": 1,  # a window of the backward: one state
    "kda_entering_grad_kernel": 1,
    "kda_remake_kernel": 1,
    "kda_backward_pass_kernel": 1,
    "kda_pair_backward_kernel": 1,
    "kda_chunk_backward_kernel": 1,
    "kda_finish_grads_kernel": 1,
}
#: Operators that launch nothing on a GPU; the op's others put addresses of two rounds side by side.
FREE = {"aten::empty.memory_format", "aten::empty_like", "aten::detach", "aten::view"}


#: Of the script's call.
TOKENS, HEADS, DIM, CHUNK = 1024, 2, 128, 64
STATE = 4 * DIM * DIM
#: Bytes per token and head that FLA 0.6.0 holds for bfloat16 inputs and a gate computed outside: what
#: its forward keeps beside the inputs, and what is alive when its backward has called
#: ``chunk_kda_bwd_intra`` (``fla/ops/kda``).
FLA_KEPT = {"g_cumsum": 4 * DIM, "Aqk": 2 * CHUNK, "Akk": 2 * CHUNK}
FLA_ALIVE = {
    **FLA_KEPT,
    **dict.fromkeys(("w", "u", "qg", "kg", "v_new", "dv"), 2 * DIM),
    **dict.fromkeys(("h", "dh"), 2 * DIM * DIM // CHUNK),
    **dict.fromkeys(("dq", "dk", "dg", "dq2", "dk2", "dg2"), 4 * DIM),
    **dict.fromkeys(("dAqk", "dAkk"), 4 * CHUNK),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the script found, on an empty cache."""
    paths = [path for path in sys.path if path]
    environment = {
        **{name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join(paths),
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
    }
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("without_gpu.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout)  # type: ignore[no-any-return]


def test_all_kernels_compile_and_fit(found: dict[str, Any]) -> None:
    kernels = found["kernels"]
    assert set(kernels) == set(LAUNCHES)
    assert max(kernels.values()) <= SHARED


def test_an_interior_rank_launches_fourteen_kernels(found: dict[str, Any]) -> None:
    launches, operators = found["launches"], found["operators"]
    assert {name: launches.count(name) for name in launches} == LAUNCHES
    assert {name: n for name, n in operators.items() if name not in FREE} == {"aten::cat": 2}
    assert len(launches) + operators["aten::cat"] == 14


def test_host_work_of_a_call_stays_small(found: dict[str, Any]) -> None:
    assert found["calls"] <= CALLS
    assert sum(found["operators"].values()) <= 50


def test_handles_are_those_that_triton_would_choose(found: dict[str, Any]) -> None:
    """For aligned inputs and for others."""
    assert len(found["handles"]) == 2 * sum(LAUNCHES.values())
    assert all(found["handles"])


def test_a_backward_is_kept_less_than_by_fla(found: dict[str, Any]) -> None:
    """R, the products of pairs and the inverse per token; the entering state and M per segment."""
    sizes = [
        (shape, math.prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize)
        for shape, dtype in found["saved"]
    ]
    tokens = sum(size for shape, size in sizes if TOKENS in shape)
    assert tokens == TOKENS * HEADS * 2 * (DIM + 2 * CHUNK)
    assert sum(size for _, size in sizes) - tokens == 2 * HEADS * STATE
    assert tokens < TOKENS * HEADS * sum(FLA_KEPT.values())


def test_peak_memory_is_below_that_of_fla(found: dict[str, Any]) -> None:
    """Ours with the outputs and all states; FLA's by its list, with the output alone."""
    assert found["peak"] <= TOKENS * HEADS * (sum(FLA_ALIVE.values()) + 2 * DIM)


def test_narrow_heads_stay_off_the_instructions_that_triton_gets_wrong(
    found: dict[str, Any],
) -> None:
    """Which it does for products of 16 or 32 columns on sm_90: see ``configs.head_dims``."""
    assert found["narrow"] == []
