# SPDX-License-Identifier: Apache-2.0
"""The interior rank alone gives the bits that it gave among its peers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport import CPContext, PartSpec, Slot, TransportError, build_plan
from cptransport.errors import GenerationError
from cptransport.ops import (
    chunk_kda,
    kda_backward,
    kda_forward,
    mamba_split_conv1d_scan_combined,
)
from cptransport.testing.recorded import RecordedTransport, record
from cptransport.transport import BoundaryTransport

WORLD_SIZE = 4
CU_SEQLENS = [0, 41, 57, 128]

Step = Callable[[BoundaryTransport], dict[str, Tensor]]


def kda_inputs(tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "q": torch.randn(1, tokens, 2, 8),
        "k": torch.nn.functional.normalize(torch.randn(1, tokens, 2, 8), dim=-1),
        "v": torch.randn(1, tokens, 4, 6),
        "g": -torch.rand(1, tokens, 4, 8),
        "beta": torch.rand(1, tokens, 4),
        "do": torch.randn(1, tokens, 4, 6),
    }


def kda(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cp: CPContext) -> Any:
    return chunk_kda(q, k, v, g, beta, cp_context=cp, output_final_state=True, engine="torch")


def mixer_inputs(tokens: int) -> dict[str, Tensor]:
    torch.manual_seed(2)
    heads, headdim, groups, dstate = 4, 4, 2, 6
    width = 2 * heads * headdim + 2 * groups * dstate + heads
    channels = heads * headdim + 2 * groups * dstate
    return {
        "zxbcdt": torch.randn(1, tokens, width),
        "weight": torch.randn(channels, 4),
        "dt_bias": torch.randn(heads),
        "A": -torch.rand(heads),
        "D": torch.randn(heads),
        "do": torch.randn(1, tokens, heads * headdim),
    }


def mixer(
    zxbcdt: Tensor, weight: Tensor, dt_bias: Tensor, A: Tensor, D: Tensor, cp: CPContext
) -> Any:
    return mamba_split_conv1d_scan_combined(
        zxbcdt,
        weight,
        None,
        dt_bias,
        A,
        D,
        16,
        cp_context=cp,
        headdim=4,
        ngroups=2,
        return_final_states=True,
        engine="torch",
    )


OPS: Mapping[str, Any] = {"kda": (kda, kda_inputs), "mixer": (mixer, mixer_inputs)}


def step_of(op: str, layout: str) -> Step:
    fn, make = OPS[op]
    plan = build_plan(CU_SEQLENS, world_size=WORLD_SIZE, layout=layout)
    everything = make(plan.total_rows)

    def step(transport: BoundaryTransport) -> dict[str, Tensor]:
        local = {
            name: plan.shard(x, transport.rank).clone() if x.dim() > 2 else x.clone()
            for name, x in everything.items()
        }
        do = local.pop("do")
        leaves = {name: x.requires_grad_() for name, x in local.items()}
        o, final = fn(**leaves, cp=CPContext(plan, transport))
        grads = torch.autograd.grad([o, final], list(leaves.values()), [do, final.detach()])
        return {"o": o.detach(), "final": final.detach(), **dict(zip(leaves, grads, strict=True))}

    return step


def assert_same_bits(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert value.isfinite().all(), name
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("composition", ["gather", "handoff", "scan"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag_per_sequence"])
@pytest.mark.parametrize("op", OPS)
def test_replay_gives_the_bits_of_the_run_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch, op: str, layout: str, composition: str
) -> None:
    monkeypatch.setenv("CULA_CP_COMPOSITION", composition)
    step = step_of(op, layout)
    results, recordings = record(step, WORLD_SIZE)
    for rank, recording in enumerate(recordings):
        with RecordedTransport(recording) as alone:
            for _ in range(3):  # replays go round
                assert_same_bits(step(alone), results[rank])


def test_replay_counts_the_bytes_of_the_real_run() -> None:
    step = step_of("kda", "contiguous")

    def counted(transport: BoundaryTransport) -> tuple[int, int, Any]:
        step(transport)
        stats = transport.stats()
        return stats.bytes_sent, stats.bytes_received, stats.by_part

    results, recordings = record(counted, WORLD_SIZE)
    assert results[2][1] > 0
    assert [counted(RecordedTransport(r)) for r in recordings] == results


def test_the_peers_matter() -> None:
    step = step_of("kda", "contiguous")
    results, recordings = record(step, WORLD_SIZE)
    ((_, parts),) = recordings[2].generations["kda.forward"]
    parts["state", 1].mul_(1.01)
    changed = step(RecordedTransport(recordings[2]))
    assert not torch.equal(changed["o"], results[2]["o"])


def test_buffers_and_tables_keep_their_addresses() -> None:
    slot = Slot("s", (PartSpec("state", (2, 3), torch.float32, frozenset({(0, 1), (1, 0)})),))

    def exchange(transport: BoundaryTransport) -> tuple[int, Tensor]:
        staged = transport.stage(slot)["state"]
        staged.fill_(transport.rank + 1)
        transport.publish(slot)
        table = transport.gather(slot).addresses["state"]
        return staged.data_ptr(), table

    _, recordings = record(exchange, 2)
    alone = RecordedTransport(recordings[0])
    first, second = exchange(alone), exchange(alone)
    assert first[0] == second[0] == first[1][0].item()
    assert first[1] is second[1]
    received = alone.fetch(slot, "state", source=1)
    assert received.data_ptr() == first[1][1].item()
    assert torch.equal(received, torch.full((2, 3), 2.0))


def test_what_was_not_recorded_is_an_error() -> None:
    part = PartSpec("state", (2,), torch.float32, frozenset({(0, 1), (1, 0)}))
    slot = Slot("s", (part,))

    def publish_only(transport: BoundaryTransport) -> None:
        transport.stage(slot)["state"].zero_()
        transport.publish(slot)
        if transport.rank == 1:
            transport.fetch(slot, "state", source=0)

    _, recordings = record(publish_only, 2)
    alone = RecordedTransport(recordings[0])
    with pytest.raises(TransportError, match="slot 'other' was not recorded"):
        alone.stage(Slot("other", (part,)))
    wider = Slot("s", (PartSpec("state", (3,), torch.float32, part.routes),))
    with pytest.raises(TransportError, match="other parts than its recorded generation 1"):
        alone.stage(wider)
    alone.stage(slot)
    with pytest.raises(GenerationError, match="other parts"):
        alone.fetch(wider, "state", source=1)
    with pytest.raises(TransportError, match=r"\[\('state', 1\)\] was not recorded"):
        alone.fetch(slot, "state", source=1)


def test_checks_between_ranks_pass_without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    step = step_of("kda", "contiguous")
    results, recordings = record(step, WORLD_SIZE)
    alone = RecordedTransport(recordings[2])
    assert_same_bits(step(alone), results[2])
    alone.control.note("engine", "mine")
    assert alone.control.notes("engine") == [""] * WORLD_SIZE


@pytest.mark.gpu
def test_verbs_on_cuda_can_be_captured_and_never_wait_for_the_device() -> None:
    routes = frozenset({(0, 1), (1, 0)})
    slot = Slot("s", (PartSpec("state", (64, 64), torch.float32, routes),))
    mine = torch.zeros(64, 64, device="cuda:0")

    def exchange(transport: BoundaryTransport) -> tuple[Tensor, Tensor]:
        transport.stage(slot)["state"].copy_(mine + transport.rank)
        transport.publish(slot)
        gathered = transport.gather(slot)
        both = gathered.tensor("state", 0) + 10 * gathered.tensor("state", 1)
        return both, gathered.addresses["state"]

    results, recordings = record(exchange, 2, device="cuda:0")
    alone = RecordedTransport(recordings[0])
    assert alone.device == torch.device("cuda", 0)
    for _ in range(2):
        assert torch.equal(exchange(alone)[0], results[0][0])
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        exchange(alone)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, table = exchange(alone)
    mine.fill_(5)
    graph.replay()
    assert torch.equal(captured, torch.full_like(mine, 5 + 10))
    assert (table != 0).all()


@pytest.mark.gpu
def test_replay_on_cuda_gives_the_bits_of_the_run_on_all_ranks() -> None:
    plan = build_plan(CU_SEQLENS, world_size=WORLD_SIZE)
    everything = {name: x.cuda() for name, x in kda_inputs(plan.total_rows).items()}

    def step(transport: BoundaryTransport) -> dict[str, Tensor]:
        local = {name: plan.shard(x, transport.rank) for name, x in everything.items()}
        do, cp = local.pop("do"), CPContext(plan, transport)
        result = kda_forward(**local, cp_context=cp, engine="torch")
        grads = kda_backward(result.saved, do)
        return {"o": result.o, **{name: getattr(grads, f"d{name}") for name in local}}

    results, recordings = record(step, WORLD_SIZE, device="cuda:0")
    for rank, recording in enumerate(recordings):
        assert_same_bits(step(RecordedTransport(recording)), results[rank])
