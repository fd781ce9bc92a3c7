# SPDX-License-Identifier: Apache-2.0
"""``cptransport verify``: the table, the JSON, the exit codes, on threads, a pool and torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport import exchange, merge
from cptransport.cli import main
from cptransport.testing.op_cases import OpSpec


def verified(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["verify", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    "op", ["kda", "chunk_kda", "mamba2", "ssd", "conv1d", "causal_conv1d", "mixer"]
)
def test_every_op_on_threads(op: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verified(capsys, op, "--backend", "threads", "--world-size", "3")
    assert code == 0
    assert out.endswith("verified\n")
    assert "0 wrong" in out
    for rank in range(3):
        assert f"\nrank {rank} " in out
    assert "sum over ranks" in out


def test_json_says_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verified(
        capsys,
        "kda",
        *("--backend", "threads", "--world-size", "2", "--layout", "zigzag_per_sequence"),
        *("--dtype", "float64", "--cu-seqlens", "0,3,3,17", "--padded-cu-seqlens", "0,4,4,20"),
        *("--composition", "handoff", "--random", "2", "--json"),
    )
    assert code == 0
    report = json.loads(out)
    assert report["ok"] is True
    assert (report["transport"], report["world_size"]) == ("threads", 2)
    assert len(report["calls"]) == 3
    first = report["calls"][0]
    assert first["composition"] == "handoff"
    assert first["spec"]["cu_seqlens"] == [0, 3, 3, 17]
    names = {(each["rank"], each["name"]) for each in first["comparisons"]}
    for rank in (0, 1):
        assert {(rank, name) for name in ("output", "dq", "dk", "dv", "dg", "dbeta")} <= names
    assert {(None, "dA_log"), (None, "ddt_bias"), (None, "dinitial_state")} <= names
    assert all(each["ok"] and each["error"] <= each["limit"] for each in first["comparisons"])


def test_a_mismatch_is_code_1_after_all_comparisons(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("kda", "--backend", "threads", "--json")
    _, right, _ = verified(capsys, *arguments)

    def forgets(transition: Tensor, state: Tensor, e: Tensor, out: Tensor | None = None) -> Tensor:
        return e if out is None else out.copy_(e)

    for module in (exchange, merge):
        monkeypatch.setattr(module, "advance", lambda *_: forgets)
    code, out, _ = verified(capsys, *arguments)
    assert code == 1
    report = json.loads(out)
    assert report["ok"] is False
    comparisons = report["calls"][0]["comparisons"]
    assert len(comparisons) == len(json.loads(right)["calls"][0]["comparisons"])
    assert {each["ok"] for each in comparisons} == {True, False}
    code, out, _ = verified(capsys, *arguments[:-1])
    assert code == 1
    assert "WRONG\n" in out
    assert out.endswith("WRONG\n")


def test_a_pool_of_processes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = verified(capsys, "mixer", "--backend", "gloo", "--world-size", "2", "--json")
    assert code == 0
    report = json.loads(out)
    assert report["transport"] == "gloo"
    assert report["calls"][0]["ok"]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("kda", "--layout", "zigzg"), 2, "did you mean 'zigzag'?"),
        (("kda", "--cu-seqlens", "0,5,3"), 2, "PlanError"),
        (("kda", "--world-size", "0"), 2, "world_size"),
        (("kda", "--batch", "2", "--backend", "threads"), 2, "B = 1"),
        (("kda", "--engine", "tritn", "--backend", "threads"), 2, "tritn"),
        (("conv1d", "--width", "0", "--backend", "threads"), 2, "width must be at least 1"),
    ],
)
def test_what_cannot_be_verified_is_one_line(
    arguments: tuple[str, ...], code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, out, err = verified(capsys, *arguments)
    assert found == code, err
    assert not out
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_cuda_without_a_device_is_said_before_ranks_start(
    backend: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = verified(capsys, "kda", "--device", "cuda", "--backend", backend)
    assert code == 3
    assert err == "cptransport verify: BackendUnavailableError: torch sees no CUDA device\n"


def test_wrong_names_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["kdaa"], ["kda", "--dtype", "int8"], ["kda", "--cu-seqlens", "a"]):
        with pytest.raises(SystemExit) as stopped:
            main(["verify", *arguments])
        assert stopped.value.code == 2
    capsys.readouterr()


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "cptransport"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    return subprocess.run(
        [*command, "verify", *arguments],
        env={**env, "OMP_NUM_THREADS": "1"},
        timeout=200,
        capture_output=True,
        text=True,
        check=False,
    )


def test_under_torchrun_the_ranks_of_the_launch_are_used() -> None:
    done = torchrun("conv1d", "--backend", "gloo", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    report: dict[str, Any] = json.loads(done.stdout)  # one rank prints
    assert (report["ok"], report["world_size"], report["transport"]) == (True, 2, "gloo")


def test_specs_travel_as_json() -> None:
    spec = OpSpec("ssd", (0, 4), 3, "zigzag", options={"chunk_size": 16}, optional=("D",))
    text = json.dumps(spec.to_json())
    assert OpSpec(**json.loads(text)).to_json() == json.loads(text)
    assert "padding" not in text
    with pytest.raises(ValueError, match="unknown op"):
        OpSpec("kad", (0, 4))
    with pytest.raises(ValueError, match="no optional inputs"):
        OpSpec("kda", (0, 4), optional=("z",))
