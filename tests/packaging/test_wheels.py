# SPDX-License-Identifier: Apache-2.0
"""Wheels and editable installs, offline, from a copy of the tree, used from another folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
INSTALLED = ["backends/nccl", "backends/cupy_ipc"]
CLUTTER = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
OFFLINE = ["--no-index", "--no-deps", "--no-build-isolation"]

REPORT = """
import json, sys
from importlib.metadata import entry_points
import cptransport, cptransport_kernels
points = [
    point for point in entry_points(group="cptransport.backends")
    if str(point.dist.locate_file("")).startswith(sys.prefix)
]
print(json.dumps({
    "core": cptransport.__file__,
    "kernels": cptransport_kernels.__file__,
    "backends": {point.name: [point.dist.version, point.load().name] for point in points},
}))
"""


def run(*command: str | Path, cwd: Path) -> str:
    # What the caller's environment puts on the path must not stand in for an installation.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, f"{command}:\n{result.stdout}\n{result.stderr}"
    return result.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("tree") / "cptransport"
    return Path(shutil.copytree(ROOT, copy, ignore=CLUTTER))


@pytest.fixture(scope="module")
def wheels(tree: Path) -> dict[str, Path]:
    folder = tree.parent / "wheels"
    targets = [tree, *(tree / each for each in INSTALLED)]
    run(sys.executable, "-m", "pip", "wheel", *OFFLINE, "-w", folder, *targets, cwd=tree.parent)
    return {path.name.split("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Make a fresh environment that falls back on this one's libraries; return its Python."""
    venv.create(tmp_path / "env", with_pip=False)
    executable = tmp_path / "env" / "bin" / "python"
    purelib = run(
        executable, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
    )
    # A path, not a site folder: editable installs of this environment stay out.
    Path(purelib.strip(), "behind.pth").write_text(sysconfig.get_path("purelib"))
    return executable


def install(python: Path, *targets: str | Path, cwd: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", *OFFLINE, *targets, cwd=cwd)


def report(python: Path, cwd: Path) -> dict[str, Any]:
    return dict(json.loads(run(python, "-W", "error", "-c", REPORT, cwd=cwd)))


EXPECTED = {"cupy_ipc": ["0.1.0", "cupy_ipc"], "nccl": ["0.1.0", "nccl"]}


def test_wheel_holds_the_whole_package_and_nothing_else(
    tree: Path, wheels: dict[str, Path]
) -> None:
    with zipfile.ZipFile(wheels["cptransport"]) as archive:
        names = set(archive.namelist())
    held = {name for name in names if ".dist-info/" not in name}
    for package, where in (("cptransport", tree), ("cptransport_kernels", tree / "kernels")):
        files = {path for path in (where / package).rglob("*") if path.is_file()}
        assert files
        expected = {path.relative_to(where).as_posix() for path in files}
        assert {name for name in held if name.split("/")[0] == package} == expected
    packages = {"cptransport", "cptransport_kernels", "cptransport_pytest"}
    assert {name.split("/")[0] for name in held} == packages
    assert "cptransport/testing/__init__.py" in held
    assert [name for name in names if name.endswith("LICENSE")]


@pytest.mark.parametrize("backend", ["nccl", "cupy_ipc"])
def test_wheel_of_a_backend_is_complete(backend: str, wheels: dict[str, Path]) -> None:
    with zipfile.ZipFile(wheels[f"cptransport_{backend}"]) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
        licence = next(name for name in names if name.endswith("LICENSE"))
        assert "Apache License" in archive.read(licence).decode()
    assert "Requires-Dist: cptransport<0.2,>=0.1.0" in text
    assert "License: Apache-2.0" in text
    assert f"cptransport_{backend}/py.typed" in names


def test_installed_wheels_are_found_by_entry_point(
    python: Path, wheels: dict[str, Path], tmp_path: Path
) -> None:
    install(python, *wheels.values(), cwd=tmp_path)
    found = report(python, tmp_path)
    assert found["backends"] == EXPECTED
    assert found["core"].startswith(str(tmp_path / "env"))
    assert found["kernels"].startswith(str(tmp_path / "env"))
    command = python.with_name("cptransport")
    assert "demo" in run(command, "--help", cwd=tmp_path)


def test_editable_installs_are_found_by_entry_point(
    python: Path, tree: Path, tmp_path: Path
) -> None:
    targets = [word for each in [".", *INSTALLED] for word in ("-e", str(tree / each))]
    install(python, *targets, cwd=tmp_path)
    found = report(python, tmp_path)
    assert found["backends"] == EXPECTED
    assert found["core"] == str(tree / "cptransport" / "__init__.py")
    assert found["kernels"] == str(tree / "kernels" / "cptransport_kernels" / "__init__.py")
