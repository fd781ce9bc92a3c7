# SPDX-License-Identifier: Apache-2.0
"""Choosing on a GPU, end to end in fresh processes: what serves, what is refused, strict and not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import rig

from cptransport.errors import BackendUnavailableError
from cptransport.select import create_transport
from cptransport.testing import Ranks

pytestmark = pytest.mark.gpu

SCRIPT = """
import json, os, sys, warnings
import torch
import torch.distributed as dist
import cptransport as cpt

device = sys.argv[1]
if device == "cuda":
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
told = {}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    try:
        with cpt.create_transport() as transport:
            transport.barrier()
            told = {"chosen": transport.selection.chosen, "source": transport.selection.source}
    except cpt.CPTransportError as error:
        told = {"error": type(error).__name__, "text": str(error)}
ours = ("CULA_CP_", "advises", "cannot serve")
told["warned"] = [str(w.message) for w in caught if any(word in str(w.message) for word in ours)]
with open(os.path.join(sys.argv[2], os.environ["RANK"]), "w") as stream:
    json.dump(told, stream)
dist.destroy_process_group()
"""


def told(tmp_path: Path, backend: str, *, strict: bool, **variables: str) -> list[dict[str, str]]:
    """Run the script on two ranks that share a GPU and return what each said."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.update(CULA_CP_COMM_BACKEND=backend, CULA_CP_STRICT=str(int(strict)))
    env.update({"CULA_CP_TIMEOUT_S": "40"} | variables)
    command = [sys.executable, "-m", "cptransport", "launch", "--nproc", "2"]
    command += [] if rig.REHEARSAL else ["--share-gpu"]
    done = subprocess.run(
        [*command, str(script), rig.DEVICE, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((tmp_path / str(rank)).read_text()) for rank in range(2)]


@pytest.mark.parametrize("backend", rig.BACKENDS)
def test_what_is_named_serves_under_strict(backend: str, tmp_path: Path) -> None:
    """Named by the variable, strict: that one runs, with its environment in order, or an error on all ranks."""
    for answer in told(tmp_path, rig.named(backend), strict=True, **rig.environment(backend, 1)):
        assert answer == {"chosen": rig.named(backend), "source": "environment", "warned": []}


@pytest.mark.parametrize("strict", [False, True])
def test_what_cannot_serve(strict: bool, tmp_path: Path) -> None:
    """Strict: an error that all ranks share; else one fallback that all ranks take, with a warning."""
    answers = told(tmp_path, "loopback", strict=strict)
    assert answers[0].get("text") == answers[1].get("text")
    for answer in answers:
        if strict:
            assert answer["error"] == "BackendUnavailableError", answer
        else:
            assert answer["chosen"] == ("gloo" if rig.REHEARSAL else "nccl")
            assert "cannot serve here" in " ".join(answer["warned"])


@pytest.mark.parametrize("strict", [False, True])
def test_a_typing_mistake_in_a_name(strict: bool, tmp_path: Path) -> None:
    """An unknown variable warns, or is an error under strict, and the message suggests the right one."""
    for answer in told(tmp_path, "gloo", strict=strict, CULA_CP_OVERLAPP="1"):
        said = answer.get("text", "") + " ".join(answer["warned"])
        assert "CULA_CP_OVERLAP" in said
        assert ("error" in answer) is strict


def _nccl_without_help(ranks: Ranks) -> list[str]:
    try:
        create_transport(backend="nccl", device=ranks.device, strict=True, timeout_s=20)
    except BackendUnavailableError as error:
        refusal = str(error)
    else:
        refusal = "it served"
    with pytest.warns(UserWarning, match="cannot serve here, 'gloo' runs instead"):
        transport = create_transport(backend="nccl", device=ranks.device, strict=False)
    with transport:  # type: ignore[attr-defined]
        transport.barrier()
        return [refusal, transport.selection.chosen, transport.selection.passed_over[0][1]]


@pytest.mark.usefixtures("needs_cuda")
def test_nccl_refuses_ranks_that_share_a_gpu_without_help() -> None:
    """Strict: an error on all ranks that says the way out; else all fall back together."""
    if rig.per_device(2) == 1:
        pytest.skip("every rank has a GPU of its own here")
    serving = rig.serving("nccl", 2, NCCL_HOSTID="")
    for refusal, chosen, reason in serving.run(_nccl_without_help, transport=False):
        assert "ranks [0, 1] share one GPU" in refusal
        assert "NCCL_HOSTID" in refusal
        assert chosen == "gloo"
        assert "share one GPU" in reason
