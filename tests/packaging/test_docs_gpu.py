# SPDX-License-Identifier: Apache-2.0
"""The GPU page is what the committed documents give, and a run that is added replaces what it should."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu_page() -> ModuleType:
    path = ROOT / "docs" / "make_gpu.py"
    spec = importlib.util.spec_from_file_location("make_gpu", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def results(gpu_page: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results that is no part of the documentation."""
    folder = tmp_path / "results"
    monkeypatch.setattr(gpu_page, "RESULTS", folder)
    return folder / "run"


def put(path: Path, document: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def step(commit: str, command: str = "python", seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    outcomes = {
        "tests/gpu/test_x.py::test_good": "PASSED",
        "tests/gpu/test_x.py::test_bad": "FAILED",
    }
    return {
        "rehearsal": False,
        "git": {"commit": commit, "dirty": None},
        "machine": {"gpu_name": "a GPU", "gpus_used": 1, "driver": "1", "cpu_cores": 2},
        "software": {"torch": "2"},
        "step": "contract x 2",
        "group": "A",
        "command": [command],
        "seconds": seconds,
        "code": 1,
        "outcomes": outcomes,
        "running": "",
        "beside": "",
        **more,
    }


def conformance(**more: Any) -> dict[str, Any]:
    return {
        "schema": "cptransport.conformance/1",
        "backend": "x",
        "world_sizes": [2],
        "device": "cuda",
        "ranks_per_device": 2,
        "counts": {"passed": 1, "failed": 1},
        "finished_utc": "2026-01-01T00:00:00Z",
        "machine": {"cpus": 2, "gpus": ["a GPU"]},
        "versions": {"torch": "2"},
        **more,
    }


def test_pages_are_what_the_documents_give(gpu_page: ModuleType) -> None:
    made = gpu_page.pages()
    assert {path: path.read_text(encoding="utf-8") for path in made} == made
    assert set((ROOT / "docs" / "results").rglob("*.md")) <= set(made)


def test_failures_are_shown_by_name(gpu_page: ModuleType) -> None:
    cut = step("1" * 40, code="time limit", running="tests/gpu/test_x.py::test_slow[2]")
    shown = gpu_page.markdown([*gpu_page.results({Path("a.json"): cut})])
    assert "| contract x 2 | 1 | 1 | 0 | 1111111 | 1 | alone | time limit |" in shown
    assert "* contract x 2: `test_bad`, ended in `test_slow[2]`\n" in shown
    assert "2 CPU cores, torch 2." in shown


@pytest.mark.parametrize(
    ("shape", "title"),
    [
        (conformance(), "1 x a GPU, shared under MPS"),
        (conformance(ranks_per_device=1), "2 x a GPU, a rank on each"),
    ],
)
def test_machines_are_apart(gpu_page: ModuleType, shape: dict[str, Any], title: str) -> None:
    shown = gpu_page.markdown([*gpu_page.results({Path("a.json"): shape})])
    assert f"## {title}" in shown
    assert "| x | 2 | 1 | 1 | 0 | 2026-01-01T00:00:00Z |" in shown


def test_what_is_no_result_is_refused(gpu_page: ModuleType, results: Path, tmp_path: Path) -> None:
    run = tmp_path / "out"
    good = put(run / "step-good.json", step("1" * 40))
    put(run / "results.json", {"steps": []})
    put(run / "step-rehearsed.json", step("1" * 40, rehearsal=True))
    put(run / "conformance-cpu.json", conformance(device="cpu"))
    put(run / "cold.json", {"schema": "cptransport.cold/2"})
    put(run / "list.json", [])
    put(run / "bench" / "bench.json", {"schema": "cptransport.bench/1", "rows": []})
    (run / "cut.json").write_text('{"schema"', encoding="utf-8")
    refused = gpu_page.add("run", [run])
    assert [path.name for path in results.iterdir()] == ["step-good.json"]
    assert (results / "step-good.json").read_bytes() == good.read_bytes()
    assert len(refused) == 6


def test_the_later_run_counts(gpu_page: ModuleType, results: Path, tmp_path: Path) -> None:
    first, second, none = (tmp_path / name for name in ("first", "second", "none"))
    name = "step-contract-x-2.json"
    put(first / name, step("1" * 40, f"--cpt-report={first}/conformance-x.json"))
    put(first / "conformance-x.json", conformance())
    assert gpu_page.add("run", [first]) == []
    assert {path.name for path in results.iterdir()} == {name, "conformance-x.json"}

    # The second run was cut before it wrote its document: the first one's says nothing about it.
    put(second / name, step("2" * 40, f"--cpt-report={second}/conformance-x.json"))
    put(none / name, step("3" * 40, seconds=0.0, code="no time left", outcomes={}))
    assert gpu_page.add("run", [second, none]) == []
    (kept,) = results.iterdir()
    assert json.loads(kept.read_text(encoding="utf-8"))["git"]["commit"] == "2" * 40
