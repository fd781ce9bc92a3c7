# SPDX-License-Identifier: Apache-2.0
"""``import cptransport`` loads torch and nothing heavier."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("triton", "cupy", "nvshmem", "cudnn", "matplotlib", "pytest")


@pytest.mark.parametrize("package", ["cptransport", "cptransport.ops", "cptransport_kernels"])
def test_import_loads_nothing_heavier_than_torch(package: str) -> None:
    # torch itself may load some of these: only what we add counts.
    program = (
        "import sys, torch; before = set(sys.modules)\n"
        f"import {package}\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], check=True, timeout=120, capture_output=True, text=True
    )
    added = set(result.stdout.split())
    assert package.split(".")[0] in added
    assert not added.intersection(HEAVY)


def test_import_of_the_core_loads_torch() -> None:
    program = "import sys, cptransport; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
