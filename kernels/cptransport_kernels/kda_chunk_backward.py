# SPDX-License-Identifier: Apache-2.0
"""Gradients of one chunk of KDA, given the state before it and the gradient of the state after it.

With u the corrected values, ``Y = T^T dU`` the gradient of the solve's right side, and h, dh the
states:

    dA_qk = tril(dO u^T)          d(qg) = dO h^T          dv = beta Y
    dA_kk = -stril(Y u^T)         d(beta kg) = -Y h^T     d(kd) = u dh^T

(the solve's own gradient ``-T^T dT T^T`` collapses to ``-Y u^T`` since ``T X = u``). One kernel
computes the products of pairs of tokens and dv, one program per chunk and value head; one, per
block of BK channels too, sends their gradients down the tree of ``common`` and finishes dq, dk and
the gate; one adds what the blocks say of beta. Terms of a token with itself never enter the
gradient of the gate.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.common import (
    GATE_GIVEN,
    GATE_SOFTPLUS,
    beta_value,
    decay,
    gate_rate,
    level_decay,
    log_decay,
    split_at,
)


@triton.jit
def gate_grad(b_dg, b_x, rate, lower_bound, GATE: tl.constexpr):
    """Return (d input, d A_log terms) of the gate at input ``b_x`` (bias added)."""
    if GATE == GATE_SOFTPLUS:
        b_dx = -rate * tl.sigmoid(b_x) * b_dg
        b_da = b_dg * log_decay(b_x, rate, lower_bound, GATE)
    else:
        b_s = tl.sigmoid(rate * b_x)
        b_dz = lower_bound * b_s * (1.0 - b_s) * b_dg
        b_dx = rate * b_dz
        b_da = b_dx * b_x
    return b_dx, b_da


@triton.jit(do_not_specialize=["B", "T", "HV"])
def kda_pair_backward_kernel(
    p_v,
    p_beta,
    p_do,
    p_u,
    p_y,
    p_daqk,
    p_dakk,
    p_dv,
    p_db,
    p_chunks,
    scale,
    B,
    T,
    HV,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gradients of the products of pairs of tokens, of v, and what v says of beta; one program per
    chunk and value head."""
    CT: tl.constexpr = p_u.dtype.element_ty
    i_c = tl.program_id(0)
    i_b = tl.program_id(1) // HV
    i_hv = tl.program_id(1) % HV
    start = tl.load(p_chunks + i_c * 4)
    stop = tl.load(p_chunks + i_c * 4 + 1)
    o_t = tl.arange(0, BT)
    m_t = start + o_t < stop
    m_row = m_t[:, None]
    hv0 = (i_b.to(tl.int64) * T + start) * HV + i_hv
    p_v += hv0 * V
    p_dv += hv0 * V
    p_do += hv0 * V
    p_u += hv0 * V
    p_y += hv0 * V
    b_beta = beta_value(
        tl.load(p_beta + hv0 + o_t * HV, mask=m_t, other=0.0).to(tl.float32),
        BETA_SIGMOID,
        BETA_SCALE,
    )
    b_daqk = tl.zeros([BT, BT], tl.float32)
    b_dakk = tl.zeros([BT, BT], tl.float32)
    b_db = tl.zeros([BT], tl.float32)
    for i_v in range(0, V, BV):
        o_rv = o_t[:, None] * (HV * V) + i_v + tl.arange(0, BV)[None, :]
        b_do = tl.load(p_do + o_rv, mask=m_row, other=0.0).to(CT)
        b_ut = tl.trans(tl.load(p_u + o_rv, mask=m_row, other=0.0))
        b_y = tl.load(p_y + o_rv, mask=m_row, other=0.0)
        b_v = tl.load(p_v + o_rv, mask=m_row, other=0.0).to(tl.float32)
        b_daqk = tl.dot(b_do, b_ut, b_daqk, input_precision=PREC)
        b_dakk = tl.dot(b_y, b_ut, b_dakk, input_precision=PREC)
        b_db += tl.sum(b_y.to(tl.float32) * b_v, axis=1)
        tl.store(
            p_dv + o_rv,
            (b_y.to(tl.float32) * b_beta[:, None]).to(p_dv.dtype.element_ty),
            mask=m_row,
        )
    o_tt = hv0 * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
    lower = o_t[:, None] >= o_t[None, :]
    tl.store(p_daqk + o_tt, tl.where(lower, b_daqk * scale, 0.0).to(CT), mask=m_row)
    lower = o_t[:, None] > o_t[None, :]
    tl.store(p_dakk + o_tt, tl.where(lower, -b_dakk, 0.0).to(CT), mask=m_row)
    tl.store(p_db + hv0 + o_t * HV, b_db, mask=m_t)


