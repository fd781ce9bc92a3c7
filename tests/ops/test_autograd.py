# SPDX-License-Identifier: Apache-2.0
"""The ops as citizens of autograd: micro-batches, checkpointing, ranks without a loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import cptransport
from cptransport import (
    CPContext,
    OpInputError,
    PeerFailedError,
    TransportTimeoutError,
    threads,
)
from cptransport.composition import COMPOSITIONS
from cptransport.ops import (
    causal_conv1d,
    chunk_kda,
    kda_backward,
    kda_forward,
    ssd_backward,
    ssd_forward,
)
from cptransport.testing import relative_error
from cptransport.testing.op_cases import INITIAL, OPS, OpCase, OpSpec
from cptransport.testing.op_oracle import check, reference
from cptransport.testing.op_rank import RankCall, RankRun, run_rank, run_threads, settings

Transport = threads.ThreadTransport

#: Different local lengths on every rank, one of them 0, and a document over three ranks.
UNEVEN = {"cu_seqlens": (0, 6, 23, 31), "world_size": 4, "boundaries": (0, 9, 9, 14, 31)}


def uneven(op: str, seed: int = 0, **more: Any) -> OpCase:
    options = {"chunk_size": 16} if op in ("ssd", "mixer") else {}
    spec = OpSpec(op, **UNEVEN, dtype="float64", options=options, seed=seed)
    return OpCase.of(spec.with_(optional=(INITIAL[op],), **more))


@pytest.mark.parametrize("op", OPS)
def test_every_rank_has_another_length_and_one_has_none(op: str) -> None:
    """Report 4 and the user's packing: lengths 9, 0, 5, 17."""
    for composition in COMPOSITIONS:
        case = uneven(op, composition=composition)
        check(case, run_threads(case))


@pytest.mark.parametrize(
    "order", ["F1 F2 B1 B2", "F1 F2 B2 B1", "F1 B1 F2 B2", "F1 F2 F3 B2 B3 B1"]
)
@pytest.mark.parametrize("op", OPS)
def test_14_micro_batches_in_flight(op: str, order: str) -> None:
    """Report 14: what a backward needs is not what lies in the buffers by then."""
    cases = {name: uneven(op, seed=i) for i, name in enumerate("123")}

    def body(transport: Transport) -> dict[str, RankRun]:
        live = {name: RankCall(transport, case) for name, case in cases.items()}
        done = {}
        for step in order.split():
            if step[0] == "F":
                live[step[1]].forward()
            else:
                done[step[1]] = live[step[1]].backward()
        return done

    results = threads.run(body, 4, 20.0)
    assert results[0]
    for name in results[0]:
        check(cases[name], [result[name] for result in results])


def test_buffers_grow_and_shrink_between_micro_batches() -> None:
    """Report 51: T = 64, then 256, then 64 again, on one transport."""
    cases = [
        OpCase.of(OpSpec("kda", offsets, 2, dtype="float64", seed=i))
        for i, offsets in enumerate(([0, 64], [0, 5, 90, 170, 256], [0, 64]))
    ]

    def body(transport: Transport) -> list[RankRun]:
        return [RankCall(transport, case).forward().backward() for case in cases]

    results = threads.run(body, 2, 20.0)
    for i, case in enumerate(cases):
        check(case, [result[i] for result in results])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("op", OPS)
def test_activation_checkpointing(op: str, use_reentrant: bool) -> None:
    cases = [uneven(op, seed=seed) for seed in range(2)]

    def body(transport: Transport) -> list[RankRun]:
        live = [RankCall(transport, case).checkpointed(use_reentrant) for case in cases]
        runs = [each.backward() for each in live]
        runs.append(RankCall(transport, cases[0]).forward().backward())  # still usable
        return runs

    results = threads.run(body, 4, 20.0)
    for i, case in enumerate([*cases, cases[0]]):
        # The backward moves what the forward it runs again does.
        check(case, [result[i] for result in results], exact_bytes=False)


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("op", OPS)
def test_40_loss_on_one_rank_only(op: str, rank: int) -> None:
    """Report 40: the others have a constant loss and ``join_backward``; gradients cross ranks."""
    case = uneven(op, loss_ranks=(rank,))
    runs = run_threads(case)
    check(case, runs)


