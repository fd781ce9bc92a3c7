# SPDX-License-Identifier: Apache-2.0
"""Gradients of one chunk of SSD, given the state S before it and the gradient dS of the state after it.

With L(i, j) = exp(G_i - G_j) for j <= i, scores R = C B^T, e_j = exp(G_end - G_j) and dM = dY X^T::

    d(d_j x_j) = sum_i R L dy_i + e_j dS B_j              dR = dM L d_j, summed over a group's heads
    dC_i = sum_j dR B_j + exp(G_i) dy_i S                 dB_j = sum_i dR C_i + e_j d_j x_j dS

A program holds a chunk and heads of one group, so that sums over heads are made in registers. Those
of dR, dB and dC together do not fit: one kernel takes pairs, one what token j writes (x, B), both
with j as row so that no product needs the transpose of what belongs to pairs, and the last what
token i reads (C). With a gate, dY is the gradient of the output before it.

The log decay of token t takes part wherever something earlier is read at t or later: pairs, writes
before t that leave the chunk, S as it passes by, and reads of S at t or later. Each is summed
directly. Pairs enter as the suffix sum of sums over columns less sums over rows of the same numbers,
and a token's pair with itself never enters.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.common import MIN_LOG_DECAY
from cptransport_kernels.ssd_states import (
    LN_2,
    chunk_end,
    chunk_steps,
    free_step,
    load_bias,
    load_rate,
    load_rows,
)


@triton.jit
def _before(b_before, b_through, b_next_before, b_next_through):
    return b_through + b_next_before, b_through + b_next_through


@triton.jit
def sum_before(b_v):
    """Return the sum over earlier tokens of each token, which a token's own value never enters."""
    b_before, _ = tl.associative_scan((tl.zeros_like(b_v), b_v), 0, _before)
    return b_before


