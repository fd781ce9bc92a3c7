# SPDX-License-Identifier: Apache-2.0
"""What an independent reading of the ops' contract found; each case failed once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from cptransport import (
    BackendFallbackWarning,
    BoundaryTransport,
    CPContext,
    EnvVarError,
    OpInputError,
    PeerFailedError,
    UnsupportedOptionError,
    build_plan,
    notices,
    threads,
)
from cptransport.ops import causal_conv1d, chunk_kda, kda_forward, ssd_forward

PLAN = build_plan([0, 7, 20], world_size=2)
T, H, HV, K, V, D, W = 20, 2, 4, 8, 6, 5, 3


def on_ranks(body: Callable[[CPContext], Any]) -> list[Any]:
    return threads.run(lambda transport: body(CPContext(PLAN, transport)), 2, 10.0)


def kda_inputs(context: CPContext) -> tuple[Tensor, ...]:
    whole = [torch.randn(1, T, heads, K) / 4 for heads in (H, H, HV)]
    q, k, g = whole
    everything = (q, k, torch.randn(1, T, HV, V), -g.abs(), torch.rand(1, T, HV))
    return tuple(PLAN.shard(x, context.rank) for x in everything)


def test_validation_before_training() -> None:
    def body(context: CPContext) -> bool:
        inputs = kda_inputs(context)
        with torch.inference_mode():
            for _ in range(2):
                chunk_kda(*inputs, cp_context=context)
                causal_conv1d(inputs[2][..., 0], torch.ones(HV, W), cp_context=context)
        leaves = [x.clone().requires_grad_() for x in inputs]
        for _ in range(2):
            o, _ = chunk_kda(*leaves, cp_context=context)
            y, _ = causal_conv1d(o[..., 0], torch.ones(HV, W), cp_context=context)
            y.sum().backward()
        return all(x.grad is not None for x in leaves)

    assert on_ranks(body) == [True, True]


def second_order_of_state(context: CPContext) -> tuple[Tensor, Tensor]:
    state = torch.randn(2, HV, K, V, requires_grad=True)
    o, _ = chunk_kda(*kda_inputs(context), cp_context=context, initial_state=state)
    return o.square().sum(), state


def second_order_of_conv_state(context: CPContext) -> tuple[Tensor, Tensor]:
    state = torch.randn(2, D, W - 1, requires_grad=True)
    x = torch.randn(1, context.local.num_tokens, D)
    y, _ = causal_conv1d(
        x, torch.randn(D, W), cp_context=context, activation="silu", initial_state=state
    )
    return y.sum(), state


def second_order_of_residual(context: CPContext) -> tuple[Tensor, Tensor]:
    x, residual = torch.randn(2, 1, context.local.num_tokens, D).unbind()
    residual.requires_grad_()
    y, _ = causal_conv1d(x, torch.randn(D, W), cp_context=context, residual=residual)
    return y.square().sum(), residual


@pytest.mark.parametrize(
    "penalised", [second_order_of_state, second_order_of_conv_state, second_order_of_residual]
)
def test_no_second_order_term_is_dropped_silently(penalised: Callable[..., Any]) -> None:
    """A gradient penalty, where no input that the op keeps requires a gradient."""

    def body(context: CPContext) -> str:
        loss, asked = penalised(context)
        (gradient,) = torch.autograd.grad(loss, asked, create_graph=True)
        with pytest.raises(OpInputError, match="double backward"):
            (loss + gradient.square().sum()).backward()
        return "refused"

    assert on_ranks(body) == ["refused"] * 2


def test_dt_bias_of_the_right_size_and_the_wrong_shape() -> None:
    def body(context: CPContext) -> str:
        with pytest.raises(OpInputError, match="dt_bias"):
            chunk_kda(
                *kda_inputs(context),
                cp_context=context,
                use_gate_in_kernel=True,
                dt_bias=torch.randn(K, HV),
            )
        return "refused"

    assert on_ranks(body) == ["refused"] * 2


def test_explicit_forwards_refuse_upstream_arguments_by_name() -> None:
    def body(context: CPContext) -> str:
        q, k, v, g, beta = kda_inputs(context)
        with pytest.raises(UnsupportedOptionError, match="cu_seqlens"):
            kda_forward(q, k, v, g, beta, cp_context=context, cu_seqlens=torch.tensor([0, 7, 20]))
        with pytest.raises(UnsupportedOptionError, match="seq_idx"):
            ssd_forward(v, beta, g[0, 0, :, 0], q, k, 16, cp_context=context, seq_idx=beta)
        with pytest.raises(TypeError, match="chunk_kda.*nonsense"):
            kda_forward(q, k, v, g, beta, cp_context=context, nonsense=1)
        return "refused"

    assert on_ranks(body) == ["refused"] * 2


def test_an_engine_that_cannot_serve_warns_once_at_the_users_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notices, "_given", set())

    def body(context: CPContext) -> None:
        for _ in range(2):
            chunk_kda(*kda_inputs(context), cp_context=context, engine="cudnn")

    with pytest.warns(BackendFallbackWarning, match="cudnn") as caught:
        on_ranks(body)
    assert [warning.filename for warning in caught] == [__file__]


def test_threads_look_for_unknown_variables_like_create_transport(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CULA_CP_COMPOSTION", "gather")
    with pytest.warns(UserWarning, match="did you mean 'CULA_CP_COMPOSITION'") as caught:
        threads.run(lambda transport: transport.rank, 1)
    assert caught[0].filename == __file__
    monkeypatch.setenv("CULA_CP_STRICT", "1")
    with pytest.raises(EnvVarError, match="CULA_CP_COMPOSTION"):
        threads.run(lambda transport: transport.rank, 1)


def test_the_rank_that_failed_is_named_not_one_that_was_told() -> None:
    plan = build_plan([0, 30], world_size=3, layout="zigzag")
    told = threading.Event()

    def body(transport: BoundaryTransport) -> int | None:
        q, k, v, g, beta = (plan.shard(x, transport.rank) for x in whole)
        context, wrong = CPContext(plan, transport), transport.rank == 2
        if transport.rank == 1:
            told.wait(10.0)  # by now rank 0 has left a record too
        with pytest.raises(OpInputError if wrong else PeerFailedError) as caught:
            chunk_kda(q, k, v, g, beta, cp_context=context, allow_neg_eigval=wrong)
        if transport.rank == 0:
            told.set()
        return getattr(caught.value, "peer", None)

    inputs = torch.rand(1, 30, 2, K), torch.rand(1, 30, 2, K), torch.rand(1, 30, 2, K)
    whole = (*inputs, -torch.rand(1, 30, 2, K), torch.rand(1, 30, 2))
    assert threads.run(body, 3, 10.0) == [2, 2, None]


def test_a_convolution_costs_the_same_number_of_kernels_for_any_number_of_documents() -> None:
    def count(documents: int) -> int:
        plan = build_plan([8 * i for i in range(documents + 1)], world_size=1)
        x = torch.randn(1, 8 * documents, D, requires_grad=True)
        weight = torch.randn(D, W, requires_grad=True)

        def body(transport: BoundaryTransport) -> int:
            context = CPContext(plan, transport)
            causal_conv1d(x, weight, cp_context=context)  # fills caches
            with profile(activities=[ProfilerActivity.CPU]) as seen:
                causal_conv1d(x, weight, cp_context=context)[0].sum().backward()
            return len(seen.events())

        return threads.run(body, 1)[0]

    assert count(50) == count(2)


def test_the_check_leaves_no_keys_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")

    def body(transport: threads.ThreadTransport) -> list[int]:
        context, keys = CPContext(PLAN, transport), []
        inputs = kda_inputs(context)
        transport.check()  # a look for records makes their counter, once
        for _ in range(2):
            for _ in range(4):
                chunk_kda(*inputs, cp_context=context)
            transport.barrier()
            keys.append(transport._hub.store.num_keys())
            transport.barrier()
        return keys

    (first, second), _ = threads.run(body, 2, 10.0)
    assert second == first
