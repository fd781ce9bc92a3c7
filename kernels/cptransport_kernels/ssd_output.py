# SPDX-License-Identifier: Apache-2.0
"""Outputs of SSD: scores of pairs of tokens, then one walk over every piece from its true state.

    y_i = exp(G_i) S C_i + sum_{j <= i} (C_i . B_j) exp(G_i - G_j) d_j x_j + D x_i

with S the state before the chunk. The scores C_i . B_j belong to groups and to no state, so they are
computed while summaries travel. The state that enters a segment reaches the outputs through the
walk's first state: no second pass over tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.ssd_states import (
    chunk_end,
    chunk_steps,
    entering_state,
    load_bias,
    load_rate,
    load_rows,
)


@triton.jit(do_not_specialize=["T", "G"])
def ssd_scores_kernel(
    p_B,
    B_b,
    B_t,
    p_C,
    C_b,
    C_t,
    p_scores,
    p_chunks,
    T,
    G,
    N: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    PREC: tl.constexpr,
):
    """C_i . B_j of every chunk's pairs with j <= i, else 0: ``p_scores`` [B, T, G, BT], column j
    counted from the chunk's start."""
    CT: tl.constexpr = p_scores.dtype.element_ty
    i_b = (tl.program_id(1) // G).to(tl.int64)
    i_g = tl.program_id(1) % G
    start = tl.load(p_chunks + tl.program_id(0) * 2)
    stop = tl.load(p_chunks + tl.program_id(0) * 2 + 1)
    t = start.to(tl.int64)
    o_t = tl.arange(0, BT)
    o_n = tl.arange(0, BN)
    m_row = (o_t < stop - start)[:, None]
    m = m_row & (o_n < N)[None, :]
    b_B = load_rows(p_B + i_b * B_b + t * B_t + i_g * N, o_t, B_t, o_n, m).to(CT)
    b_C = load_rows(p_C + i_b * C_b + t * C_t + i_g * N, o_t, C_t, o_n, m).to(CT)
    b_scores = tl.dot(b_C, tl.trans(b_B), input_precision=PREC)
    b_scores = tl.where(o_t[:, None] >= o_t[None, :], b_scores, 0.0)
    p_scores += ((i_b * T + t) * G + i_g) * BT
    o = o_t[:, None] * (G * BT) + o_t[None, :]
    tl.store(p_scores + o, b_scores.to(CT), mask=m_row)


@triton.jit(do_not_specialize=["B", "T", "H", "G", "NC"])
def ssd_output_kernel(
    p_x,
    x_b,
    x_t,
    p_z,
    z_b,
    z_t,
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
    p_scores,
    p_incoming,
    p_states,
    p_before,
    p_y,
    p_outgoing,
    p_dy,
    dy_b,
    dy_t,
    p_gated,
    p_h,
    p_pieces,
    B,
    T,
    H,
    G,
    NC,
    P: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    CHANNEL_D: tl.constexpr,
    PREC: tl.constexpr,
):
    """Outputs, states that leave segments and those that enter pieces (``p_states``, kept for the
    backward); one program per piece, head and block of BP channels.

    In the backward of a gate, with ``p_dy``, states that enter are complete. Then ``p_y`` is the
    gradient of the gate, ``p_gated`` that of the output before it, and ``p_h`` [B, NC, H, P, N] the
    state before every chunk.
    """
    CT: tl.constexpr = p_scores.dtype.element_ty
    NP: tl.constexpr = (P + BP - 1) // BP
    i_pb = tl.program_id(0) % NP
    i_b = (tl.program_id(0) // NP % B).to(tl.int64)
    i_p = tl.program_id(0) // NP // B
    i_h = tl.program_id(1)
    i_g = i_h // (H // G)
    start = tl.load(p_pieces + i_p * 8)
    length = tl.load(p_pieces + i_p * 8 + 1) - start
    segment = tl.load(p_pieces + i_p * 8 + 2)
    row = tl.load(p_pieces + i_p * 8 + 4)
    o_t = tl.arange(0, BT)
    o_p = i_pb * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    m_p = (o_p < P)[None, :]
    m_n = (o_n < N)[None, :]
    o_s = o_p[:, None] * N + o_n[None, :]
    m_s = (o_p < P)[:, None] & m_n
    b_s = entering_state(
        p_incoming, p_states, p_before, i_p, row, segment, i_b, i_h, o_s, m_s, B, H, P * N, CUT
    )
    p_row = p_states + ((tl.maximum(row, 0) * B + i_b) * H + i_h) * P * N
    if p_incoming is not None:
        tl.store(p_row + o_s, b_s, mask=m_s & (row >= 0))

    bias = load_bias(p_dt_bias, i_h)
    rate = load_rate(p_A, i_h)
    b_D = tl.zeros([BP], tl.float32)
    if p_D is not None:
        if CHANNEL_D:
            b_D = tl.load(p_D + i_h * P + o_p, mask=o_p < P, other=0.0).to(tl.float32)
        else:
            b_D += tl.load(p_D + i_h).to(tl.float32)
    p_x += i_b * x_b + i_h * P
    p_B += i_b * B_b + i_g * N
    p_C += i_b * C_b + i_g * N
    p_dt += i_b * dt_b + i_h
    o_y = o_t[:, None] * (H * P) + o_p[None, :]
    o_tt = o_t[:, None] * (G * BT) + o_t[None, :]
    causal = o_t[:, None] >= o_t[None, :]
    t0 = start.to(tl.int64)
    for i in range(tl.cdiv(length, BT)):
        # One 64-bit address per tensor, 32-bit offsets inside the chunk.
        t = t0 + i * BT
        m_t = o_t < length - i * BT
        m_row = m_t[:, None]
        b_d, b_coarse, b_fine = chunk_steps(
            p_dt + t * dt_t, o_t * dt_t, m_t, bias, rate, dt_min, dt_max, SOFTPLUS
        )
        end_coarse, end_fine = chunk_end(b_coarse, b_fine, o_t, BT)
        if p_h is not None:
            chunk = i_b * NC + tl.load(p_pieces + i_p * 8 + 3) + i
            tl.store(p_h + (chunk * H + i_h) * (P * N) + o_s, b_s.to(CT), mask=m_s)
        b_C = load_rows(p_C + t * C_t, o_t, C_t, o_n, m_row & m_n).to(CT)
        b_y = tl.dot(b_C, tl.trans(b_s.to(CT)), input_precision=PREC)
        b_y *= tl.exp2(b_coarse + b_fine)[:, None]
        p_rows = p_scores + ((i_b * T + t) * G + i_g) * BT
        b_m = tl.load(p_rows + o_tt, mask=m_row, other=0.0).to(tl.float32)
        b_between = (b_coarse[:, None] - b_coarse[None, :]) + (b_fine[:, None] - b_fine[None, :])
        # Of pairs that are not causal, anything finite: their scores are zero.
        b_m *= tl.exp2(tl.where(causal, b_between, 0.0)) * b_d[None, :]
        b_x = load_rows(p_x + t * x_t, o_t, x_t, o_p, m_row & m_p)
        b_y = tl.dot(b_m.to(CT), b_x.to(CT), b_y, input_precision=PREC)
        b_x = b_x.to(tl.float32)
        if p_D is not None:
            b_y += b_x * b_D[None, :]
        if p_z is not None:
            p_rows = p_z + i_b * z_b + t * z_t + i_h * P
            b_z = load_rows(p_rows, o_t, z_t, o_p, m_row & m_p).to(tl.float32)
            b_gate = tl.sigmoid(b_z)
            if p_dy is not None:
                p_rows = p_dy + i_b * dy_b + t * dy_t + i_h * P
                b_dy = load_rows(p_rows, o_t, dy_t, o_p, m_row & m_p).to(tl.float32)
                b_y *= b_dy * b_gate * (1.0 + b_z * (1.0 - b_gate))
                b_dy *= b_z * b_gate
                p_rows = p_gated + ((i_b * T + t) * H + i_h) * P
                tl.store(p_rows + o_y, b_dy.to(p_gated.dtype.element_ty), mask=m_row & m_p)
            else:
                b_y *= b_z * b_gate
        p_rows = p_y + ((i_b * T + t) * H + i_h) * P
        tl.store(p_rows + o_y, b_y.to(p_y.dtype.element_ty), mask=m_row & m_p)
        b_w = tl.exp2((end_coarse - b_coarse) + (end_fine - b_fine)) * b_d
        b_B = load_rows(p_B + t * B_t, o_t, B_t, o_n, m_row & m_n).to(CT)
        b_x = (b_x * b_w[:, None]).to(CT)
        b_s *= tl.exp2(end_coarse + end_fine)
        b_s = tl.dot(tl.trans(b_x), b_B, b_s, input_precision=PREC)
    if p_outgoing is not None:
        m_s = m_s & (tl.load(p_pieces + i_p * 8 + 6) != 0)
        tl.store(p_outgoing + ((segment * B + i_b) * H + i_h) * P * N + o_s, b_s, mask=m_s)
