# SPDX-License-Identifier: Apache-2.0
"""``bench boundary`` and the whole-op benches on real ranks, small; and what they do when something is wrong."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import SHORT, bench

from cptransport.bench import boundary, boundary_rank, layer, layer_stage
from cptransport.bench.kda_op import KDAShape, kda_layer
from cptransport.bench.launch import Placement
from cptransport.bench.schema import SchemaError, problems
from cptransport.cli import main

SMALL = ["--heads", "2", "--key-dim", "4", "--value-dim", "3"]
ALL = [f"--composition={name}" for name in ("gather", "handoff", "scan")]


def by_status(made: dict[str, Any], status: str) -> list[dict[str, Any]]:
    return [row for row in made["rows"] if row["status"] == status]


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_boundary_on_threads_and_gloo(op: str) -> None:
    both = ["--backend", "threads", "--backend", "gloo", "--direction", "forward"]
    layout = ["--layout", "zigzag", "--direction", "backward"]
    made = bench("boundary", *both, *layout, *ALL, "--world-size", "3", "--op", op, *SMALL)
    assert by_status(made, "error") == []
    good = by_status(made, "ok")
    baseline = [row for row in good if row["baseline"]]
    assert made["gate"]["passed"] == len(good) == 2 * (1 + 2 * (2 + 3 + 2)) + len(baseline)
    assert {(r["provider"], r["options"]["beside"], r["mode"]) for r in baseline} == {
        ("all_gather", "gloo", "merge")
    }
    assert {row["reason"] for row in by_status(made, "skipped")} == {
        "CUDA graphs need a CUDA device",
        "these ranks have no torch.distributed",
    }
    for row in good:
        assert len(row["samples_us"]) == 4
        assert len(row["repeat_medians_us"]) == 2
        assert min(row["samples_us"]) > 0
    own = [row for row in good if not row["baseline"]]
    moved = [row for row in own if row["mode"] in ("merge", "publish_fetch")]
    assert all(row["bytes_received"] == row["bytes_expected"] > 0 for row in moved)
    of = {
        (r["provider"], r["options"]["composition"], r["options"]["direction"], r["mode"]): r
        for r in moved
    }
    for (provider, *rest), row in of.items():
        assert row["bytes_received"] == of[("threads", *rest)]["bytes_received"], provider
    # Zigzag over 3 ranks: 5 segments in a chain, so somebody receives more by gather than by handoff.
    gather = of["gloo", "gather", "forward", "merge"]["bytes_received"]
    assert gather > of["gloo", "handoff", "forward", "merge"]["bytes_received"]
    assert made["machine"]["ranks_per_device"] == 3


def test_a_wrong_summary_is_an_error_row_and_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = boundary_rank._Boundary.ready

    def spoilt(self: Any, variant: Any, outcome: Any) -> Any:
        if self.transport.rank == 0:  # what it sends is not what its peers expect
            self.payload[0]["state"].fill_(3.0)
        return ready(self, variant, outcome)

    monkeypatch.setattr(boundary_rank._Boundary, "ready", spoilt)
    made = bench("boundary", "--backend", "threads", "--world-size", "3", *SMALL)
    failed = by_status(made, "error")
    assert {row["mode"] for row in failed} == {"merge", "fold", "publish_fetch"}
    assert all(
        "rank 1, 2: verification failed: " in row["reason"]
        or "rank 1: verification failed: " in row["reason"]
        for row in failed
    )
    assert all(row["samples_us"] == [] for row in failed)
    assert made["gate"]["failed"] == len(failed)
    # What moves no summary is measured all the same.
    assert {row["mode"] for row in by_status(made, "ok")} == {"barrier"}


def test_a_baseline_that_fails_has_no_number_and_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: Any, variant: Any, transport: Any) -> Any:
        if transport is self._all_gather:
            raise RuntimeError("NCCL is not in the mood")
        return merge(self, variant, transport)

    merge = boundary_rank._Boundary._merge
    monkeypatch.setattr(boundary_rank._Boundary, "_merge", broken)
    monkeypatch.setattr(boundary_rank._Boundary, "_baseline_refusal", lambda self, variant: None)
    monkeypatch.setattr(boundary_rank.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(boundary_rank, "AllGather", lambda device: object())
    made = bench("boundary", "--backend", "threads", "--world-size", "2", *SMALL)
    baseline = {
        (row["timer"], row["reason"]) for row in by_status(made, "skipped") if row["baseline"]
    }
    assert baseline == {
        ("perf_counter", "not measured: RuntimeError: NCCL is not in the mood"),
        ("graph_replay", "CUDA graphs need a CUDA device"),
    }
    assert made["gate"]["failed"] == 0
    assert {row["mode"] for row in by_status(made, "ok")} == {
        "barrier",
        "merge",
        "fold",
        "publish_fetch",
    }


def test_bytes_that_the_plan_does_not_say_are_an_error_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from cptransport.volume import Volume

    fewer = Volume([0] * 3, [0] * 3)
    monkeypatch.setattr("cptransport.plan.Plan.volume", lambda *_: fewer)
    made = bench("boundary", "--backend", "threads", "--world-size", "3", *SMALL)
    failed = by_status(made, "error")
    assert {row["mode"] for row in failed} == {"merge", "publish_fetch"}
    assert all("bytes where the plan says 0" in row["reason"] for row in failed)


def test_a_backend_that_cannot_serve_is_skipped_with_its_reason() -> None:
    made = bench("boundary", "--backend", "nccl", "--world-size", "2", *SMALL)
    assert by_status(made, "ok") == []
    assert {row["status"] for row in made["rows"]} == {"skipped"}
    assert all("nccl" in row["reason"] for row in made["rows"])


def test_ranks_that_end_make_error_rows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(boundary, "boundary_rank", "cptransport.bench.boundary_rank:no_such_case")
    made = bench("boundary", "--backend", "gloo", "--world-size", "3", *SMALL)
    assert {row["status"] for row in made["rows"]} == {"error"}
    assert all("no_such_case" in row["reason"] for row in made["rows"])
    assert "Traceback" in capsys.readouterr().err  # the log has the whole story


def test_barrier_that_lets_a_rank_go_early_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from cptransport.transports.threads import ThreadTransport

    monkeypatch.setattr(ThreadTransport, "_barrier", lambda self: None)
    monkeypatch.setattr(
        boundary_rank._Boundary,
        "_verify_barrier",
        _late_on_rank_0(boundary_rank._Boundary._verify_barrier),
    )
    made = bench("boundary", "--backend", "threads", "--world-size", "2", *SMALL)
    (row,) = [row for row in made["rows"] if row["mode"] == "barrier"]
    assert "left the barrier when 1 ranks had arrived" in row["reason"]


def _late_on_rank_0(verify: Any) -> Any:
    import time

    def late(self: Any, body: Any) -> None:
        time.sleep(0.3 if self.transport.rank == 0 else 0)
        verify(self, body)

    return late


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("kda", ["--heads", "2", "--key-dim", "8", "--value-dim", "4", "--baseline", "fla"]),
        ("mamba2", ["--heads", "2", "--headdim", "4", "--dstate", "8", "--chunk-size", "16"]),
    ],
)
def test_whole_op_on_the_interior_rank(name: str, sizes: list[str]) -> None:
    made = bench(name, "--tokens", "40", *sizes)
    assert by_status(made, "error") == []
    good = {(row["provider"], row["mode"]): row for row in by_status(made, "ok")}
    assert set(good) == {
        (provider, mode)
        for provider in ("cptransport-cp", "cptransport")
        for mode in ("fwd", "fwd_bwd")
    }
    cp = good["cptransport-cp", "fwd_bwd"]
    assert cp["max_abs_err"] == 0.0  # bit for bit what the rank gave among its peers
    assert (
        cp["bytes_received"]
        == cp["bytes_expected"]
        > good["cptransport-cp", "fwd"]["bytes_received"]
    )
    assert good["cptransport", "fwd"]["baseline"]
    assert all(row["options"]["engine"] == "torch" for row in good.values())
    absent = [row for row in by_status(made, "skipped") if row["provider"] == "fla"]
    assert all(row["reason"].startswith("fla ") for row in absent)


def test_recorded_ranks_on_cuda_compose_as_nccl_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CULA_CP_COMPOSITION", raising=False)
    cpu = torch.device("cpu")
    setup = layer_stage.Setup(4, "float32", 0, 30.0)
    for heads, expected in ((16, "gather"), (64, "scan")):
        layer = kda_layer(KDAShape(2, heads, heads, 128, 128, -1.0))
        stage = layer_stage.Stage(layer, setup, cpu)
        assert stage.composition() is None  # on a CPU as gloo would: as the recording's threads do
        stage.device = torch.device("cuda", 0)
        assert stage.composition() == expected
    monkeypatch.setenv("CULA_CP_COMPOSITION", "handoff")
    assert stage.composition() is None


def test_ranks_that_disagree_with_the_unsharded_op_leave_no_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(layer_stage, "SHARDED", dict.fromkeys(layer_stage.SHARDED, 0.0))
    made = bench("kda", "--tokens", "40", "--heads", "1", "--key-dim", "8", "--value-dim", "4")
    failed = by_status(made, "error")
    assert {row["provider"] for row in failed} == {"cptransport-cp"}
    assert all("sharded, is off by" in row["reason"] for row in failed)
    assert {row["provider"] for row in by_status(made, "ok")} == {"cptransport"}


def test_rows_of_engines_that_all_fail_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: layer_stage.Stage, engine: str | None, setting: object) -> Any:
        raise AssertionError(f"{engine} is off")

    monkeypatch.setattr(layer_stage.Stage, "_recorded", fails)
    engines = ["--engine", "torch", "--engine", "triton", "--overlap", "--baseline", "fla"]
    small = ["--heads", "1", "--key-dim", "8", "--value-dim", "4"]
    made = bench("kda", "--tokens", "24", *small, *engines)  # every row is there once
    failed = {
        (row["options"]["engine"], row["options"]["overlap"], row["reason"])
        for row in by_status(made, "error")
        if row["provider"] == "cptransport-cp"
    }
    assert failed == {
        (engine, overlap, f"the ranks together: AssertionError: {engine} is off")
        for engine in ("torch", "triton")
        for overlap in (False, True)
    }


def test_an_engine_is_measured_once_more_with_a_variable_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = "CULA_CP_CUDNN_INTERIOR"
    seen = set()
    recorded = layer_stage.Stage._recorded

    def watched(self: layer_stage.Stage, engine: str | None, setting: Any) -> Any:
        found = recorded(self, engine, setting)
        with layer_stage.asking(overlap=False, setting=setting):
            seen.add(os.environ.get(name))
        return found

    monkeypatch.setattr(layer_stage.Stage, "_recorded", watched)
    small = ["--tokens", "24", "--heads", "1", "--key-dim", "8", "--value-dim", "4"]
    small += ["--engine", "torch", "--set", f"{name}=identity"]
    assert not [r for r in by_status(bench("kda", *small), "ok") if name in r["options"]]
    monkeypatch.setattr(layer.load_engine("kda", "torch"), "variables", (name,), raising=False)
    monkeypatch.setattr("cptransport.registry.declared_variables", lambda: (name,))
    good = by_status(bench("kda", *small), "ok")
    assert [(r["provider"], r["mode"]) for r in good if name in r["options"]] == [
        ("cptransport-cp", "fwd"),
        ("cptransport-cp", "fwd_bwd"),
    ]
    assert seen == {None, "identity"}
    assert name not in os.environ


def test_a_document_with_a_row_twice_is_kept_and_the_command_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = boundary.CASE.measure

    def twice(args: argparse.Namespace, progress: Any) -> Any:
        found = measured(args, progress)
        return dataclasses.replace(found, rows=[*found.rows, found.rows[0]])

    spoilt = dataclasses.replace(boundary.CASE, measure=twice)
    monkeypatch.setattr(boundary, "CASE", spoilt)
    monkeypatch.chdir(tmp_path)
    arguments = ["bench", "boundary", "--backend", "threads", "--world-size", "2", *SMALL, *SHORT]
    for more, kept in (
        (["--json", "run.json"], "run.invalid.json"),
        (["--json", "-"], "bench-boundary.invalid.json"),
    ):
        assert main([*arguments, *more]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert kept in said.err
        assert "the same measurement as /rows/0" in said.err
        document = json.loads(Path(kept).read_text(encoding="utf-8"))
        assert document["rows"][-1] == document["rows"][0]
        assert "the same measurement as /rows/0" in document["problems"][0]
    assert not Path("run.json").exists()


def test_an_outside_gate_is_counted_in(tmp_path: Path) -> None:
    path = tmp_path / "conformance.json"
    suite = {"schema": "contract/1", "backend": "gloo"}
    path.write_text(json.dumps({**suite, "counts": {"passed": 7, "failed": 2}}))
    small = ["--backend", "threads", "--world-size", "2", *SMALL]
    made = bench("boundary", *small, "--gate", str(path))
    assert made["gate"] == {
        "suite": "verification of every configuration in the run (bench boundary); contract/1 gloo",
        "passed": 7 + len(by_status(made, "ok")),
        "failed": 2,
        "report_path": str(path),
    }
    path.write_text(json.dumps({**suite, "counts": {"passed": 7, "skipped": 1}}))
    made = bench("boundary", *small, "--gate", str(path), "--commit", "abc123")
    assert made["gate"]["failed"] == 0
    assert made["git"] == {"commit": "abc123", "dirty": None}
    path.write_text("{}")
    with pytest.raises(SchemaError, match="no counts"):
        bench("boundary", *small, "--gate", str(path))


def test_the_command_measures_writes_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.json"
    arguments = ["--backend", "threads", "--world-size", "2", *SMALL, *SHORT]
    assert main(["bench", "boundary", *arguments, "--json", str(run)]) == 0
    said = capsys.readouterr()
    assert "### Published to merged" in said.out
    steps = re.findall(r"^ +\d+\.\d s  (.*)$", said.err, re.MULTILINE)  # no terminal: a line each
    assert steps == [*(f"boundary on threads, repeat {i} of 2" for i in (1, 2)), "done"]
    assert main(["bench", "boundary", *arguments, "--json", "-"]) == 0
    assert problems(json.loads(capsys.readouterr().out)) == []
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").exists()
    run.write_text("{}")
    assert main(["report", str(run), "--out", str(tmp_path / "out")]) != 0
    assert "is not of schema" in capsys.readouterr().err


def test_the_command_fails_when_a_row_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_rank, "relative_error", lambda *_: 1.0)
    arguments = ["--backend", "threads", "--world-size", "2", *SMALL, *SHORT]
    assert main(["bench", "boundary", *arguments]) == 1


def test_one_rank_has_no_boundary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "boundary", "--world-size", "1", *SHORT]) != 0
    assert "needs at least 2 ranks" in capsys.readouterr().err


def test_on_gpus_a_backend_does_all_its_repeats_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "placement", lambda args: Placement(2, 1, 2))
    real, turns = boundary._repeat, []

    def repeat(args: Any, backend: str, ranks: Any, settings: Any) -> Any:
        turns.append((backend, settings.repeats))
        return real(args, backend, ranks, settings)

    monkeypatch.setattr(boundary, "_repeat", repeat)
    both = ["--backend", "threads", "--backend", "gloo", "--composition", "gather"]
    made = bench("boundary", *both, "--no-baseline", *SMALL)
    assert turns == [("threads", 2), ("gloo", 2)]
    for row in by_status(made, "ok"):
        assert (len(row["samples_us"]), len(row["repeat_medians_us"])) == (4, 2)
    assert "one after the other" in made["method"]["interleaving"]


def _interrupt_the_second(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
    real, interrupts = getattr(module, name), iter([False, True])

    def call(*args: Any) -> Any:
        if next(interrupts):
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(module, name, call)


def test_what_was_measured_before_an_interrupt_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a boundary the backends that had their turn, of ops the configurations."""
    _interrupt_the_second(monkeypatch, boundary, "_repeat")
    both = ["--backend", "threads", "--backend", "gloo", "--composition", "gather"]
    made = bench("boundary", *both, "--world-size", "2", "--no-baseline", *SMALL)
    assert {row["provider"] for row in by_status(made, "ok")} == {"threads"}
    missing = [row for row in by_status(made, "skipped") if row["provider"] == "gloo"]
    assert {row["reason"] for row in missing} == {"interrupted before it was measured"}

    _interrupt_the_second(monkeypatch, layer, "_measure")
    shapes = ["--shape", "8x1", "--shape", "9x1", "--engine", "torch"]
    made = bench("kda", *shapes, "--key-dim", "4", "--value-dim", "3", "--dtype", "float32")
    assert {row["shape"]["T_local"] for row in made["rows"]} == {8}
    assert "interrupted after 1 of 2 configurations" in made["method"]["interleaving"]
