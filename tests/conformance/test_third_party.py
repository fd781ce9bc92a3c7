# SPDX-License-Identifier: Apache-2.0
"""The example of a third party's transport: installed from a copy, found by name, passing the suite."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "third_party_transport"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Install the example from a copy of its folder; returns what runs Python with it."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("needs /dev/shm")
    folder = tmp_path_factory.mktemp("third_party")
    shutil.copytree(EXAMPLE, folder / "source")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-build-isolation"]
    command += ["--no-deps", "--target", str(folder / "site"), str(folder / "source")]
    installed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert installed.returncode == 0, installed.stderr
    (folder / "elsewhere").mkdir()
    path = os.pathsep.join([str(folder / "site"), *(entry for entry in sys.path if entry)])

    def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=folder / "elsewhere",
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=590,
        )

    return run_python


def test_it_is_small_and_knows_only_the_public_helpers() -> None:
    sources = list((EXAMPLE / "cptransport_posix_shm").glob("*.py"))
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    assert len([line for line in code.splitlines() if line.strip()]) <= 250
    used = {
        line.split()[1]
        for line in code.splitlines()
        if line.startswith("from cptransport") and "posix_shm" not in line
    }
    assert used == {"cptransport.backend", "cptransport.errors", "cptransport.transport"}


def test_it_is_found_by_its_entry_point(run: Run) -> None:
    program = (
        "from importlib.metadata import entry_points\n"
        "(point,) = [p for p in entry_points(group='cptransport.backends')\n"
        "            if p.name == 'posix_shm']\n"
        "assert point.dist.name == 'cptransport-posix-shm', point.dist\n"
        "assert point.load().name == 'posix_shm'\n"
        "import sys; assert 'cptransport_posix_shm.transport' not in sys.modules\n"
    )
    found = run("-c", program)
    assert found.returncode == 0, found.stderr


@pytest.mark.timeout(600)
def test_it_passes_the_suite(run: Run, tmp_path: Path) -> None:
    before = set(Path("/dev/shm").glob("cpt-*"))
    report = tmp_path / "conformance.json"
    command = ["-m", "pytest", "-p", "cptransport.testing.plugin", "-q", "-m", "not slow"]
    command += ["--pyargs", "cptransport.testing.suite", "--cpt-backend=posix_shm"]
    command += ["--cpt-world-size=1,2,3,4", f"--cpt-report={report}", "-p", "no:cacheprovider"]
    ran = run(*command)
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr[-2000:]
    document = json.loads(report.read_text(encoding="utf-8"))
    assert document["distribution"] == "cptransport-posix-shm 0.1.0"
    assert document["world_sizes"] == [1, 2, 3, 4]
    assert document["counts"]["passed"] > 150
    assert not document["failures"]
    # CUDA, threads and too few ranks; no capability that it claims was left untested.
    assert not [reason for reason in document["skipped"] if "threads" in reason]
    left = set(Path("/dev/shm").glob("cpt-*")) - before
    deadline = time.monotonic() + 60
    while left and time.monotonic() < deadline:  # those of another run on this machine go away
        time.sleep(1)
        left &= set(Path("/dev/shm").glob("cpt-*"))
    assert not left


def test_the_walkthrough_shows_the_code_of_the_example() -> None:
    page = (EXAMPLE.parents[1] / "docs" / "write-a-backend.md").read_text(encoding="utf-8")
    files = [*EXAMPLE.rglob("*.py"), EXAMPLE / "pyproject.toml"]
    known = {line.strip() for path in files for line in path.read_text("utf-8").splitlines()}
    blocks = re.findall(r"^```(?:python no-run|toml)\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    shown = [line.strip() for block in blocks for line in block.splitlines() if line.strip()]
    assert len(shown) > 100
    own = (
        "# pytest",
        "[test_",
        "reason =",
        "issue =",
    )  # the file of known failures is the reader's
    assert [line for line in shown if line not in known and not line.startswith(own)] == []