@triton.jit
def step_grad(b_dd, b_da, p_dt, o_dt, m_t, b_d, bias, rate, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """Return the gradient of dt and, summed over tokens, of A, from those of steps and log decays.

    A step outside its limits has none, a decay that forgets everything neither.
    """
    b_da = tl.where(b_d * rate < MIN_LOG_DECAY, 0.0, b_da)
    b_raw = tl.load(p_dt + o_dt, mask=m_t, other=0.0).to(tl.float32) + bias
    b_free = free_step(b_raw, SOFTPLUS)
    b_ddt = b_dd + rate * b_da
    if SOFTPLUS:
        b_ddt *= tl.sigmoid(b_raw)
    inside = (b_free >= dt_min) & (b_free <= dt_max) & m_t
    return tl.where(inside, b_ddt, 0.0), tl.sum(b_da * b_d)


@triton.jit(do_not_specialize=["B", "T", "H", "G", "NC", "HEADS"])
def ssd_pair_grads_kernel(
    p_x,
    x_b,
    x_t,
    p_dy,
    dy_b,
    dy_t,
    p_B,
    B_b,
    B_t,
    p_C,
    C_b,
    C_t,
    p_dt,
    dt_b,
    dt_t,
    p_A,
    p_dt_bias,
    p_D,
    dt_min,
    dt_max,
    p_dscores,
    p_dd,
    p_da,
    p_sums,
    p_chunks,
    B,
    T,
    H,
    G,
    NC,
    HEADS,
    P: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNEL_D: tl.constexpr,
    PREC: tl.constexpr,
):
    """What pairs of tokens say of scores, steps and log decays; no state is needed.

    Args:
        p_dscores: [SPLITS, B, T, G, BT], parts of the sum over a group's heads, row j.
        p_dd, p_da: float32 [B, T, H].
        p_sums: float32 [B * NC, H, SUMS], sums over tokens: of A, dt_bias, then of D, one or P.
        HEADS: heads of a program.
    """
    CT: tl.constexpr = p_dscores.dtype.element_ty
    NP: tl.constexpr = (P + BP - 1) // BP
    split = tl.program_id(0) % SPLITS
    i_c = tl.program_id(0) // SPLITS
    i_b = (tl.program_id(1) // G).to(tl.int64)
    i_g = tl.program_id(1) % G
    start = tl.load(p_chunks + i_c * 2)
    stop = tl.load(p_chunks + i_c * 2 + 1)
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    m_t = o_t < stop - start
    m_row = m_t[:, None]
    m_n = (o_n < N)[None, :]
    # One 64-bit address per tensor, 32-bit offsets inside the chunk.
    t = start.to(tl.int64)
    p_x += i_b * x_b + t * x_t
    p_dy += i_b * dy_b + t * dy_t
    p_dt += i_b * dt_b + t * dt_t
    hv0 = (i_b * T + t) * H
    group0 = (i_b * T + t) * G + i_g
    b_B = load_rows(p_B + i_b * B_b + t * B_t + i_g * N, o_t, B_t, o_n, m_row & m_n).to(CT)
    b_C = load_rows(p_C + i_b * C_b + t * C_t + i_g * N, o_t, C_t, o_n, m_row & m_n).to(CT)
    # [j, i]
    causal = o_t[:, None] <= o_t[None, :]
    b_scores = tl.where(causal, tl.dot(b_B, tl.trans(b_C), input_precision=PREC), 0.0)
    earlier = o_t[:, None] < o_t[None, :]
    b_dscores = tl.zeros([BT, BT], tl.float32)

    group = H // G
    for j in range(split * HEADS, tl.minimum(group, (split + 1) * HEADS)):
        i_h = i_g * group + j
        rate = load_rate(p_A, i_h)
        b_d, b_coarse, b_fine = chunk_steps(
            p_dt + i_h,
            o_t * dt_t,
            m_t,
            load_bias(p_dt_bias, i_h),
            rate,
            dt_min,
            dt_max,
            SOFTPLUS,
        )
        b_between = (b_coarse[None, :] - b_coarse[:, None]) + (b_fine[None, :] - b_fine[:, None])
        # Of pairs that are not causal, anything finite: scores and their gradients are zero there.
        b_l = tl.exp2(tl.where(causal, b_between, 0.0))
        p_xh = p_x + i_h * P
        p_dyh = p_dy + i_h * P
        chunk_head = (i_b * NC + i_c) * H + i_h
        o_h = hv0 + i_h + o_t * H
        p_sum = p_sums + chunk_head * SUMS + 2
        b_dm = tl.zeros([BT, BT], tl.float32)
        for i_p in tl.static_range(NP):
            o_p = i_p * BP + tl.arange(0, BP)
            m_x = m_row & (o_p < P)[None, :]
            b_x = load_rows(p_xh, o_t, x_t, o_p, m_x)
            b_dy = load_rows(p_dyh, o_t, dy_t, o_p, m_x).to(tl.float32)
            if p_D is not None and CHANNEL_D:
                tl.store(p_sum + o_p, tl.sum(b_x.to(tl.float32) * b_dy, axis=0), mask=o_p < P)
            b_dm = tl.dot(b_x.to(CT), tl.trans(b_dy.to(CT)), b_dm, input_precision=PREC)
        if p_D is not None and not CHANNEL_D:
            tl.store(p_sum, tl.sum(tl.where(o_t[:, None] == o_t[None, :], b_dm, 0.0)))
        b_dm *= b_l
        b_dscores += b_dm * b_d[:, None]
        b_dm *= b_scores
        tl.store(p_dd + o_h, tl.sum(b_dm, axis=1), mask=m_t)
        b_dm = tl.where(earlier, b_dm * b_d[:, None], 0.0)
        b_da = tl.cumsum(tl.sum(b_dm, axis=0) - tl.sum(b_dm, axis=1), axis=0, reverse=True)
        tl.store(p_da + o_h, b_da, mask=m_t)
        if p_dscores.dtype.element_ty == tl.float32:
            # The sum for A has every error of b_da times all steps before it. What it lacks:
            some = tl.abs(rate) > 1e-30
            exact = tl.sum(b_dm * b_between) * LN_2 / tl.where(some, rate, 1.0)
            tl.store(p_sum - 2, tl.where(some, exact - tl.sum(b_da * b_d), 0.0))

    o_tt = o_t[:, None] * (G * BT) + o_t[None, :]
    p_rows = p_dscores + (split.to(tl.int64) * B * T * G + group0) * BT
    tl.store(p_rows + o_tt, tl.where(causal, b_dscores, 0.0).to(CT), mask=m_row)


@triton.jit(do_not_specialize=["B", "T", "H", "G", "NC", "HEADS"])
def ssd_write_grads_kernel(
    p_x,
    x_b,
    x_t,
    p_dy,
    dy_b,
    dy_t,
    p_B,
    B_b,
    B_t,
    p_C,
    C_b,
    C_t,
    p_dt,
    dt_b,
    dt_t,
    p_A,
    p_dt_bias,
    p_D,
    dt_min,
    dt_max,
    p_dh,
    p_passing,
    p_dscores,
    p_dx,
    p_dB,
    p_dd,
    p_da,
    p_chunks,
    B,
    T,
    H,
    G,
    NC,
    HEADS,
    P: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNEL_D: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gradients of x and B; adds what writes to the state, and the state as it passes by, say of
    steps and log decays. Arguments as ``ssd_pair_grads_kernel``, and

    Args:
        p_dh: [B, NC, H, P, N], gradients of the states after the chunks.
        p_passing: [blocks of P, B * NC, H], S dS of every chunk.
        p_dB: [SPLITS, B, T, G, N], parts of the sum over a group's heads.
    """
    CT: tl.constexpr = p_dh.dtype.element_ty
    NP: tl.constexpr = (P + BP - 1) // BP
    split = tl.program_id(0) % SPLITS
    i_c = tl.program_id(0) // SPLITS
    i_b = (tl.program_id(1) // G).to(tl.int64)
    i_g = tl.program_id(1) % G
    start = tl.load(p_chunks + i_c * 2)
    stop = tl.load(p_chunks + i_c * 2 + 1)
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    m_t = o_t < stop - start
    m_row = m_t[:, None]
    m_n = (o_n < N)[None, :]
    # One 64-bit address per tensor, 32-bit offsets inside the chunk.
    t = start.to(tl.int64)
    p_x += i_b * x_b + t * x_t
    p_dy += i_b * dy_b + t * dy_t
    p_dt += i_b * dt_b + t * dt_t
    hv0 = (i_b * T + t) * H
    group0 = (i_b * T + t) * G + i_g
    b_B = load_rows(p_B + i_b * B_b + t * B_t + i_g * N, o_t, B_t, o_n, m_row & m_n).to(CT)
    b_C = load_rows(p_C + i_b * C_b + t * C_t + i_g * N, o_t, C_t, o_n, m_row & m_n).to(CT)
    # [j, i]
    causal = o_t[:, None] <= o_t[None, :]
    b_scores = tl.where(causal, tl.dot(b_B, tl.trans(b_C), input_precision=PREC), 0.0)
    b_dB = tl.zeros([BT, BN], tl.float32)

    group = H // G
    for j in range(split * HEADS, tl.minimum(group, (split + 1) * HEADS)):
        i_h = i_g * group + j
        b_d, b_coarse, b_fine = chunk_steps(
            p_dt + i_h,
            o_t * dt_t,
            m_t,
            load_bias(p_dt_bias, i_h),
            load_rate(p_A, i_h),
            dt_min,
            dt_max,
            SOFTPLUS,
        )
        b_between = (b_coarse[None, :] - b_coarse[:, None]) + (b_fine[None, :] - b_fine[:, None])
        # Of pairs that are not causal, anything finite: scores and their gradients are zero there.
        b_l = tl.exp2(tl.where(causal, b_between, 0.0))
        p_xh = p_x + i_h * P
        p_dyh = p_dy + i_h * P
        chunk_head = (i_b * NC + i_c) * H + i_h
        o_h = hv0 + i_h + o_t * H
        end_coarse, end_fine = chunk_end(b_coarse, b_fine, o_t, BT)
        b_write = tl.exp2((end_coarse - b_coarse) + (end_fine - b_fine))
        b_m = (b_scores * b_l).to(CT)
        b_w = tl.zeros([BT], tl.float32)
        passing = 0.0
        for i_p in tl.static_range(NP):
            o_p = i_p * BP + tl.arange(0, BP)
            m_x = m_row & (o_p < P)[None, :]
            b_xf = load_rows(p_xh, o_t, x_t, o_p, m_x).to(tl.float32)
            b_dy = load_rows(p_dyh, o_t, dy_t, o_p, m_x).to(tl.float32)
            b_ds = load_rows(p_dh + chunk_head * P * N, o_p, N, o_n, (o_p < P)[:, None] & m_n)
            b_dx = tl.dot(b_B, tl.trans(b_ds), input_precision=PREC) * b_write[:, None]
            b_w += tl.sum(b_xf * b_dx, axis=1)
            b_xf = (b_xf * (b_write * b_d)[:, None]).to(CT)
            b_dB = tl.dot(b_xf, b_ds, b_dB, input_precision=PREC)
            b_dx = tl.dot(b_m, b_dy.to(CT), b_dx, input_precision=PREC) * b_d[:, None]
            if p_D is not None:
                if CHANNEL_D:
                    b_D = tl.load(p_D + i_h * P + o_p, mask=o_p < P, other=0.0).to(tl.float32)
                    b_dx += b_dy * b_D[None, :]
                else:
                    b_dx += b_dy * tl.load(p_D + i_h).to(tl.float32)
            p_rows = p_dx + (hv0 + i_h) * P + o_t[:, None] * (H * P) + o_p[None, :]
            tl.store(p_rows, b_dx.to(p_dx.dtype.element_ty), mask=m_x)
            p_here = p_passing + i_p * (NC * B.to(tl.int64)) * H
            passing += tl.load(p_here + chunk_head)
        b_dd = tl.load(p_dd + o_h, mask=m_t, other=0.0) + b_w
        b_da = tl.load(p_da + o_h, mask=m_t, other=0.0)
        b_da += sum_before(b_w * b_d)
        b_da += tl.exp2(end_coarse + end_fine) * passing
        tl.store(p_dd + o_h, b_dd, mask=m_t)
        tl.store(p_da + o_h, b_da, mask=m_t)

    part = split.to(tl.int64) * B * T * G + group0
    o_tt = o_t[:, None] * (G * BT) + o_t[None, :]
    b_dscores = tl.load(p_dscores + part * BT + o_tt, mask=m_row, other=0.0)
    b_dB = tl.dot(b_dscores, b_C, b_dB, input_precision=PREC)
    p_rows = p_dB + part * N + o_t[:, None] * (G * N) + o_n[None, :]
    tl.store(p_rows, b_dB.to(p_dB.dtype.element_ty), mask=m_row & m_n)


@triton.jit(do_not_specialize=["B", "T", "H", "G", "NC", "HEADS"])
def ssd_read_grads_kernel(
    p_x,
    x_b,
    x_t,
    p_dy,
    dy_b,
    dy_t,
    p_B,
    B_b,
    B_t,
    p_C,
    C_b,
    C_t,
    p_dt,
    dt_b,
    dt_t,
    p_A,
    p_dt_bias,
    p_D,
    dt_min,
    dt_max,
    p_h,
    p_dscores,
    p_dd,
    p_da,
    p_dC,
    p_ddt,
    p_sums,
    p_chunks,
    B,
    T,
    H,
    G,
    NC,
    HEADS,
    P: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    SPLITS: tl.constexpr,
    SUMS: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNEL_D: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gradients of C; what reads of the state say of log decays, and with that the gradient of dt and
    the sums of A and dt_bias. Arguments as the kernels before, whose
    results it takes; ``p_h`` are the states before the chunks."""
    CT: tl.constexpr = p_h.dtype.element_ty
    NP: tl.constexpr = (P + BP - 1) // BP
    split = tl.program_id(0) % SPLITS
    i_c = tl.program_id(0) // SPLITS
    i_b = (tl.program_id(1) // G).to(tl.int64)
    i_g = tl.program_id(1) % G
    start = tl.load(p_chunks + i_c * 2)
    stop = tl.load(p_chunks + i_c * 2 + 1)
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    m_t = o_t < stop - start
    m_row = m_t[:, None]
    m_n = (o_n < N)[None, :]
    t = start.to(tl.int64)
    p_dy += i_b * dy_b + t * dy_t
    p_dt += i_b * dt_b + t * dt_t
    hv0 = (i_b * T + t) * H
    group0 = (i_b * T + t) * G + i_g
    b_C = load_rows(p_C + i_b * C_b + t * C_t + i_g * N, o_t, C_t, o_n, m_row & m_n).to(CT)
    b_dC = tl.zeros([BT, BN], tl.float32)

    group = H // G
    for j in range(split * HEADS, tl.minimum(group, (split + 1) * HEADS)):
        i_h = i_g * group + j
        bias = load_bias(p_dt_bias, i_h)
        rate = load_rate(p_A, i_h)
        b_d, b_coarse, b_fine = chunk_steps(
            p_dt + i_h, o_t * dt_t, m_t, bias, rate, dt_min, dt_max, SOFTPLUS
        )
        b_read = tl.exp2(b_coarse + b_fine)
        chunk_head = (i_b * NC + i_c) * H + i_h
        p_dyh = p_dy + i_h * P
        b_r = tl.zeros([BT], tl.float32)
        for i_p in tl.static_range(NP):
            o_p = i_p * BP + tl.arange(0, BP)
            m_x = m_row & (o_p < P)[None, :]
            b_s = load_rows(p_h + chunk_head * P * N, o_p, N, o_n, (o_p < P)[:, None] & m_n)
            b_dy = load_rows(p_dyh, o_t, dy_t, o_p, m_x).to(tl.float32)
            b_y = tl.dot(b_C, tl.trans(b_s), input_precision=PREC) * b_read[:, None]
            b_r += tl.sum(b_dy * b_y, axis=1)
            b_dy = (b_dy * b_read[:, None]).to(CT)
            b_dC = tl.dot(b_dy, b_s, b_dC, input_precision=PREC)
        o_h = hv0 + i_h + o_t * H
        b_da = tl.load(p_da + o_h, mask=m_t, other=0.0) + tl.cumsum(b_r, axis=0, reverse=True)
        b_dd = tl.load(p_dd + o_h, mask=m_t, other=0.0)
        b_ddt, sum_A = step_grad(
            b_dd, b_da, p_dt + i_h, o_t * dt_t, m_t, b_d, bias, rate, dt_min, dt_max, SOFTPLUS
        )
        tl.store(p_ddt + o_h, b_ddt.to(p_ddt.dtype.element_ty), mask=m_t)
        if p_dscores.dtype.element_ty == tl.float32:
            sum_A += tl.load(p_sums + chunk_head * SUMS)
        tl.store(p_sums + chunk_head * SUMS, sum_A)
        tl.store(p_sums + chunk_head * SUMS + 1, tl.sum(b_ddt))

    part = split.to(tl.int64) * B * T * G + group0
    o_tt = o_t[:, None] * (G * BT) + o_t[None, :]
    b_dscores = tl.load(p_dscores + part * BT + o_tt, mask=m_row, other=0.0)
    b_B = load_rows(p_B + i_b * B_b + t * B_t + i_g * N, o_t, B_t, o_n, m_row & m_n).to(CT)
    b_dC = tl.dot(tl.trans(b_dscores), b_B, b_dC, input_precision=PREC)
    p_rows = p_dC + part * N + o_t[:, None] * (G * N) + o_n[None, :]
    tl.store(p_rows, b_dC.to(p_dC.dtype.element_ty), mask=m_row & m_n)


@triton.jit
def _sum_parameters(
    p_sums,
    p_dA,
    p_ddt_bias,
    p_dD,
    i_h,
    R,
    H,
    SUMS: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
):
    """Sum over the chunks, R rows of [H, SUMS], in one order, for one head."""
    o_r = tl.arange(0, BR)
    o_s = tl.arange(0, BS)
    b_sum = tl.zeros([BS], tl.float32)
    for r in range(0, R, BR):
        rows = (r + o_r).to(tl.int64)
        o = (rows * H + i_h)[:, None] * SUMS + o_s[None, :]
        m = (r + o_r < R)[:, None] & (o_s < SUMS)[None, :]
        b_sum += tl.sum(tl.load(p_sums + o, mask=m, other=0.0), axis=0)
    tl.store(p_dA + i_h + o_s * 0, b_sum.to(p_dA.dtype.element_ty), mask=o_s == 0)
    if p_ddt_bias is not None:
        m = o_s == 1
        tl.store(p_ddt_bias + i_h + o_s * 0, b_sum.to(p_ddt_bias.dtype.element_ty), mask=m)
    if p_dD is not None:
        m = (o_s >= 2) & (o_s < SUMS)
        o = i_h * (SUMS - 2) + o_s - 2
        tl.store(p_dD + o, b_sum.to(p_dD.dtype.element_ty), mask=m)


@triton.jit
def _sum_groups(
    p_dB_parts, p_dC_parts, p_dB, p_dC, i, num_elements, SPLITS: tl.constexpr, BE: tl.constexpr
):
    """Sum the parts of dB and dC, SPLITS of ``num_elements`` each, for one block of them."""
    o = i.to(tl.int64) * BE + tl.arange(0, BE)
    m = o < num_elements
    b_dB = tl.zeros([BE], tl.float32)
    b_dC = tl.zeros([BE], tl.float32)
    for _ in tl.static_range(SPLITS):
        b_dB += tl.load(p_dB_parts + o, mask=m, other=0.0)
        b_dC += tl.load(p_dC_parts + o, mask=m, other=0.0)
        p_dB_parts += num_elements
        p_dC_parts += num_elements
    tl.store(p_dB + o, b_dB.to(p_dB.dtype.element_ty), mask=m)
    tl.store(p_dC + o, b_dC.to(p_dC.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["R", "H"])
def ssd_sum_grads_kernel(
    p_sums,
    p_dA,
    p_ddt_bias,
    p_dD,
    R,
    H,
    p_dB_parts,
    p_dC_parts,
    p_dB,
    p_dC,
    num_elements,
    SUMS: tl.constexpr,
    BR: tl.constexpr,
    BS: tl.constexpr,
    SPLITS: tl.constexpr,
    BE: tl.constexpr,
):
    """What is left to sum: gradients of parameters over chunks, one program per head, and, if groups
    are split, dB and dC over their parts, one program per BE elements after those."""
    i = tl.program_id(0)
    if i < H:
        _sum_parameters(p_sums, p_dA, p_ddt_bias, p_dD, i, R, H, SUMS, BR, BS)
    elif SPLITS > 1:
        _sum_groups(p_dB_parts, p_dC_parts, p_dB, p_dC, i - H, num_elements, SPLITS, BE)
