# SPDX-License-Identifier: Apache-2.0
"""``cptransport doctor``: every backend with the truth about it, whatever state it is in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cptransport import cli, env

MakeDistribution = Callable[..., Path]

PACKAGES = ("nccl", "nvshmem_signal", "nvshmem_barrier", "cudnn_summary", "cupy_ipc")
PLUGIN = """
from dataclasses import replace
from cptransport.transports import loopback
print("hello from {name}")
BACKEND = replace(loopback.BACKEND, name={name!r}, probe={probe})
"""


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set and none of the five packages is there."""
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, f"cptransport_{name}", None)


@pytest.fixture
def install(distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def make(name: str, source: str, dist: str | None = None) -> None:
        module = f"cpt_doctor_{(dist or name).replace('-', '_')}"
        folder = distribution(
            dist or f"{name}-dist",
            "2.0",
            backends={name: f"{module}:BACKEND"},
            modules={module: source},
        )
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(folder)

    return make


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[[], dict[str, Any]]:
    """Return a function that runs ``doctor --json``: exit code 0, and stdout is JSON alone."""

    def run() -> dict[str, Any]:
        assert cli.main(["doctor", "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


def rows(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in report["backends"]}


def test_every_known_backend_is_listed_with_the_same_facts(
    report: Callable[[], dict[str, Any]],
) -> None:
    found = rows(report())
    assert list(found)[:8] == ["loopback", "threads", "gloo", *PACKAGES]
    for row in found.values():
        assert {"name", "installed", "version", "usable", "reason", "install"} <= set(row)
        assert row["usable"] == (row["reason"] is None)
    for name in ("loopback", "threads", "gloo"):
        assert (found[name]["installed"], found[name]["usable"]) == (True, True)


@pytest.mark.parametrize("name", PACKAGES)
def test_what_is_absent_says_what_to_install(
    name: str, report: Callable[[], dict[str, Any]]
) -> None:
    row = rows(report())[name]
    assert (row["installed"], row["version"], row["usable"]) == (False, None, False)
    assert row["install"].startswith("pip install ")
    assert row["reason"] == f"not installed: {row['install']}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_auto_is_gloo_on_cpu(report: Callable[[], dict[str, Any]]) -> None:
    found = report()
    assert found["auto"] == "gloo"
    assert "for one rank loopback" in found["auto_reason"]


def test_on_cuda_auto_is_nccl_if_it_can_serve(
    install: Callable[..., None],
    report: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = report()
    assert found["auto"] == "gloo"
    assert "nccl cannot: not installed: pip install cptransport-nccl" in found["auto_reason"]
    assert found["versions"]["gpu"] == "a GPU"
    source = PLUGIN.format(name="nccl", probe="lambda group, device: None")
    install("nccl", source, dist="cptransport-nccl")
    assert report()["auto"] == "nccl"


def test_plugins_in_every_state_are_listed(
    install: Callable[..., None],
    report: Callable[[], dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    install("good", PLUGIN.format(name="good", probe="lambda group, device: None"))
    install(
        "choosy", PLUGIN.format(name="choosy", probe="lambda group, device: f'not on {device}'")
    )
    install("rude", PLUGIN.format(name="rude", probe="lambda group, device: 1 / 0"))
    install("broken", "raise ImportError('libbroken.so is missing')")
    install("wrong", PLUGIN.format(name="other", probe="lambda group, device: None"))
    install("twice", "BACKEND = 1", dist="twice-a")
    install("twice", "BACKEND = 1", dist="twice-b")
    found = rows(report())
    assert (found["good"]["usable"], found["good"]["version"]) == (True, "2.0")
    for name, words in (
        ("choosy", "not on "),
        ("rude", "broken: probe raised ZeroDivisionError"),
        ("broken", "broken: 'broken' of broken-dist 2.0"),
        ("broken", "ImportError: libbroken.so is missing"),
        ("wrong", "its descriptor is named 'other'"),
        ("twice", "claimed by twice-a and by twice-b"),
    ):
        assert (found[name]["installed"], found[name]["usable"]) == (True, False)
        assert words in found[name]["reason"]
    assert found["gloo"]["usable"]


def test_advice_is_listed(
    install: Callable[..., None],
    report: Callable[[], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = PLUGIN.format(name="wise", probe="lambda group, device: None")
    install("wise", source + "\nBACKEND = replace(BACKEND, advice=lambda device: ['set MY_RAILS'])")
    found = rows(report())
    assert (found["wise"]["usable"], found["wise"]["advice"]) == (True, ["set MY_RAILS"])
    assert found["gloo"]["advice"] == []
    cli.main(["doctor"])
    assert "advice       wise: set MY_RAILS" in capsys.readouterr().out


def test_details_are_listed_for_what_cannot_serve_too(
    install: Callable[..., None],
    report: Callable[[], dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, details in (("rich", "['two paths']"), ("torn", "1 / 0")):
        source = PLUGIN.format(name=name, probe="lambda group, device: 'no rails'")
        changed = f"\nBACKEND = replace(BACKEND, details=lambda device: {details})"
        install(name, source + changed)
    found = rows(report())
    assert (found["rich"]["usable"], found["rich"]["details"]) == (False, ["two paths"])
    assert found["torn"]["details"] == [
        "broken: details raised ZeroDivisionError: division by zero"
    ]
    assert found["gloo"]["details"] == []
    cli.main(["doctor"])
    assert "details      rich: two paths" in capsys.readouterr().out


def test_versions_and_environment_are_reported(
    report: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_CP_ENGINE", "torch")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("MY_SECRET", "not shown")
    found = report()
    for name in ("cptransport", "torch", "cuda", "nccl", "nvshmem", "cudnn", "cupy", "triton"):
        assert name in found["versions"]
    assert found["versions"]["torch"] == torch.__version__
    assert found["environment"]["CULA_CP_ENGINE"] == "torch"
    assert found["environment"]["NCCL_DEBUG"] == "WARN"
    assert "MY_SECRET" not in found["environment"]
    assert found["problems"] == []
    assert "torch" in found["engines"]["kda"]


def test_what_is_wrong_with_the_environment_is_a_finding_not_a_failure(
    report: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (
        ("CULA_CP_STRCT", "1"),
        ("CULA_CP_STRICT", "yes"),
        ("CULA_CP_TIMEOUT_S", "soon"),
        ("CULA_CP_COMM_BACKEND", "ncll"),
    ):
        monkeypatch.setenv(name, value)
    problems = "\n".join(report()["problems"])
    for words in (
        "CULA_CP_STRCT; did you mean 'CULA_CP_STRICT'?",
        "CULA_CP_STRICT=yes is not valid",
        "CULA_CP_TIMEOUT_S=soon is not valid",
        "'ncll'; did you mean 'nccl'?",
    ):
        assert words in problems


def test_the_text_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("CULA_CP_STRCT", "1")
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name in ("loopback", "threads", "gloo", *PACKAGES):
        assert f"\n{name} " in text
    assert "not installed: pip install cptransport-nccl" in text
    assert "\nauto " in text
    assert f"torch {torch.__version__}" in text
    assert "environment  CULA_CP_STRCT=1" in text
    assert "did you mean 'CULA_CP_STRICT'?" in text


def test_the_process_prints_json_alone() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cptransport", "doctor", "--json"],
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0
    assert json.loads(result.stdout)["auto"] is not None
