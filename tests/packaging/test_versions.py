# SPDX-License-Identifier: Apache-2.0
"""All distributions of the repository move together and describe themselves alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest

ROOT = Path(__file__).parents[2]


def load(folder: Path) -> dict[str, Any]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


CORE = load(ROOT)
MEMBERS = {folder.name: load(folder) for folder in sorted(ROOT.glob("backends/*"))}
BACKENDS = ["cudnn_summary", "cupy_ipc", "nccl", "nvshmem_barrier", "nvshmem_signal"]

each_member = pytest.mark.parametrize("name", MEMBERS)


def test_the_members_are_the_five_backends_and_their_library() -> None:
    assert sorted(MEMBERS) == sorted([*BACKENDS, "nvshmem_runtime"])


@each_member
def test_member_agrees_with_the_root(name: str) -> None:
    project, core = MEMBERS[name]["project"], CORE["project"]
    assert project["name"] == f"cptransport-{name.replace('_', '-')}"
    for field in ("version", "requires-python", "license"):
        assert project[field] == core[field], field
    assert MEMBERS[name]["build-system"] == CORE["build-system"]


@each_member
def test_member_requires_only_this_repository_at_its_own_minor_version(name: str) -> None:
    major, minor, _ = CORE["project"]["version"].split(".")
    bounds = f">={CORE['project']['version']},<{major}.{int(minor) + 1}"
    siblings = ["cptransport"]
    if name in ("nvshmem_signal", "nvshmem_barrier"):
        siblings.append("cptransport-nvshmem-runtime")
    if name == "cudnn_summary":
        siblings.append("cptransport-nccl")
    assert MEMBERS[name]["project"]["dependencies"] == [f"{each}{bounds}" for each in siblings]


@each_member
def test_entry_points_name_the_descriptor(name: str) -> None:
    groups = MEMBERS[name]["project"].get("entry-points", {})
    expected = {"cptransport.backends": {name: f"cptransport_{name}:BACKEND"}}
    if name == "cudnn_summary":
        engine = {"kda_cudnn": "cptransport_cudnn_summary.engine:KDA_ENGINE"}
        expected["cptransport.engines"] = engine
    assert groups == (expected if name in BACKENDS else {})


@each_member
def test_core_is_forbidden_to_import_the_member(name: str) -> None:
    banned = CORE["tool"]["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]
    assert f"cptransport_{name}" in banned
    assert f"backends/{name}" in CORE["tool"]["mypy"]["mypy_path"]


def test_uv_finds_in_the_workspace_what_members_require() -> None:
    required = {
        requirement.split(">=")[0]
        for member in MEMBERS.values()
        for requirement in member["project"]["dependencies"]
    }
    assert CORE["tool"]["uv"]["sources"] == {each: {"workspace": True} for each in required}


def test_uv_keeps_the_cuda_versions_of_each_member_apart() -> None:
    both = [
        [{"package": member["project"]["name"], "extra": extra} for extra in ("cu12", "cu13")]
        for member in MEMBERS.values()
        if {"cu12", "cu13"} <= set(member["project"].get("optional-dependencies", {}))
    ]
    assert CORE["tool"]["uv"]["conflicts"] == both


def test_the_root_requires_no_backend() -> None:
    project = CORE["project"]
    requirements = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    assert not [each for each in requirements if each.startswith("cptransport")]
