# SPDX-License-Identifier: Apache-2.0
"""SSD in the torch engine: chunk sizes, clamped steps, extreme decays."""

from __future__ import annotations

import pytest
import torch

from cptransport.plan import build_plan

INF = float("inf")


def one_sequence(lab, length=70, world_size=3, **arguments):
    plan = build_plan([0, length], world_size=world_size)
    return lab.make_case("ssd", plan, heads=(2, 4), dims=(5, 6), **arguments)


def check(lab, engines, case, *zero):
    case = case.to(torch.float32)
    actual = lab.chain(engines["ssd"], case).run()
    for name, value in actual.items().items():
        assert value.isfinite().all(), name
    lab.compare(actual, lab.reference(case), torch.float32, *zero)
    return actual


@pytest.mark.parametrize("chunk_size", [16, 32, 64, 256])
@pytest.mark.parametrize("length", [63, 64, 65, 129, 200])
def test_chunk_sizes(lab, engines, chunk_size, length):
    """reports.md 32, 33, 35."""
    case = one_sequence(lab, length, 2, chunk_size=chunk_size, optional=("D", "z"))
    check(lab, engines, case)


@pytest.mark.parametrize("heads", [(1, 4), (2, 4), (4, 4)])
@pytest.mark.parametrize("optional", [(), ("D",), ("D2",), ("D2", "z", "dt_bias")])
def test_groups_and_optional_inputs(lab, engines, heads, optional):
    plan = build_plan([0, 21, 50], world_size=3)
    case = lab.make_case("ssd", plan, heads=heads, dims=(5, 6), optional=optional)
    lab.compare(lab.chain(engines["ssd"], case).run(), lab.reference(case), torch.float64)


def test_clamped_steps_have_no_gradient(lab, engines):
    case = one_sequence(lab, dt_min=0.4, dt_max=1.0)
    actual = check(lab, engines, case)
    d = case.inputs["dt"]
    outside = (d < 0.4) | (d > 1.0)
    assert 20 < outside.sum() < outside.numel() - 20
    assert not actual.grads["dt"][outside].count_nonzero()
    assert actual.grads["dt"][~outside].all()


def test_a_step_of_zero_keeps_the_state(lab, engines):
    case = one_sequence(lab)
    case.inputs["dt"][:, ::3] = 0.0
    check(lab, engines, case)


def test_a_step_of_zero_keeps_the_state_of_a_head_that_forgets_at_all_others(lab, engines):
    """A = -inf, where exp(A d) = exp(-inf * 0) would be NaN."""
    case = one_sequence(lab, length=40, world_size=2, initial=False).to(torch.float32)
    case.inputs["A"][1] = -INF
    case.inputs["dt"][:, 30:, 1] = 0.0
    result = lab.chain(engines["ssd"], case).run()
    for name, value in result.items().items():
        assert value.isfinite().all(), name
    x, dt, B = (case.inputs[name][0, 29] for name in ("x", "dt", "B"))
    torch.testing.assert_close(result.final[0, 1], dt[1] * torch.outer(x[1], B[0]))


@pytest.mark.parametrize("a", [-20.0, -1e4, -3e38, -INF])
def test_strong_decay(lab, engines, a):
    case = one_sequence(lab)
    case.inputs["A"][1:3] = a
    check(lab, engines, case)


def test_steps_of_any_size(lab, engines):
    case = one_sequence(lab, optional=("dt_bias",), dt_softplus=True)
    case.inputs["dt"][:, ::5] = 30.0
    case.inputs["dt"][:, 1::5] = -40.0
    case.inputs["A"].fill_(-0.3)
    check(lab, engines, case)


def test_transition_is_the_sum_of_log_decays(lab, engines):
    case = one_sequence(lab, length=60)
    chain = lab.chain(engines["ssd"], case)
    chain.run()
    expected = (case.inputs["A"] * case.inputs["dt"])[:, 20:40].sum(1)
    written = chain.summaries["forward"][1]["transition"]
    torch.testing.assert_close(written, expected, rtol=0, atol=1e-13)
    assert torch.equal(chain.summaries["backward"][1]["transition"], written)