@pytest.mark.parametrize("op", ["kda", "ssd", "conv1d"])
def test_40_gradients_reach_the_ranks_before(op: str) -> None:
    spec = OpSpec(op, [0, 24], 2, options={"chunk_size": 16} if op == "ssd" else {})
    case = OpCase.of(spec.with_(loss_ranks=(1,), loss=("output",)))
    runs = run_threads(case)
    check(case, runs)
    reached = {"kda": ("k", "v", "g", "beta"), "ssd": ("x", "dt", "B"), "conv1d": ("x",)}[op]
    for name in reached:
        assert runs[0].grads[name].abs().max() > 1e-3, name


def test_losses_that_reach_one_output_only() -> None:
    """An empty slice of o counts, and so does the final state alone, on non-owners too."""
    for op in OPS:
        for loss in (("output",), ("final",)):
            case = uneven(op, loss=loss)
            check(case, run_threads(case))
    case = uneven("kda", loss_ranks=(0,))

    def body(transport: Transport) -> dict[str, Tensor]:
        batch = RankCall(transport, case).forward()
        if transport.rank == 0:
            batch.backward()
        else:
            batch.output[:, :0].sum().backward()
        return {n: leaf.grad for n, leaf in batch.leaves.items() if leaf.grad is not None}

    grads = threads.run(body, 4, 20.0)
    whole = reference(case).grads["k"]
    for rank in range(4):
        assert relative_error(grads[rank]["k"], case.plan.shard(whole, rank)) < 1e-9


def test_join_backward_passes_the_loss_through() -> None:
    o = torch.full((2, 3), torch.nan, requires_grad=True)
    x = torch.tensor(3.0, requires_grad=True)
    loss = cptransport.join_backward(x * 2, o)
    assert loss.item() == 6.0
    loss.backward()
    assert x.grad is not None
    assert x.grad.item() == 2.0
    assert o.grad is not None
    assert not o.grad.count_nonzero()
    constant = cptransport.join_backward(torch.tensor(1.5), o)
    assert constant.item() == 1.5
    assert constant.requires_grad


@pytest.mark.parametrize("composition", ["gather", "handoff"])
def test_a_rank_that_ignores_the_op_is_named_by_its_peers(composition: str) -> None:
    """Without ``join_backward`` those that need the rank time out, and say for whom they waited."""
    case = OpCase.of(OpSpec("kda", [0, 16], 4, composition=composition))

    def body(transport: Transport) -> str:
        with settings(case.spec):
            batch = RankCall(transport, case).forward()
            if transport.rank == 2:
                return "ignores its outputs"
            try:
                batch.backward()
            except (TransportTimeoutError, PeerFailedError) as error:
                return str(error)
        return "needs nobody"

    results = threads.run(body, 4, 1.0)
    # In a handoff rank 0 waits for rank 1; whose wait ends first is a matter of milliseconds.
    named = ("rank 2",) if composition == "gather" else ("rank 1", "rank 2")
    for text in results[:2]:
        assert "waited" in text, results
        assert any(name in text for name in named), results
    assert results[3] == "needs nobody"


@pytest.mark.parametrize("op", OPS)
def test_double_backward_raises(op: str) -> None:
    case = uneven(op)

    def body(transport: Transport) -> str:
        batch = RankCall(transport, case).forward()
        leaves = tuple(batch.leaves.values())
        grads = torch.autograd.grad(batch.output.sum(), leaves, create_graph=True)
        with pytest.raises(OpInputError, match="double backward"):
            torch.autograd.grad(grads[0].sum(), leaves, allow_unused=True)
        return "raised"

    assert threads.run(body, 4, 20.0) == ["raised"] * 4


