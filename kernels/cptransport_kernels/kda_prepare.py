# SPDX-License-Identifier: Apache-2.0
"""What one chunk of KDA needs of its own tokens, before any state is known.

With G the cumulative log decay inside the chunk, ``kg = k exp(G)``, and A the strictly lower
triangular matrix ``A[i, j] = beta_i sum_d k_i k_j exp(G_i - G_j)``, the delta rule's values are
``u = (I + A)^-1 (beta v - beta kg S)`` for the state S at the chunk's start. Per chunk and value
head this kernel writes

    gc [BT, K] G               qg [BT, K] scale q exp(G)     kd [BT, K] k exp(G_last - G)
    w  [BT, K] T beta kg       u0 [BT, V] T beta v           T = (I + A)^-1 [BT, BT]
    aqk [BT, BT] scale q_i k_j exp(G_i - G_j), j <= i

all in token-major layout ``[B, T, HV, ...]``; rows of no chunk are not written. T is inverted by
the tree of ``common``: ``T <- T - T A_level T`` merges the halves of every node, which is block
substitution and as stable.

A backward keeps T and aqk, which are small and dear; the second kernel makes the others again.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.common import (
    beta_value,
    decay,
    gate_rate,
    level_decay,
    log_decay,
    split_at,
)


@triton.jit
def cumulative_decay(p_g, p_dt_bias, o_rk, o_bias, m_row, rate, lower_bound, GATE: tl.constexpr):
    """Return the cumulative log decays [BT, BK] of a chunk; the rows after its last token repeat
    it."""
    b_g = tl.load(p_g + o_rk, mask=m_row, other=0.0).to(tl.float32)
    if p_dt_bias is not None:
        b_g += tl.load(p_dt_bias + o_bias).to(tl.float32)[None, :]
    return tl.cumsum(tl.where(m_row, log_decay(b_g, rate, lower_bound, GATE), 0.0), axis=0)


@triton.jit
def decayed(b_x, b_gc, scale):
    """Return scale x exp(G)."""
    return b_x * decay(b_gc) * scale


@triton.jit
def decayed_to_end(b_x, b_gc):
    """Return x exp(G_last - G)."""
    return b_x * decay(tl.min(b_gc, axis=0)[None, :] - b_gc)


@triton.jit(do_not_specialize=["B", "T", "H", "HV"])
def kda_prepare_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_A_log,
    p_dt_bias,
    scale,
    lower_bound,
    p_gc,
    p_qg,
    p_kd,
    p_w,
    p_u0,
    p_aqk,
    p_tinv,
    p_rnorm,
    p_chunks,
    B,
    T,
    H,
    HV,
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
    PREC_SOLVE: tl.constexpr,
):
    CT: tl.constexpr = p_w.dtype.element_ty
    i_c = tl.program_id(0)
    i_b = tl.program_id(1) // HV
    i_hv = tl.program_id(1) % HV
    i_h = i_hv // (HV // H)
    start = tl.load(p_chunks + i_c * 4)
    stop = tl.load(p_chunks + i_c * 4 + 1)

    o_t = tl.arange(0, BT)
    m_t = start + o_t < stop
    o_k = tl.arange(0, BK)
    # One 64-bit address per tensor, 32-bit offsets inside the chunk.
    row0 = i_b.to(tl.int64) * T + start
    last = stop - start - 1
    m_row = m_t[:, None]
    p_q += (row0 * H + i_h) * K
    p_k += (row0 * H + i_h) * K
    hv0 = row0 * HV + i_hv
    p_v += hv0 * V
    p_u0 += hv0 * V
    p_g += hv0 * K
    p_gc += hv0 * K
    p_qg += hv0 * K
    p_kd += hv0 * K
    p_w += hv0 * K
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    o_rk = o_t[:, None] * (HV * K) + o_k[None, :]

    rate = 1.0
    if p_A_log is not None:
        rate = gate_rate(tl.load(p_A_log + i_hv).to(tl.float32))
    b_rq = tl.full([BT], 1.0, tl.float32)
    b_rk = tl.full([BT], 1.0, tl.float32)
    if L2NORM:
        b_q2 = tl.zeros([BT], tl.float32)
        b_k2 = tl.zeros([BT], tl.float32)
        for i_k in range(0, K, BK):
            b_q = tl.load(p_q + i_k + o_qk, mask=m_row, other=0.0).to(tl.float32)
            b_k = tl.load(p_k + i_k + o_qk, mask=m_row, other=0.0).to(tl.float32)
            b_q2 += tl.sum(b_q * b_q, axis=1)
            b_k2 += tl.sum(b_k * b_k, axis=1)
        b_rq = 1.0 / tl.sqrt(b_q2 + 1e-6)
        b_rk = 1.0 / tl.sqrt(b_k2 + 1e-6)
        # The value heads of one query head write the same numbers.
        p_rnorm += row0 * H + i_h
        tl.store(p_rnorm + o_t * H, b_rq, mask=m_t)
        tl.store(p_rnorm + B.to(tl.int64) * T * H + o_t * H, b_rk, mask=m_t)
    b_beta = beta_value(
        tl.load(p_beta + hv0 + o_t * HV, mask=m_t, other=0.0).to(tl.float32),
        BETA_SIGMOID,
        BETA_SCALE,
    )
    b_beta = tl.where(m_t, b_beta, 0.0)

    b_aqk = tl.zeros([BT, BT], tl.float32)
    b_akk = tl.zeros([BT, BT], tl.float32)
    b_diag = tl.zeros([BT], tl.float32)
    for i_k in range(0, K, BK):
        b_q = tl.load(p_q + i_k + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rq[:, None]
        b_k = tl.load(p_k + i_k + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rk[:, None]
        b_gc = cumulative_decay(
            p_g, p_dt_bias, i_k + o_rk, i_hv * K + i_k + o_k, m_row, rate, lower_bound, GATE
        )
        tl.store(p_gc + i_k + o_rk, b_gc, mask=m_row)
        # Other threads of this program read it back as reference of a node.
        tl.debug_barrier()
        tl.store(p_qg + i_k + o_rk, decayed(b_q, b_gc, scale).to(CT), mask=m_row)
        tl.store(p_kd + i_k + o_rk, decayed_to_end(b_k, b_gc).to(CT), mask=m_row)
        b_diag += tl.sum(b_q * b_k, axis=1)
        for level in range(LEVELS):
            b_e = level_decay(b_gc, p_gc, HV * K, o_t, i_k + o_k, level, last)
            b_ke = (b_k * b_e).to(CT)
            b_low = tl.trans(b_ke)
            b_xq = tl.dot((b_q * b_e).to(CT), b_low, input_precision=PREC)
            b_xk = tl.dot(b_ke, b_low, input_precision=PREC)
            mask = split_at(o_t, level)
            b_aqk += tl.where(mask, b_xq, 0.0)
            b_akk += tl.where(mask, b_xk, 0.0)

    eye = o_t[:, None] == o_t[None, :]
    lower = o_t[:, None] > o_t[None, :]
    b_aqk = tl.where(eye, b_diag[:, None], tl.where(lower, b_aqk, 0.0)) * scale
    b_akk = tl.where(lower, b_akk, 0.0) * b_beta[:, None]
    o_tt = o_t[:, None] * (HV * BT) + o_t[None, :]
    tl.store(p_aqk + hv0 * BT + o_tt, b_aqk.to(CT), mask=m_row)

    b_tinv = tl.where(eye, 1.0, 0.0) - tl.where(split_at(o_t, 0), b_akk, 0.0)
    for level in range(1, LEVELS):
        b_a = tl.where(split_at(o_t, level), b_akk, 0.0)
        b_x = tl.dot(b_a, b_tinv, input_precision=PREC_SOLVE)
        b_tinv -= tl.dot(b_tinv, b_x, input_precision=PREC_SOLVE)
    b_t = b_tinv.to(CT)
    tl.store(p_tinv + hv0 * BT + o_tt, b_t, mask=m_row)

    o_v = tl.arange(0, BV)
    for i_v in range(0, V, BV):
        o_rv = i_v + o_t[:, None] * (HV * V) + o_v[None, :]
        b_v = tl.load(p_v + o_rv, mask=m_row, other=0.0).to(tl.float32)
        b_u = tl.dot(b_t, (b_v * b_beta[:, None]).to(CT), input_precision=PREC)
        tl.store(p_u0 + o_rv, b_u.to(CT), mask=m_row)
    for i_k in range(0, K, BK):
        b_k = tl.load(p_k + i_k + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rk[:, None]
        b_gc = tl.load(p_gc + i_k + o_rk, mask=m_row, other=0.0)
        b_w = tl.dot(b_t, decayed(b_k, b_gc, b_beta[:, None]).to(CT), input_precision=PREC)
        tl.store(p_w + i_k + o_rk, b_w.to(CT), mask=m_row)


@triton.jit(do_not_specialize=["B", "T", "H", "HV"])
def kda_remake_kernel(
    p_q,
    p_k,
    p_v,
    p_g,
    p_beta,
    p_A_log,
    p_dt_bias,
    scale,
    lower_bound,
    p_tinv,
    p_rnorm,
    p_gc,
    p_qg,
    p_kd,
    p_w,
    p_u0,
    p_chunks,
    B,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    BETA_SCALE: tl.constexpr,
    PREC: tl.constexpr,
):
    """Make gc, qg, kd, w and u0 again, of T and the norms that the forward kept."""
    CT: tl.constexpr = p_w.dtype.element_ty
    i_c = tl.program_id(0)
    i_b = tl.program_id(1) // HV
    i_hv = tl.program_id(1) % HV
    i_h = i_hv // (HV // H)
    start = tl.load(p_chunks + i_c * 4)
    stop = tl.load(p_chunks + i_c * 4 + 1)

    o_t = tl.arange(0, BT)
    m_t = start + o_t < stop
    m_row = m_t[:, None]
    o_k = tl.arange(0, BK)
    o_v = tl.arange(0, BV)
    # One 64-bit address per tensor, 32-bit offsets inside the chunk.
    row0 = i_b.to(tl.int64) * T + start
    hv0 = row0 * HV + i_hv
    p_q += (row0 * H + i_h) * K
    p_k += (row0 * H + i_h) * K
    p_v += hv0 * V
    p_u0 += hv0 * V
    p_g += hv0 * K
    p_gc += hv0 * K
    p_qg += hv0 * K
    p_kd += hv0 * K
    p_w += hv0 * K
    o_qk = o_t[:, None] * (H * K) + o_k[None, :]
    o_rk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_rv = o_t[:, None] * (HV * V) + o_v[None, :]

    rate = 1.0
    if p_A_log is not None:
        rate = gate_rate(tl.load(p_A_log + i_hv).to(tl.float32))
    b_rq = tl.full([BT], 1.0, tl.float32)
    b_rk = tl.full([BT], 1.0, tl.float32)
    if L2NORM:
        p_rnorm += row0 * H + i_h
        b_rq = tl.load(p_rnorm + o_t * H, mask=m_t, other=0.0)
        b_rk = tl.load(p_rnorm + B.to(tl.int64) * T * H + o_t * H, mask=m_t, other=0.0)
    b_beta = beta_value(
        tl.load(p_beta + hv0 + o_t * HV, mask=m_t, other=0.0).to(tl.float32),
        BETA_SIGMOID,
        BETA_SCALE,
    )
    b_beta = tl.where(m_t, b_beta, 0.0)
    o_tt = hv0 * BT + o_t[:, None] * (HV * BT) + o_t[None, :]
    b_t = tl.load(p_tinv + o_tt, mask=m_row, other=0.0)

    for i_k in range(0, K, BK):
        b_q = tl.load(p_q + i_k + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rq[:, None]
        b_k = tl.load(p_k + i_k + o_qk, mask=m_row, other=0.0).to(tl.float32) * b_rk[:, None]
        b_gc = cumulative_decay(
            p_g, p_dt_bias, i_k + o_rk, i_hv * K + i_k + o_k, m_row, rate, lower_bound, GATE
        )
        tl.store(p_gc + i_k + o_rk, b_gc, mask=m_row)
        tl.store(p_qg + i_k + o_rk, decayed(b_q, b_gc, scale).to(CT), mask=m_row)
        tl.store(p_kd + i_k + o_rk, decayed_to_end(b_k, b_gc).to(CT), mask=m_row)
        b_w = tl.dot(b_t, decayed(b_k, b_gc, b_beta[:, None]).to(CT), input_precision=PREC)
        tl.store(p_w + i_k + o_rk, b_w.to(CT), mask=m_row)
    for i_v in range(0, V, BV):
        b_v = tl.load(p_v + i_v + o_rv, mask=m_row, other=0.0).to(tl.float32)
        b_u = tl.dot(b_t, (b_v * b_beta[:, None]).to(CT), input_precision=PREC)
        tl.store(p_u0 + i_v + o_rv, b_u.to(CT), mask=m_row)
