# SPDX-License-Identifier: Apache-2.0
"""Cold start: the first call of a shape with no compiled kernels, and four processes that start at once."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rig

pytestmark = pytest.mark.gpu

LIMIT_S = 60.0
SCRIPT = """
import hashlib, json, sys, time
import torch
import cptransport as cpt
from cptransport.ops import chunk_kda

device, tokens, heads, size, engine = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
dtype = torch.bfloat16 if device == "cuda" else torch.float32
generator = torch.Generator(device).manual_seed(1)
def normal(*shape):
    return torch.randn(1, tokens, heads, *shape, generator=generator, device=device)
x = {"q": normal(size).to(dtype), "k": torch.nn.functional.normalize(normal(size), dim=-1).to(dtype)}
x |= {"v": normal(size).to(dtype), "g": -normal(size).abs(), "beta": normal().sigmoid()}
leaves = {name: value.requires_grad_() for name, value in x.items()}
if device == "cuda":
    torch.cuda.synchronize()
start = time.perf_counter()
with cpt.create_transport(device=device) as transport:
    cp = cpt.CPContext(cpt.build_plan([0, tokens], world_size=1), transport)
    o, _ = chunk_kda(**leaves, cp_context=cp, engine=engine)
    grads = torch.autograd.grad(o, list(leaves.values()), torch.ones_like(o))
digest = hashlib.sha256()
for value in (o, *grads):
    digest.update(value.detach().float().cpu().numpy().tobytes())
print(json.dumps({"seconds": time.perf_counter() - start, "digest": digest.hexdigest(),
                  "engine": cpt.last_run().engine}))
"""


def start(cache: Path) -> subprocess.Popen[str]:
    """Start a process that computes one layer, with an empty or shared folder for compiled kernels."""
    shape = ("64", "2", "16", "torch") if rig.REHEARSAL else ("2048", "16", "128", "triton")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env["TRITON_CACHE_DIR"] = str(cache)
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, rig.DEVICE, *shape],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def told(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=170)
    assert process.returncode == 0, err
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def test_the_first_call_of_a_shape(tmp_path: Path) -> None:
    """Forward and backward, kernels compiled on the way."""
    cold = told(start(tmp_path / "cache"))
    warm = told(start(tmp_path / "cache"))
    assert cold["digest"] == warm["digest"]
    assert cold["seconds"] <= LIMIT_S
    figures = {"cold_s": cold["seconds"], "compiled_before_s": warm["seconds"], "limit_s": LIMIT_S}
    rig.report("cold", 1, engine=cold["engine"], **figures)


def test_four_processes_on_one_cache(tmp_path: Path) -> None:
    """They compile the same kernels at once, and compute the same bits."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start(tmp_path / "cache")) for _ in range(4)]
        for process in processes:  # none outlives the test when another one fails
            stack.callback(process.kill)
        assert len({told(process)["digest"] for process in processes}) == 1
