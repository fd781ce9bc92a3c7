# SPDX-License-Identifier: Apache-2.0
"""The references themselves, against other formulations: matrices, library functions, differences."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from cptransport.engines.naive import (
    naive_causal_conv1d,
    naive_kda,
    naive_mamba_split,
    naive_ssd,
)


@pytest.fixture
def normal():
    generator = torch.Generator().manual_seed(3)

    def draw(*shape, grad=False):
        x = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return x.requires_grad_() if grad else x

    return draw


def kda_inputs(normal, rows, heads=2, value_heads=4, keys=3, values=5, grad=False):
    q, k = normal(*rows, heads, keys), functional.normalize(normal(*rows, heads, keys), dim=-1)
    v, g = normal(*rows, value_heads, values), -normal(*rows, value_heads, keys).exp()
    inputs = (q, k, v, g, normal(*rows, value_heads).sigmoid())
    return tuple(x.requires_grad_(grad) for x in inputs)


def test_kda_is_a_product_of_matrices(normal):
    q, k, v, g, beta = kda_inputs(normal, (1, 7))
    start = normal(1, 4, 3, 5)
    o, final = naive_kda(q, k, v, g, beta, initial_state=start, scale=0.3)
    for head in range(4):
        state, kh, qh = start[0, head], k[0, :, head // 2], q[0, :, head // 2]
        for t in range(7):
            erase = torch.eye(3).double() - beta[0, t, head] * torch.outer(kh[t], kh[t])
            state = erase @ torch.diag(g[0, t, head].exp()) @ state
            state = state + beta[0, t, head] * torch.outer(kh[t], v[0, t, head])
            torch.testing.assert_close(o[0, t, head], 0.3 * state.T @ qh[t])
        torch.testing.assert_close(final[0, head], state)


def test_kda_options_are_what_they_say(normal):
    q, k, v, _, beta = kda_inputs(normal, (1, 6))
    x, a_log, bias = normal(1, 6, 4, 3), normal(4), normal(4, 3)

    def l2(u):
        return u * (u.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    gate = -torch.exp(a_log)[:, None] * functional.softplus(x + bias)
    expected = naive_kda(l2(3 * q), l2(k), v, gate, 2 * beta.sigmoid(), scale=3**-0.5)
    options = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True}
    options |= {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
    for shaped in (bias, bias.flatten()):
        given = naive_kda(3 * q, k, v, x, beta, A_log=a_log, dt_bias=shaped, **options)
        torch.testing.assert_close(given, expected)

    bounded = -5 * torch.sigmoid(torch.exp(a_log)[:, None] * x)
    expected = naive_kda(q, k, v, bounded, beta)
    options = {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True}
    torch.testing.assert_close(naive_kda(q, k, v, x, beta, A_log=a_log, **options), expected)

    plain = naive_kda(q, k, v, -functional.softplus(x), beta)
    torch.testing.assert_close(naive_kda(q, k, v, x, beta, use_gate_in_kernel=True), plain)


def test_kda_state_v_first_swaps_both_states(normal):
    inputs, start = kda_inputs(normal, (1, 6)), normal(1, 4, 3, 5)
    o, final = naive_kda(*inputs, initial_state=start)
    swapped = naive_kda(*inputs, initial_state=start.mT, state_v_first=True)
    torch.testing.assert_close(swapped, (o, final.mT))


def test_kda_gradients(normal):
    inputs = kda_inputs(normal, (1, 4), heads=1, value_heads=2, keys=2, values=3, grad=True)
    parameters = (normal(2, grad=True), normal(2, 2, grad=True), normal(1, 2, 2, 3, grad=True))

    def call(q, k, v, g, beta, a_log, bias, start):
        options = {"use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
        gate = {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": bias}
        return naive_kda(q, k, v, g, beta, initial_state=start, **options, **gate)

    assert torch.autograd.gradcheck(call, (*inputs, *parameters))


def ssd_inputs(normal, rows):
    shapes = ((4, 3), (4,), (2, 5), (2, 5))
    x, dt, B, C = (normal(*rows, *shape) for shape in shapes)
    return x, dt, -normal(4).exp(), B, C


def test_ssd_is_a_masked_attention(normal):
    x, dt, A, B, C = ssd_inputs(normal, (1, 6))
    D, z, bias = normal(4, 3), normal(1, 6, 4, 3), normal(4)
    y, final = naive_ssd(x, dt, A, B, C, D=D, z=z, dt_bias=bias, dt_softplus=True)
    d = torch.log1p((dt + bias).exp())
    for h in range(4):
        total = (A[h] * d[0, :, h]).cumsum(0)
        decay = (total[:, None] - total[None]).exp().tril()
        weights = (C[0, :, h // 2] @ B[0, :, h // 2].T) * decay * d[0, :, h]
        gate = z[0, :, h] / (1 + (-z[0, :, h]).exp())
        torch.testing.assert_close(y[0, :, h], (weights @ x[0, :, h] + D[h] * x[0, :, h]) * gate)
        state = (decay[-1] * d[0, :, h] * x[0, :, h].T) @ B[0, :, h // 2]
        torch.testing.assert_close(final[0, h], state)


def test_ssd_initial_state_and_limits(normal):
    x, dt, A, B, C = ssd_inputs(normal, (2, 5))
    start = normal(2, 4, 3, 5)
    given = naive_ssd(x, dt, A, B, C, initial_states=start, dt_limit=(0.1, 0.5))
    torch.testing.assert_close(
        given, naive_ssd(x, dt.clamp(0.1, 0.5), A, B, C, initial_states=start)
    )
    _, still = naive_ssd(x, dt.abs() * 0, A, B, C, initial_states=start)
    torch.testing.assert_close(still, start)


def test_ssd_gradients(normal):
    inputs = [x.requires_grad_() for x in ssd_inputs(normal, (1, 3))]
    D, z, start = normal(4, grad=True), normal(1, 3, 4, 3, grad=True), normal(1, 4, 3, 5, grad=True)

    def call(x, dt, A, B, C, D, z, start):
        return naive_ssd(x, dt, A, B, C, D=D, z=z, initial_states=start, dt_softplus=True)

    assert torch.autograd.gradcheck(call, (*inputs, D, z, start))


@pytest.mark.parametrize("width", [1, 2, 4])
def test_conv_is_torch_conv1d(normal, width):
    x, weight, bias = normal(2, 9, 3), normal(3, width), normal(3)
    before, residual = normal(2, 3, width - 1), normal(2, 9, 3)
    y, final = naive_causal_conv1d(
        x, weight, bias, activation="silu", residual=residual, initial_state=before
    )
    padded = torch.cat([before, x.mT], -1)
    conv = functional.conv1d(padded, weight[:, None], bias, groups=3).mT
    torch.testing.assert_close(y, functional.silu(conv) + residual)
    assert torch.equal(final, padded[..., padded.shape[-1] - (width - 1) :])


def test_conv_of_a_sequence_shorter_than_the_window_keeps_older_inputs(normal):
    x, before = normal(1, 1, 3), normal(2, 3, 3)
    y, final = naive_causal_conv1d(x, normal(3, 4), cu_seqlens=[0, 1, 1], initial_state=before)
    assert torch.equal(final[0], torch.cat([before[0, :, 1:], x[0].T], -1))
    assert torch.equal(final[1], before[1])
    assert y.shape == x.shape


def test_mixer_is_its_parts(normal):
    nheads, headdim, ngroups, dstate, rows = 4, 3, 2, 5, (1, 8)
    inner, shared = nheads * headdim, ngroups * dstate
    z, x, B, C, dt = (normal(*rows, n) for n in (inner, inner, shared, shared, nheads))
    weight, bias = normal(inner + 2 * shared, 4), normal(inner + 2 * shared)
    dt_bias, A, D = normal(nheads), -normal(nheads).exp(), normal(nheads)
    y, final = naive_mamba_split(
        torch.cat([z, x, B, C, dt], -1),
        weight,
        bias,
        dt_bias,
        A,
        D,
        headdim=headdim,
        ngroups=ngroups,
    )
    conv = functional.conv1d(
        functional.pad(torch.cat([x, B, C], -1).mT, (3, 0)), weight[:, None], bias, groups=32
    )
    mixed = functional.silu(conv).mT
    d = functional.softplus(dt + dt_bias)
    core, state = naive_ssd(
        mixed[..., :inner].view(1, 8, nheads, headdim),
        d,
        A,
        mixed[..., inner : inner + shared].view(1, 8, ngroups, dstate),
        mixed[..., inner + shared :].view(1, 8, ngroups, dstate),
        D=D,
    )
    torch.testing.assert_close(y, core.flatten(2) * functional.silu(z))
    torch.testing.assert_close(final, state)


def calls(normal, rows):
    """Each reference with its per-token inputs, as ``call(tokens, **layout) -> (y, final)``."""
    weight, A = normal(6, 4), -normal(2).exp()
    x, dt, _, B, C = ssd_inputs(normal, rows)
    a = -normal(4).exp()
    return [
        (lambda tokens, **layout: naive_kda(*tokens, **layout), kda_inputs(normal, rows)),
        (
            lambda tokens, **layout: naive_ssd(
                tokens[0], tokens[1], a, *tokens[2:4], z=tokens[4], **layout
            ),
            (x, dt, B, C, normal(*rows, 4, 3)),
        ),
        (
            lambda tokens, **layout: naive_causal_conv1d(
                tokens[0], weight, residual=tokens[1], **layout
            ),
            (normal(*rows, 6), normal(*rows, 6)),
        ),
        (
            lambda tokens, **layout: naive_mamba_split(
                tokens[0], weight, None, None, A, None, headdim=2, ngroups=1, **layout
            ),
            (normal(*rows, 12),),
        ),
    ]


def test_packed_sequences_equal_their_own_runs(normal):
    cu = [0, 3, 3, 4, 11]
    for call, tokens in calls(normal, (1, 11)):
        y, final = call(tokens, cu_seqlens=torch.tensor(cu))
        for n, (start, stop) in enumerate(zip(cu, cu[1:], strict=False)):
            alone = call([x[:, start:stop] for x in tokens])
            torch.testing.assert_close((y[:, start:stop], final[n : n + 1]), alone)


def test_dense_rows_equal_their_own_runs(normal):
    for call, tokens in calls(normal, (2, 5)):
        y, final = call(tokens)
        for b in range(2):
            alone = call([x[b : b + 1] for x in tokens])
            torch.testing.assert_close((y[b : b + 1], final[b : b + 1]), alone)


def test_padding_is_zero_and_counts_for_nothing(normal):
    padding = [3, 4, 9, 10]
    real = [row for row in range(11) if row not in padding]
    layout = {"cu_seqlens": [0, 3, 7], "padded_cu_seqlens": [0, 5, 11]}
    for call, tokens in calls(normal, (1, 11)):
        for x in tokens:
            x[:, padding] = math.nan
            x.requires_grad_()
        y, final = call(tokens, **layout)
        dense = call([x[:, real] for x in tokens], cu_seqlens=[0, 3, 7])
        torch.testing.assert_close((y[:, real], final), dense)
        assert not y[:, padding].count_nonzero()
        for grad in torch.autograd.grad(y.sum() + final.sum(), tokens):
            assert not grad[:, padding].count_nonzero()
            assert grad.isfinite().all()


def test_streams_that_do_not_fit_are_refused(normal):
    x, weight = normal(2, 6, 3), normal(3, 2)
    with pytest.raises(ValueError, match="offsets end at 5, the stream at 6"):
        naive_causal_conv1d(x, weight, cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match="B = 1"):
        naive_causal_conv1d(x, weight, cu_seqlens=[0, 2, 6])
