# SPDX-License-Identifier: Apache-2.0
"""A plugin that ends the process where it should raise is a broken plugin, and nobody else's trouble."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cptransport
from cptransport import cli

_LEAVES = "import sys\nsys.exit('no licence')\n"
_PROBE_LEAVES = """
import sys
from dataclasses import replace
from cptransport.transports.loopback import BACKEND as LOOPBACK

def leave(group, device, timeout_s=None):
    sys.exit("no licence")

BACKEND = replace(LOOPBACK, name="probe_leaves", probe=leave)
CREATE = replace(LOOPBACK, name="create_leaves", create=leave)
"""


@pytest.fixture(autouse=True)
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("leaves", _LEAVES), ("probe_leaves", _PROBE_LEAVES)):
        (tmp_path / f"{name}.py").write_text(text)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = f"[cptransport.backends]\n{name} = {name}:BACKEND\n"
        (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(tmp_path)


def test_doctor_reports_plugins_that_end_the_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["backends"]}
    for name in ("leaves", "probe_leaves"):
        assert not rows[name]["usable"]
        assert "SystemExit: no licence" in rows[name]["reason"]
    assert rows["threads"]["usable"]


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("leaves", cptransport.BackendLoadError),
        ("probe_leaves", cptransport.BackendContractError),
        ("probe_leaves:CREATE", cptransport.BackendError),
    ],
)
def test_selection_raises_with_the_cause(backend: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="SystemExit: no licence") as caught:
        cptransport.create_transport(backend=backend)
    assert isinstance(caught.value.__cause__, SystemExit)


def test_an_unknown_variable_does_not_run_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_OVERLAPP", "1")
    with pytest.warns(UserWarning, match="CULA_CP_OVERLAP'"):
        cptransport.create_transport().close()


def test_the_name_of_a_backend_is_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "conv1d", "--backend", "treads", "--world-size", "1"]) == 2
    assert "did you mean 'threads'?" in capsys.readouterr().err


def test_a_typo_in_strict_is_refused_before_any_rank_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CULA_CP_STRICT", "maybe")
    assert cli.main(["verify", "conv1d", "--backend", "threads", "--world-size", "2"]) == 2
    assert capsys.readouterr().err.strip().endswith("choose one of 0, 1")
