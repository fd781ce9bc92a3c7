# SPDX-License-Identifier: Apache-2.0
"""KDA in the torch engine: strong gates, the gate's options, transitions."""

from __future__ import annotations

import math

import pytest
import torch

from cptransport.plan import build_plan

INF = float("inf")


def one_sequence(lab, length=70, world_size=3, **arguments):
    return lab.make_case("kda", build_plan([0, length], world_size=world_size), **arguments)


def check(lab, engines, case, *zero):
    """Compare in fp32; returns the fp32 results."""
    case = case.to(torch.float32)
    actual = lab.chain(engines["kda"], case).run()
    for name, value in actual.items().items():
        assert value.isfinite().all(), name
    lab.compare(actual, lab.reference(case), torch.float32, *zero)
    return actual


@pytest.mark.parametrize("gate", [-5.0, -10.0, -20.0, -89.0, -0.01, 0.0])
def test_constant_gates(lab, engines, gate):
    """reports.md 16, 19. One head remembers, so that no gradient is tiny everywhere."""
    case = one_sequence(lab)
    case.inputs["g"].fill_(gate)
    case.inputs["g"][:, :, 0] = -0.01
    check(lab, engines, case)


@pytest.mark.parametrize("gate", [-1e4, -INF])
def test_gates_that_forget_everything(lab, engines, gate):
    """Then outputs see only their own token and the state's gradient is exactly zero."""
    case = one_sequence(lab)
    case.inputs["g"].fill_(gate)
    check(lab, engines, case, "dg", "dinitial")


@pytest.mark.parametrize("token", [0, 1, 15, 16, 17, 40, 69])
def test_one_token_forgets_and_its_neighbours_do_not(lab, engines, token):
    """The gradients of the other gates in the chunk stay exact."""
    case = one_sequence(lab)
    case.inputs["g"].fill_(-0.01)
    case.inputs["g"][:, token] = -INF
    actual = check(lab, engines, case, *(["dinitial"] if not token else []))
    assert not actual.grads["g"][:, token].count_nonzero()


def test_mixed_gates(lab, engines):
    """Per channel and token one of 0, -1000, -0.01, -20, -1e4, -inf."""
    case = one_sequence(lab, length=120)
    values = torch.tensor([0, -1000, -0.01, -0.01, -20, -1e4, -INF], dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    choice = torch.randint(len(values), case.inputs["g"].shape, generator=generator)
    case.inputs["g"] = values[choice]
    case.inputs["g"][:, :, 0] = -0.01  # one head remembers
    check(lab, engines, case)


def test_a_forgetful_rank_passes_nothing_on(lab, engines):
    """-inf on one token of an interior rank: its transition is exactly zero, as is what came before."""
    case = one_sequence(lab, length=60)
    case.inputs["g"][:, 30] = -INF
    chain = lab.chain(engines["kda"], case.to(torch.float32))
    chain.run()
    assert not chain.summaries["forward"][1]["transition"].count_nonzero()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_natural_log_gate_halves_the_state_exactly(lab, engines, dtype):
    """reports.md 20."""
    case = one_sequence(lab, length=1, world_size=1)
    case.inputs["g"].fill_(math.log(0.5))
    case.inputs["beta"].zero_()
    case.initial.fill_(1.0)
    final = lab.chain(engines["kda"], case.to(dtype)).run().final
    assert (final - 0.5).abs().max() <= torch.finfo(dtype).eps / 2


def test_constant_gate_in_bf16_has_an_exact_gate_gradient(lab, engines):
    """reports.md 18: within 2 bf16 eps of fp64."""
    case = one_sequence(lab, length=64)
    case.inputs["g"].fill_(-5.0)
    case = case.to(torch.bfloat16)
    actual = lab.chain(engines["kda"], case).run().grads["g"].double()
    expected = lab.reference(case).grads["g"]
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 2 * torch.finfo(torch.bfloat16).eps


def test_gates_that_matter_to_nobody_have_zero_gradients(lab, engines):
    """reports.md 18: from a zero state, one token's output does not depend on its gate."""
    plan = build_plan([0, 1, 2, 3], world_size=1)
    case = lab.make_case("kda", plan, initial=False)
    lab.compare(lab.chain(engines["kda"], case).run(), lab.reference(case), torch.float64, "dg")


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("a_log", [100.0, 89.0, 500.0, INF, -100.0])
def test_saturated_gates_stay_finite(lab, engines, a_log, lower_bound):
    case = one_sequence(
        lab,
        optional=("A_log", "dt_bias"),
        use_gate_in_kernel=True,
        lower_bound=lower_bound,
        safe_gate=lower_bound is not None,
    )
    case.inputs["g"][:, ::7] = 0.0
    case.inputs["dt_bias"].zero_()
    case.inputs["A_log"][1] = a_log
    actual = lab.chain(engines["kda"], case.to(torch.float32)).run()
    for name, value in actual.items().items():
        assert value.isfinite().all(), name
    # An input of exactly 0 meets an infinite slope: only what is finite in fp64 can be compared.
    expected = lab.reference(case)
    if lower_bound is None and a_log < 500:
        lab.compare(actual, expected, torch.float32)
    elif a_log < 500:
        for name in ("output", "final", "dq", "dk", "dv", "dbeta", "dinitial"):
            want = expected.items()[name]
            error = (actual.items()[name] - want).abs().max() / want.abs().max()
            assert error < 2e-5, name


@pytest.mark.parametrize("x", [-200.0, -60.0, -31.0, -29.0, 0.0, 25.0, 200.0])
def test_gate_inputs_of_any_size(lab, engines, x):
    """A rate that overflows fp32 may meet a softplus that vanishes in it."""
    case = one_sequence(lab, optional=("A_log",), use_gate_in_kernel=True)
    case.inputs["g"].mul_(1e-2).add_(x)
    log_softplus = x if x < -30 else math.log(math.log1p(math.exp(x)) if x < 30 else x)
    # a gate of about -0.3; whatever comes of a rate near 1; one that forgets everything
    case.inputs["A_log"][:] = torch.tensor([0.3, 1.0, 1e4]).double().log() - log_softplus
    case.inputs["A_log"][1] = 0.5
    check(lab, engines, case)


def test_transition_is_the_product_of_the_steps(lab, engines):
    """And the state update follows from it: with v = 0 the final state is M times the initial one."""
    case = one_sequence(lab, length=60)
    chain = lab.chain(engines["kda"], case)
    chain.run()
    rows = case.plan.shard(torch.arange(60)[None], 1)[0].tolist()
    k, g, beta = (case.inputs[name][0] for name in ("k", "g", "beta"))
    for head in range(3):
        product = torch.eye(8, dtype=torch.float64)
        for t in rows:
            erase = torch.eye(8) - beta[t, head] * torch.outer(k[t, head], k[t, head])
            product = erase @ torch.diag(g[t, head].exp()) @ product
        written = chain.summaries["forward"][1]["transition"][0, head]
        torch.testing.assert_close(written, product, rtol=0, atol=1e-14)