@triton.jit(do_not_specialize=["B", "T", "H", "HV", "NC"])
def kda_chunk_backward_kernel(
    p_q,
    p_k,
    p_g,
    p_beta,
    p_A_log,
    p_dt_bias,
    p_gc,
    p_rnorm,
    p_do,
    p_u,
    p_y,
    p_h,
    p_dh,
    p_daqk,
    p_dakk,
    p_dq,
    p_dk,
    p_dg,
    p_db,
    p_da,
    p_chunks,
    scale,
    lower_bound,
    B,
    T,
    H,
    HV,
    NC,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    LEVELS: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    PREC: tl.constexpr,
):
    """Gradients of q, k, the gate, and what k says of beta; one program per chunk, value head and
    block of channels."""
    CT: tl.constexpr = p_u.dtype.element_ty
    NK: tl.constexpr = K // BK
    i_k = tl.program_id(0) % NK
    i_c = tl.program_id(0) // NK
    i_b = tl.program_id(1) // HV
    i_hv = tl.program_id(1) % HV
    i_h = i_hv // (HV // H)
    start = tl.load(p_chunks + i_c * 4)
    stop = tl.load(p_chunks + i_c * 4 + 1)

    o_t = tl.arange(0, BT)
    m_t = start + o_t < stop
    o_k = i_k * BK + tl.arange(0, BK)
    m_row = m_t[:, None]
    # One 64-bit address per tensor, 32-bit offsets inside the chunk.
    row0 = i_b.to(tl.int64) * T + start
    last = stop - start - 1
    hv0 = row0 * HV + i_hv
    p_q += (row0 * H + i_h) * K
    p_k += (row0 * H + i_h) * K
    p_gc += hv0 * K
    p_do += hv0 * V
    p_u += hv0 * V
    p_y += hv0 * V
    state0 = ((i_b.to(tl.int64) * NC + i_c) * HV + i_hv) * K * V
    p_h += state0
    p_dh += state0
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    o_rk = o_t[:, None] * (HV * K) + o_k[None, :]

    b_beta = beta_value(
        tl.load(p_beta + hv0 + o_t * HV, mask=m_t, other=0.0).to(tl.float32),
        BETA_SIGMOID,
        BETA_SCALE,
    )
    b_beta = tl.where(m_t, b_beta, 0.0)
    b_dqg = tl.zeros([BT, BK], tl.float32)
    b_dkg = tl.zeros([BT, BK], tl.float32)
    b_dkd = tl.zeros([BT, BK], tl.float32)
    b_dend = tl.zeros([BK], tl.float32)
    for i_v in range(0, V, BV):
        o_v = i_v + tl.arange(0, BV)
        o_rv = o_t[:, None] * (HV * V) + o_v[None, :]
        o_state = o_k[:, None] * V + o_v[None, :]
        b_do = tl.load(p_do + o_rv, mask=m_row, other=0.0).to(CT)
        b_u = tl.load(p_u + o_rv, mask=m_row, other=0.0)
        b_y = tl.load(p_y + o_rv, mask=m_row, other=0.0)
        b_h = tl.load(p_h + o_state)
        b_dh = tl.load(p_dh + o_state)
        b_ht = tl.trans(b_h)
        b_dqg = tl.dot(b_do, b_ht, b_dqg, input_precision=PREC)
        b_dkg = tl.dot(b_y, b_ht, b_dkg, input_precision=PREC)
        b_dkd = tl.dot(b_u, tl.trans(b_dh), b_dkd, input_precision=PREC)
        b_dend += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)

    b_rq = tl.full([BT], 1.0, tl.float32)
    b_rk = tl.full([BT], 1.0, tl.float32)
    if L2NORM:
        p_rnorm += row0 * H + i_h
        b_rq = tl.load(p_rnorm + o_t * H, mask=m_t, other=0.0)
        b_rk = tl.load(p_rnorm + B.to(tl.int64) * T * H + o_t * H, mask=m_t, other=0.0)
    b_k = tl.load(p_k + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rk[:, None]
    b_gc = tl.load(p_gc + tl.minimum(o_t, last)[:, None] * (HV * K) + o_k[None, :])
    b_end = tl.load(p_gc + last * HV * K + o_k)

    # Through the states.
    o_tt = hv0 * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
    b_aqk = tl.load(p_daqk + o_tt, mask=m_row, other=0.0)
    b_akk = tl.load(p_dakk + o_tt, mask=m_row, other=0.0)
    b_diag = tl.load(p_daqk + hv0 * BT + o_t * (HV * BT + 1), mask=m_t, other=0.0).to(tl.float32)
    b_e = decay(b_gc)
    b_dq = b_dqg * b_e * scale
    b_row = -b_dkg * b_e
    # Terms of a token with itself belong to dq and dk only: in the gate's sums they would have to
    # cancel, though all others may be smaller by any factor. So the last token's own share of the
    # state after the chunk waits.
    b_dk = b_dkd * decay(b_end[None, :] - b_gc)
    is_last = (o_t == last)[:, None]
    b_last = tl.sum(tl.where(is_last, b_dk, 0.0), axis=0)
    b_dk = tl.where(is_last, 0.0, b_dk)
    b_total = b_dend * decay(b_end) + tl.sum(b_k * b_dk, axis=0)

    # Through the decayed products of pairs of tokens.
    for level in range(LEVELS):
        b_e = level_decay(b_gc, p_gc, HV * K, o_t, o_k, level, last)
        mask = split_at(o_t, level)
        b_aq = tl.where(mask, b_aqk, 0.0)
        b_ak = tl.where(mask, b_akk, 0.0)
        b_ke = b_k * b_e
        b_kc = b_ke.to(CT)
        b_dq += b_e * tl.dot(b_aq, b_kc, input_precision=PREC)
        b_row += b_e * tl.dot(b_ak, b_kc, input_precision=PREC)
        b_q = tl.load(p_q + o_qk, mask=m_row & (((o_t >> level) & 1) == 1)[:, None], other=0.0).to(
            tl.float32
        )
        b_c = tl.dot(tl.trans(b_aq), (b_q * (b_e * b_rq[:, None])).to(CT), input_precision=PREC)
        b_c = tl.dot(tl.trans(b_ak), (b_ke * b_beta[:, None]).to(CT), b_c, input_precision=PREC)
        b_dk += b_e * b_c
    # Loaded again, past the L1 cache: kept over the levels in two layouts they would cost
    # registers.
    b_q = (
        tl.load(p_q + o_qk, mask=m_row, other=0.0, cache_modifier=".cg").to(tl.float32)
        * b_rq[:, None]
    )
    b_k = (
        tl.load(p_k + o_qk, mask=m_row, other=0.0, cache_modifier=".cg").to(tl.float32)
        * b_rk[:, None]
    )
    b_db = tl.sum(b_k * b_row, axis=1)
    # Every pair of tokens adds to the gates between them: with one sign where it ends, with the
    # other where it begins.
    b_row *= b_beta[:, None]
    b_dg = tl.cumsum(b_q * b_dq + b_k * (b_row - b_dk), axis=0, reverse=True) + b_total[None, :]
    b_dq += b_diag[:, None] * b_k
    b_dk += b_row + b_diag[:, None] * b_q + tl.where(is_last, b_last[None, :], 0.0)

    tl.store(p_dq + hv0 * K + o_rk, b_dq.to(p_dq.dtype.element_ty), mask=m_row)
    tl.store(p_dk + hv0 * K + o_rk, b_dk.to(p_dk.dtype.element_ty), mask=m_row)
    tl.store(p_db + (i_k + 1).to(tl.int64) * B * T * HV + hv0 + o_t * HV, b_db, mask=m_t)
    if GATE != GATE_GIVEN:
        rate = 1.0
        if p_A_log is not None:
            rate = gate_rate(tl.load(p_A_log + i_hv).to(tl.float32))
        b_x = tl.load(p_g + hv0 * K + o_rk, mask=m_row, other=0.0).to(tl.float32)
        if p_dt_bias is not None:
            b_x += tl.load(p_dt_bias + i_hv * K + o_k).to(tl.float32)[None, :]
        b_dg, b_da = gate_grad(b_dg, b_x, rate, lower_bound, GATE)
        # Per chunk: sums over tokens of the input's gradient (dt_bias) and of the terms of A_log.
        b_dg = tl.where(m_row, b_dg, 0.0)
        o_sum = ((i_b.to(tl.int64) * NC + i_c) * HV + i_hv) * K + o_k
        tl.store(p_da + o_sum, tl.sum(tl.where(m_row, b_da, 0.0), axis=0))
        tl.store(p_da + B.to(tl.int64) * NC * HV * K + o_sum, tl.sum(b_dg, axis=0))
    tl.store(p_dg + hv0 * K + o_rk, b_dg.to(p_dg.dtype.element_ty), mask=m_row)


@triton.jit(do_not_specialize=["B", "T", "H", "HV"])
def kda_finish_grads_kernel(
    p_q,
    p_k,
    p_beta,
    p_rnorm,
    p_dq_heads,
    p_dk_heads,
    p_db_parts,
    p_dq,
    p_dk,
    p_dbeta,
    p_chunks,
    B,
    T,
    H,
    HV,
    K: tl.constexpr,
    BT: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_SCALE: tl.constexpr,
):
    """Add what blocks of channels say of beta; with HEADS also sum dq, dk over value heads and go
    back through the l2norm."""
    i_c = tl.program_id(0)
    i_b = tl.program_id(1) // H
    i_h = tl.program_id(1) % H
    start = tl.load(p_chunks + i_c * 4)
    stop = tl.load(p_chunks + i_c * 4 + 1)
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, K)
    m_t = start + o_t < stop
    m_row = m_t[:, None]
    rows = i_b.to(tl.int64) * T + start + o_t
    group = HV // H
    b_dq = tl.zeros([BT, K], tl.float32)
    b_dk = tl.zeros([BT, K], tl.float32)
    for j in range(group):
        hv_rows = rows * HV + i_h * group + j
        b_db = tl.zeros([BT], tl.float32)
        for i in tl.static_range(PARTS):
            b_db += tl.load(p_db_parts + B.to(tl.int64) * T * HV * i + hv_rows, mask=m_t, other=0.0)
        if BETA_SIGMOID:
            b_s = tl.sigmoid(tl.load(p_beta + hv_rows, mask=m_t, other=0.0).to(tl.float32))
            b_db *= b_s * (1.0 - b_s) * BETA_SCALE
        tl.store(p_dbeta + hv_rows, b_db.to(p_dbeta.dtype.element_ty), mask=m_t)
        if HEADS:
            o_rk = (hv_rows * K)[:, None] + o_k[None, :]
            b_dq += tl.load(p_dq_heads + o_rk, mask=m_row, other=0.0)
            b_dk += tl.load(p_dk_heads + o_rk, mask=m_row, other=0.0)
    if HEADS:
        o_qk = ((rows * H + i_h) * K)[:, None] + o_k[None, :]
        if L2NORM:
            b_rq = tl.load(p_rnorm + rows * H + i_h, mask=m_t, other=0.0)[:, None]
            b_rk = tl.load(p_rnorm + B.to(tl.int64) * T * H + rows * H + i_h, mask=m_t, other=0.0)[
                :, None
            ]
            b_q = tl.load(p_q + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rq
            b_k = tl.load(p_k + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rk
            b_dq = (b_dq - b_q * tl.sum(b_q * b_dq, axis=1)[:, None]) * b_rq
            b_dk = (b_dk - b_k * tl.sum(b_k * b_dk, axis=1)[:, None]) * b_rk
        tl.store(p_dq + o_qk, b_dq.to(p_dq.dtype.element_ty), mask=m_row)
        tl.store(p_dk + o_qk, b_dk.to(p_dk.dtype.element_ty), mask=m_row)
