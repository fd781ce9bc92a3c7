# SPDX-License-Identifier: Apache-2.0
"""The convolution's kernels compiled for sm_90 without a GPU: that they compile, and what a call launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

#: Operators that only allocate or view.
FREE = {
    "aten::detach",
    "aten::empty.memory_format",
    "aten::empty_like",
    "aten::new_empty",
    "aten::transpose.int",
    "aten::view",
}


def test_an_interior_rank_launches_five_kernels(tmp_path: Path) -> None:
    environment = {
        **{name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("conv1d_without_gpu.py"))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if run.returncode:
        pytest.fail(run.stderr[-4000:])
    found = json.loads(run.stdout)
    assert Counter(found["launches"]) == {
        "conv_rows_kernel": 2,
        "conv_fwd_kernel": 1,
        "conv_bwd_kernel": 1,
        "conv_reduce_kernel": 1,
    }
    assert len(found["handles"]) == 5
    assert all(found["handles"])
    assert set(found["kernels"]) == {*found["launches"], "conv_bwd_wide_kernel"}
    assert max(found["kernels"].values()) < 227 * 1024
    # Nothing else launches on a GPU; three of these make, save and find what refuses a double backward.
    assert set(found["operators"]) <= FREE
    assert sum(found["operators"].values()) <= 15
