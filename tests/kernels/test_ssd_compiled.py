# SPDX-License-Identifier: Apache-2.0
"""The Triton engine of SSD compiled for sm_90 without a GPU: that it compiles, fits and is found again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Shared memory of a program on sm_90.
SHARED = 227 * 1024


def test_all_kernels_compile_and_fit(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    here = Path(__file__).parent
    environment = {
        **{name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"},
        "PYTHONPATH": os.pathsep.join([str(here), *(path for path in sys.path if path)]),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    run = subprocess.run(
        [sys.executable, str(here / "ssd_without_gpu.py")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    found = json.loads(run.stdout)
    assert found["launches"] == {
        "ssd_fold_kernel": 1,
        "ssd_summary_kernel": 2,
        "ssd_join_kernel": 2,
        "ssd_scores_kernel": 2,
        "ssd_output_kernel": 2,
        "ssd_chunk_states_kernel": 1,
        "ssd_pair_grads_kernel": 1,
        "ssd_write_grads_kernel": 1,
        "ssd_read_grads_kernel": 1,
        "ssd_sum_grads_kernel": 1,
    }
    assert set(found["kernels"]) == set(found["launches"])
    assert max(found["kernels"].values()) <= SHARED
    assert all(found["handles"])
