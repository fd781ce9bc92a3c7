# SPDX-License-Identifier: Apache-2.0
"""A short soak; `python -m cptransport.testing.soak --minutes 20` is the long one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cptransport.testing.soak import SCHEMA, main, soak

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_random_exchanges_lose_nothing() -> None:
    report = soak(4.0, backends=("gloo", "threads"), seed=3, deaths=0.0)
    assert report["failures"] == []
    assert report["payloads"] > 50
    assert report["generations"] > 20
    assert report["deaths"] == 0


def test_deaths_end_the_waits_of_the_survivors() -> None:
    report = soak(0.1, backends=("gloo",), seed=4, deaths=1.0)
    assert report["failures"] == []
    assert report["deaths"] == 1
    assert report["survivors"] >= 1
    assert report["slowest_error_s"] < report["wait_limit_s"] + 2


def test_a_stale_payload_does_not_escape() -> None:
    fault = "cptransport.testing.faults:SKIPPEDGENERATION"
    report = soak(0.5, backends=(fault,), processes=False)
    assert report["lost_or_stale_payloads"] >= 1
    assert "got the payload of rank" in report["failures"][0]["text"]


def test_the_command_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "deep" / "soak.json"
    assert main(["--minutes", "0.01", "--backend", "threads", "--json", str(path)]) == 0
    assert json.loads(path.read_text()) == json.loads(capsys.readouterr().out)
    assert json.loads(path.read_text())["schema"] == SCHEMA
