# SPDX-License-Identifier: Apache-2.0
"""What users have reported, gates and states; the number is the report's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport import CPContext, OpInputError, build_plan, ops, threads
from cptransport.composition import COMPOSITIONS
from cptransport.testing import relative_error
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check, reference
from cptransport.testing.op_rank import RankRun, run_threads

INSIDE = {"use_gate_in_kernel": True}


def right(case: OpCase) -> list[RankRun]:
    runs = run_threads(case)
    check(case, runs)
    for run in runs:
        for x in (run.output, run.final, *run.grads.values()):
            assert x.isfinite().all()
    return runs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("gate", [0.0, -0.01, -5.0, -20.0, -math.inf])
def test_16_constant_gates(gate: float, dtype: str) -> None:
    for layout in ("contiguous", "zigzag"):
        spec = OpSpec("kda", [0, 17, 70], 3, layout, dtype=dtype, gate=gate)
        # 16-bit gradients of a state that is forgotten within a token are not bits but zeros.
        loss = ("output",) if dtype == "bfloat16" else ("output", "final")
        right(OpCase.of(spec.with_(optional=("initial_state",), loss=loss)))


@pytest.mark.parametrize("channels", ["one", "all"])
@pytest.mark.parametrize("token", [0, 1, 15, 16, 23, 24, 25, 47, 63])
def test_16_one_token_forgets_everything(token: int, channels: str) -> None:
    """At either end of a chunk, of a rank, of the sequence; one channel of one head, or all."""
    for composition in COMPOSITIONS:
        spec = OpSpec("kda", [0, 64], 3, optional=("initial_state",), composition=composition)
        case = OpCase.of(spec)
        where: Any = (0, token, 1, 3) if channels == "one" else (0, token)
        case.tokens["g"][where] = -torch.inf
        right(case)


def test_16_forgetting_is_exact() -> None:
    """Nothing of what was before a token with g = -inf is left, over ranks too."""
    case = OpCase.of(OpSpec("kda", [0, 24], 3, optional=("initial_state",)))
    case.tokens["g"][:, 10] = -torch.inf
    runs = run_threads(case)
    assert case.initial is not None
    other = replace(case, initial=case.initial + 1000)
    for x in ("k", "v"):
        other.tokens[x][:, :10] += 3
    changed = run_threads(other)
    for rank in (1, 2):
        start = 2 if rank == 1 else 0
        one, two = runs[rank].output[:, start:], changed[rank].output[:, start:]
        assert relative_error(two, one) < 1e-6
    assert relative_error(changed[2].final, runs[2].final) < 1e-6


@pytest.mark.parametrize("a_log", [-30.0, 5.0, 20.0, 80.0])
@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_16_saturated_rates(lower_bound: float | None, a_log: float) -> None:
    options = {**INSIDE} if lower_bound is None else {**INSIDE, "lower_bound": lower_bound}
    for dtype in ("float64", "float32"):
        spec = OpSpec("kda", [0, 50], 3, dtype=dtype, options=options)
        case = OpCase.of(spec.with_(optional=("A_log", "dt_bias", "initial_state")))
        case.parameters["A_log"].fill_(a_log)
        runs = run_threads(case)
        for run in runs:
            for x in (run.output, run.final, *run.grads.values()):
                assert x.isfinite().all()
        whole = reference(case)
        for rank, run in enumerate(runs):
            expected = case.plan.shard(whole.output, rank)
            assert relative_error(run.output, expected) < (1e-9 if dtype == "float64" else 2e-5)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("decay", [-0.01, -5.0, -20.0])
def test_16_constant_decays_of_ssd(decay: float, chunk_size: int) -> None:
    for dtype in ("float32", "float64"):
        spec = OpSpec("ssd", [0, 17, 150], 3, dtype=dtype, options={"chunk_size": chunk_size})
        case = OpCase.of(spec.with_(optional=("initial_states",)))
        case.tokens["dt"].fill_(0.5)
        case.parameters["A"].fill_(2 * decay)
        right(case)


def test_18_the_gradient_of_strong_gates_in_bf16() -> None:
    """g = -5: dg within 2 bf16-eps of fp64."""
    limit = 2 * torch.finfo(torch.bfloat16).eps
    for world_size in (1, 3):
        case = OpCase.of(OpSpec("kda", [0, 96], world_size, dtype="bfloat16", gate=-5.0))
        whole = reference(case).grads["g"]
        for rank, run in enumerate(run_threads(case)):
            assert relative_error(run.grads["g"], case.plan.shard(whole, rank)) < limit


def test_18_only_diagonal_terms() -> None:
    """Sequences of one token without an initial state: the gate meets nothing, dg is exactly 0."""
    for dtype in ("float32", "bfloat16"):
        spec = OpSpec("kda", list(range(13)), 3, dtype=dtype, gate=-5.0)
        runs = run_threads(OpCase.of(spec))
        assert all(not run.grads["g"].count_nonzero() for run in runs)
        assert any(run.grads["k"].count_nonzero() for run in runs)


def test_19_backward_of_the_plain_path() -> None:
    """g = -10 over 64 tokens: an exponential before a mask would be inf, times 0."""
    for world_size in (1, 2):
        right(OpCase.of(OpSpec("kda", [0, 64], world_size, gate=-10.0)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("tokens", "world_size"), [(1, 1), (1, 2), (2, 2), (3, 2)])
def test_20_a_gate_of_ln_half_halves(tokens: int, world_size: int, dtype: torch.dtype) -> None:
    """Gates are natural logs: exactly half of the state is left after every token."""
    plan = build_plan([0, tokens], world_size=world_size)
    half = math.log(0.5)

    def body(transport: threads.ThreadTransport) -> tuple[Tensor, Tensor]:
        local = plan.for_rank(transport.rank).num_tokens
        context = CPContext(plan, transport)
        zeros = torch.zeros(1, local, 3, 8, dtype=dtype)
        _, kda = ops.chunk_kda(
            zeros,
            zeros,
            torch.zeros(1, local, 3, 12, dtype=dtype),
            torch.full_like(zeros, half),
            torch.zeros(1, local, 3, dtype=dtype),
            cp_context=context,
            initial_state=torch.ones(1, 3, 8, 12),
            output_final_state=True,
        )
        result = ops.mamba_chunk_scan_combined(
            torch.zeros(1, local, 3, 12, dtype=dtype),
            torch.ones(1, local, 3, dtype=dtype),
            torch.full((3,), half, dtype=dtype),
            zeros,
            zeros,
            16,
            cp_context=context,
            initial_states=torch.ones(1, 3, 12, 8),
            return_final_states=True,
        )
        assert kda is not None
        return kda, result[1]

    runs = threads.run(body, world_size, 20.0)
    owner = plan.owner(0)
    for state in runs[owner]:
        left = torch.full_like(state, 0.5**tokens)
        assert relative_error(state, left) <= (0 if tokens == 1 else 1e-6)


@pytest.mark.parametrize("state_v_first", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_21_two_calls_equal_one(world_size: int, state_v_first: bool) -> None:
    """K = V = 16: no shape tells the axes of a state apart."""
    options = {"state_v_first": state_v_first}
    spec = OpSpec("kda", [0, 40], world_size, key_dim=16, value_dim=16, dtype="float64")
    case = OpCase.of(spec.with_(optional=("initial_state",), options=options))
    whole = reference(case)
    cut = 23
    plans = [build_plan([0, n], world_size=world_size, layout="zigzag") for n in (cut, 40 - cut)]

    def call(plan: Any, start: int, initial: Tensor) -> Callable[[Any], tuple[Tensor, Tensor]]:
        def body(transport: threads.ThreadTransport) -> tuple[Tensor, Tensor]:
            local = {
                name: plan.shard(x[:, start : start + plan.total_rows], transport.rank)
                for name, x in case.tokens.items()
            }
            o, final = ops.chunk_kda(
                **local,
                **options,
                cp_context=CPContext(plan, transport),
                initial_state=initial,
                output_final_state=True,
            )
            assert final is not None
            return o, final

        return body

    assert case.initial is not None
    first = threads.run(call(plans[0], 0, case.initial), world_size, 20.0)
    between = torch.stack([final for _, final in first]).sum(0)
    second = threads.run(call(plans[1], cut, between), world_size, 20.0)
    o = torch.cat(
        [
            plan.unshard([o for o, _ in results])
            for plan, results in zip(plans, (first, second), strict=True)
        ],
        1,
    )
    assert relative_error(o, whole.output) < 1e-9
    final = torch.stack([final for _, final in second]).sum(0)
    assert relative_error(final, whole.final) < 1e-9
    assert relative_error(final.mT, whole.final) > 1e-2  # the test could tell


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_23_weak_decay(op: str) -> None:
    """All that a rank sends reaches the last one; the transition is never left out."""
    spec = OpSpec(op, [0, 256], 4, gate=-0.01, optional=(), dtype="float32")
    if op == "ssd":
        spec = spec.with_(options={"chunk_size": 64})
    case = OpCase.of(spec)
    if op == "ssd":
        case.tokens["dt"].fill_(0.1)
        case.parameters["A"].fill_(-0.1)
    right(case)


@pytest.mark.parametrize("key_dim", [64, 128])
def test_36_head_sizes(key_dim: int) -> None:
    right(OpCase.of(OpSpec("kda", [0, 13, 40], 2, key_dim=key_dim, value_dim=64)))


def test_36_gate_dtypes_in_turn() -> None:
    """fp32, bf16, fp32 gates in one process, T = 1500 with a tail chunk."""
    results = []
    for gates in ("float32", "bfloat16", "float32"):
        spec = OpSpec("kda", [0, 1500], 2, dtype="bfloat16", gate_dtype=gates)
        case = OpCase.of(spec)
        runs = run_threads(case)
        (alone,) = run_threads(OpCase.of(spec.with_(world_size=1)))
        for rank, run in enumerate(runs):
            expected = case.plan.shard(alone.output, rank)
            assert relative_error(run.output, expected) <= 5e-3
            assert run.grads["g"].dtype == getattr(torch, gates)
        results.append(runs)
    for one, other in zip(results[0], results[2], strict=True):
        assert torch.equal(one.output, other.output)
        assert torch.equal(one.grads["g"], other.grads["g"])


def test_36_unsupported_head_sizes() -> None:
    plan = build_plan([0, 4], world_size=1)

    def body(transport: threads.ThreadTransport) -> None:
        for keys, values, name in ((257, 8, "K"), (8, 300, "V")):
            q, v = torch.randn(1, 4, 3, keys), torch.randn(1, 4, 3, values)
            with pytest.raises(OpInputError, match=f"{name} must be between 1 and 256"):
                ops.chunk_kda(q, q, v, -q.abs(), v[..., 0], cp_context=CPContext(plan, transport))

    threads.run(body, 1, 20.0)
