# SPDX-License-Identifier: Apache-2.0
"""``chunk_kda`` as a whole on a GPU: graphs, no waiting for the device, cold start, ``torch.compile``."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import cptransport
from cptransport.ops import chunk_kda, kda_backward, kda_forward
from cptransport.testing.recorded import RecordedTransport, record
from cptransport.transport import BoundaryTransport

pytestmark = pytest.mark.gpu

TOKENS, HEADS, DIM = 320, 2, 128
Step = Callable[[], tuple[Tensor, ...]]


def inputs() -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shape = (1, TOKENS, HEADS, DIM)
    q, k, v, g = (torch.randn(shape, generator=generator, device="cuda") for _ in range(4))
    beta = torch.rand(shape[:3], generator=generator, device="cuda")
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    return [x.requires_grad_() for x in (q.bfloat16(), k.bfloat16(), v.bfloat16(), -g.abs(), beta)]


def loopback() -> cptransport.CPContext:
    transport = cptransport.create_transport(backend="loopback", device="cuda")
    plan = cptransport.build_plan([0, 100, 101, TOKENS], world_size=1)
    return cptransport.CPContext(plan, transport)


def interior() -> cptransport.CPContext:
    """Rank 2 of 4 with recorded peers."""
    plan = cptransport.build_plan([0, 4 * TOKENS], world_size=4)

    def call(transport: BoundaryTransport) -> None:
        with torch.no_grad():
            x = inputs()
            context = cptransport.CPContext(plan, transport)
            done = kda_forward(*x, cp_context=context, engine="triton")
            kda_backward(done.saved, torch.ones_like(done.o))

    recording = record(call, 4, device="cuda:0")[1][2]
    return cptransport.CPContext(plan, RecordedTransport(recording, "cuda:0"))


def forward_backward(context: cptransport.CPContext, *, final: bool = False) -> Step:
    x = inputs()
    shape = (context.plan.num_sequences, HEADS, DIM, DIM)
    initial = torch.randn(shape, device="cuda").requires_grad_() if final else None

    def step() -> tuple[Tensor, ...]:
        o, state = chunk_kda(
            *x, cp_context=context, initial_state=initial, output_final_state=final, engine="triton"
        )
        outputs = [o] if state is None else [o, state]
        leaves = x if initial is None else [*x, initial]
        grads = torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
        return (*(y.detach() for y in outputs), *grads)

    return step


CONTEXTS = {"loopback": loopback, "interior": interior}


@pytest.mark.parametrize("final", [False, True], ids=["plain", "states"])
@pytest.mark.parametrize("where", CONTEXTS)
def test_the_whole_op_neither_waits_nor_breaks_capture(where: str, final: bool) -> None:
    step = forward_backward(CONTEXTS[where](), final=final)
    for _ in range(3):  # both generations of every slot
        expected = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(captured, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_program_gives_the_same_bits(backend: str) -> None:
    context = loopback()

    def layer(*x: Tensor) -> Tensor:
        return chunk_kda(*x, cp_context=context, engine="triton")[0] * 2.0

    torch._dynamo.reset()
    found = []
    for run in (layer, torch.compile(layer, backend=backend, fullgraph=True)):
        x = inputs()
        o = run(*x)
        found.append((o.detach(), *torch.autograd.grad(o, x, torch.ones_like(o))))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def start(cache: Path) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TRITON_CACHE_DIR": str(cache),
    }
    return subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("cold_start.py"))],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])  # type: ignore[no-any-return]


def test_cold_start_takes_at_most_a_minute(tmp_path: Path) -> None:
    cold = result(start(tmp_path))
    warm = result(start(tmp_path))
    assert cold["seconds"] <= 60
    assert warm["seconds"] < cold["seconds"]
    assert warm["checksum"] == cold["checksum"]


def test_four_processes_start_at_once_on_one_cache(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(start(tmp_path)) for _ in range(4)]
        for process in processes:  # none outlives the test when another one fails
            stack.callback(process.kill)
        found = [result(process) for process in processes]
    assert len({each["checksum"] for each in found}) == 1
    assert max(each["seconds"] for each in found) <= 120
