# SPDX-License-Identifier: Apache-2.0
"""The Triton engine of KDA compiled for sm_90 without a GPU: that it compiles, and what it costs the host."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Shared memory of a program on sm_90.
SHARED = 227 * 1024
#: Python calls in our code for a forward and backward of one op call on recorded peers.
CALLS = 450
LAUNCHES = {
    "kda_prepare_kernel": 1,
    "kda_forward_pass_kernel": 1,
    "kda_correct_kernel": 1,
    "fold_kernel": 3,  # forward; a window and the end of the backward, whose scan has two rounds
    "kda_entering_grad_kernel": 1,
    "kda_remake_kernel": 1,
    "kda_backward_pass_kernel": 1,
    "kda_pair_backward_kernel": 1,
    "kda_chunk_backward_kernel": 1,
    "kda_finish_grads_kernel": 1,
}
#: Operators that launch nothing on a GPU; the op's others put addresses of two rounds side by side.
FREE = {"aten::empty.memory_format", "aten::empty_like", "aten::detach", "aten::view"}


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
