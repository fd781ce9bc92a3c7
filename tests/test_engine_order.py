# SPDX-License-Identifier: Apache-2.0
"""Which engines ``auto`` tries: the rule, and the table that benchmarks write."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch

from cptransport import engine_order
from cptransport.engine_order import SCHEMA_ID, automatic, main, table_of
from cptransport.engines import KDAOptions, OpFacts, SSDOptions

H200, ROW = "NVIDIA H200", ("NVIDIA H200", 16, 16, 128, 128)
BOUNDED = KDAOptions(scale=1.0, use_gate_in_kernel=True, lower_bound=-5.0)


def facts(device: str = "cuda", **changes: Any) -> OpFacts:
    values: dict[str, Any] = {
        "op": "kda",
        "device_type": device,
        "world_size": 4,
        "batch": 1,
        "heads": 16,
        "value_heads": 16,
        "key_dim": 128,
        "value_dim": 128,
        "dtypes": {},
        "state_dtype": torch.float32,
        "max_segments": 1,
        "max_tokens": 2048,
        "requires_grad": frozenset(),
        "options": BOUNDED,
    }
    return OpFacts(**{**values, **changes})


def gpu(monkeypatch: pytest.MonkeyPatch, major: int, name: str = H200) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


def fill(monkeypatch: pytest.MonkeyPatch, table: Any) -> None:
    monkeypatch.setattr(engine_order, "_table", lambda: table)


def test_on_the_cpu_it_is_the_preferred_one_then_torch() -> None:
    assert automatic(facts("cpu"), None) == ("torch",)
    assert automatic(facts("cpu"), "cudnn") == ("cudnn", "torch")


def test_blackwell_takes_cudnn_first_for_kda(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, 10, "NVIDIA B200")
    assert automatic(facts(options=KDAOptions(scale=1.0)), None) == ("cudnn", "triton", "torch")
    ssd = facts(op="ssd", options=SSDOptions(64))
    assert automatic(ssd, None) == ("triton", "torch")
    assert automatic(facts(), "mine") == ("mine", "cudnn", "triton", "torch")


@pytest.mark.parametrize("major", [8, 12])
def test_other_gpus_take_triton(major: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, major)
    fill(monkeypatch, {ROW: {2048: "cudnn"}})
    assert automatic(facts(), None) == ("triton", "torch")


def test_hopper_takes_cudnn_where_the_gate_is_bounded_and_it_was_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu(monkeypatch, 9)
    fill(monkeypatch, {})
    assert automatic(facts(), None) == ("triton", "torch")
    fill(monkeypatch, {ROW: {1024: "triton", 4096: "cudnn"}})
    first = {
        tokens: automatic(facts(max_tokens=tokens), None)[0]
        for tokens in (100, 600, 1500, 2500, 4096, 8192, 8193)
    }
    assert first == {
        100: "triton",
        600: "triton",
        1500: "triton",
        2500: "cudnn",
        4096: "cudnn",
        8192: "cudnn",
        8193: "triton",  # nothing that long was measured
    }
    assert automatic(facts(batch=2, max_tokens=2048), None)[0] == "cudnn"
    for changes in (
        {"options": KDAOptions(scale=1.0)},
        {"options": KDAOptions(scale=1.0, use_gate_in_kernel=True)},
        {"heads": 8},
        {"value_dim": 64},
    ):
        assert automatic(facts(max_tokens=4096, **changes), None)[0] == "triton"
    assert automatic(facts(max_tokens=4096, options=KDAOptions(1.0, safe_gate=True)), None) == (
        "cudnn",
        "triton",
        "torch",
    )
    gpu(monkeypatch, 9, "NVIDIA H100")
    assert automatic(facts(max_tokens=4096), None)[0] == "triton"


def document(*rows: tuple[str, float, float], tokens: int = 2048, **changes: Any) -> dict[str, Any]:
    """A bench document; rows are (engine, mean gate, microseconds)."""
    shape = {"H": 16, "HV": 16, "K": 128, "V": 128, "T_local": tokens}
    return {
        "machine": {"gpu_name": H200},
        "rows": [
            {
                "provider": "cptransport-cp",
                "op": "kda",
                "mode": "fwd_bwd",
                "timer": "profiler",
                "verified": True,
                "median_us": time,
                "shape": shape,
                "options": {"engine": engine, "gate_mean": gate},
                **changes,
            }
            for engine, gate, time in rows
        ],
    }


def test_a_table_lists_cudnn_where_it_was_faster_at_every_gate() -> None:
    strong = [("triton", -1.0, 490.0), ("cudnn", -1.0, 300.0)]
    weak = [("triton", -0.01, 490.0), ("cudnn", -0.01, 560.0)]

    def engines(*documents: dict[str, Any]) -> list[tuple[int, str]]:
        return [(row["tokens"], row["engine"]) for row in table_of(documents)["rows"]]

    assert engines(document(*strong)) == [(2048, "cudnn")]
    assert engines(document(*strong, *weak)) == [(2048, "triton")]
    assert engines(document(*strong), document(*weak)) == [(2048, "triton")]
    assert engines(document(*strong), document(*weak, tokens=1024)) == [
        (1024, "triton"),
        (2048, "cudnn"),
    ]
    # What one engine alone did, what was not verified or measured or set otherwise says nothing.
    assert engines(document(strong[0]), document(weak[1])) == []
    otherwise = document(("cudnn", -0.01, 100.0))
    otherwise["rows"][0]["options"]["CULA_CP_CUDNN_INTERIOR"] = "identity"
    assert engines(document(*strong, *weak), otherwise) == [(2048, "triton")]
    for changes in (
        {"verified": False},
        {"timer": "perf_counter"},
        {"mode": "fwd"},
        {"provider": "fla"},
    ):
        assert engines(document(*strong, **changes)) == []


def test_it_is_written_and_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report, table = tmp_path / "report.json", tmp_path / "engines.json"
    report.write_text(json.dumps(document(("triton", -1.0, 490.0), ("cudnn", -1.0, 300.0))))
    assert main([str(report), "--out", str(table)]) == 0
    written = json.loads(table.read_text())
    assert written["schema"] == SCHEMA_ID
    (row,) = written["rows"]
    assert row["median_us"] == {"cudnn": [300.0], "triton": [490.0]}
    (tmp_path / "data").mkdir()
    table.rename(tmp_path / "data" / "engines.json")
    monkeypatch.setattr(engine_order, "files", lambda package: tmp_path)
    engine_order._table.cache_clear()
    try:
        assert engine_order._table() == {ROW: {2048: "cudnn"}}
    finally:
        engine_order._table.cache_clear()


def test_the_table_that_is_shipped_is_one_of_ours() -> None:
    text = (files("cptransport") / "data" / "engines.json").read_text()
    shipped = json.loads(text)
    assert shipped["schema"] == SCHEMA_ID
    for row in shipped["rows"]:
        assert row["engine"] in ("cudnn", "triton")
        assert all(len(times) for times in row["median_us"].values())
    engine_order._table()