def test_inputs_without_gradients_get_none() -> None:
    case = uneven("kda")

    def body(transport: Transport) -> dict[str, Tensor | None]:
        batch = RankCall(transport, case)
        for name in ("q", "g"):
            batch.leaves[name].requires_grad_(False)
        batch.forward()
        batch.output.sum().backward()
        return {name: leaf.grad for name, leaf in batch.leaves.items()}

    for grads in threads.run(body, 4, 20.0):
        assert {name for name, grad in grads.items() if grad is None} == {"q", "g"}


def test_no_grad_moves_no_gradients() -> None:
    case = uneven("kda")

    def body(transport: Transport) -> tuple[bool, int]:
        with torch.no_grad():
            batch = RankCall(transport, case).forward()
        return batch.output.requires_grad, transport.stats().messages

    results = threads.run(body, 4, 20.0)
    assert not any(tracked for tracked, _ in results)
    assert any(messages for _, messages in results)


def test_13_fused_projections() -> None:
    """Report 13: q, k, v split from one projection, three convolutions, grads that are expanded."""
    torch.manual_seed(0)
    case = OpCase.of(OpSpec("kda", [0, 7, 26], 2, dtype="float64", value_dim=8))
    plan, width = case.plan, 3 * 8
    fused = torch.randn(1, 26, 3 * width, dtype=torch.float64)
    weights = [torch.randn(width, 4, dtype=torch.float64) for _ in range(3)]
    gates = {name: case.tokens[name] for name in ("g", "beta")}

    def layer(context: CPContext, x: Tensor, local: dict[str, Tensor]) -> Tensor:
        pieces = [
            causal_conv1d(piece, weight, cp_context=context, activation="silu")[0]
            for piece, weight in zip(x.split(width, -1), weights, strict=True)
        ]
        q, k, v = (piece.unflatten(-1, (3, 8)) for piece in pieces)
        return chunk_kda(q, k / 3, v, **local, cp_context=context)[0]

    def body(transport: Transport) -> tuple[Tensor, Tensor]:
        whole = cptransport.build_plan(plan.cu_seqlens, world_size=transport.world_size)
        x = whole.shard(fused, transport.rank).detach().clone().requires_grad_()
        local = {name: whole.shard(t, transport.rank) for name, t in gates.items()}
        o = layer(CPContext(whole, transport), x, local)
        o.sum().backward()  # the gradient is an expanded scalar
        assert x.grad is not None
        return o.detach(), x.grad

    (alone,) = threads.run(body, 1, 20.0)
    runs = threads.run(body, 2, 20.0)
    for i in range(2):
        together = plan.unshard([run[i] for run in runs])
        assert relative_error(together, alone[i]) < 1e-9


def test_explicit_backward_refuses_gradients_of_other_shapes() -> None:
    case = OpCase.of(OpSpec("kda", [0, 8], 1))
    ssd = OpCase.of(OpSpec("ssd", [0, 8], 1, options={"chunk_size": 16}))

    def body(transport: Transport) -> None:
        context = CPContext(case.plan, transport)
        one = kda_forward(**case.tokens, cp_context=context)
        with pytest.raises(OpInputError, match=r"do must be \[B, T, HV, V\]"):
            kda_backward(one.saved, one.o[:, 1:])
        with pytest.raises(OpInputError, match="d_final_state"):
            kda_backward(one.saved, one.o, one.o)
        two = ssd_forward(**ssd.tokens, **ssd.parameters, chunk_size=16, cp_context=context)
        with pytest.raises(OpInputError, match="dy must be"):
            ssd_backward(two.saved, two.y[..., 1:])
        assert one.final_state is None
        assert two.final_states is None

    threads.run(body, 1, 20.0)


def test_world_size_one_communicates_nothing() -> None:
    for op in OPS:
        case = uneven(op, world_size=1, boundaries=None)

        def body(transport: Transport, case: OpCase = case) -> tuple[Any, RankRun]:
            run = run_rank(transport, case)
            return (transport.stats(), dict(transport._generations)), run

        ((stats, generations), run), *_ = threads.run(body, 1, 20.0)
        assert (stats.messages, stats.bytes_sent, stats.bytes_received) == (0, 0, 0)
        assert not generations  # nothing was even staged
        check(case, [run])
