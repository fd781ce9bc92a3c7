# SPDX-License-Identifier: Apache-2.0
"""``import cptransport`` loads torch and nothing heavier."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = {"triton", "cupy", "nvshmem", "cudnn", "matplotlib", "numpy", "pytest"}


def loaded(package: str, *, before: str) -> set[str]:
    """Return the top-level modules that importing a package adds to a new interpreter."""
    program = (
        f"import sys, {before}; before = set(sys.modules)\n"
        f"import {package}\n"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before})"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], timeout=120, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.parametrize("package", ["cptransport", "cptransport.ops", "cptransport_kernels"])
def test_import_loads_nothing_heavier_than_torch(package: str) -> None:
    # A build of torch may load some of these itself: only what we add counts.
    added = loaded(package, before="torch")
    assert package.split(".")[0] in added
    assert not added & HEAVY


def test_importing_the_core_loads_torch_and_the_kernels_do_not() -> None:
    assert "torch" in loaded("cptransport", before="sys")
    assert "torch" not in loaded("cptransport_kernels", before="sys")
