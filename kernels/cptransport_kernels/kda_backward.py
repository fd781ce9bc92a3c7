# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: SIM102 -- Triton evaluates the outer condition when it compiles, the inner one later
"""The state passes of KDA's backward: dE = R^T dO, then states and their gradients side by side.

The first needs nothing but the effective query, so the backward summary is published before any
other kernel. The second walks every piece twice in one launch, since neither walk needs the other:
forward from the true entering state (states and corrected values of each chunk, which the forward
does not keep), and backward from the gradient of the leaving state.

Tables as in ``kda_forward``. ``h`` and ``dh`` are ``[B, NC, HV, K, V]``: the state before, the
state's gradient after each chunk. ``y = T^T dU`` is the gradient of the right side of the chunk's
triangular solve, u its result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.common import decay


@triton.jit(do_not_specialize=["B", "T", "HV"])
def kda_entering_grad_kernel(
    p_r,
    p_do,
    p_de,
    p_m,
    p_state,
    p_transition,
    p_pieces,
    B,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PREC: tl.constexpr,
):
    """Compute dE [K, V] = R^T dO of every piece that is not seeded; copy M where it is wanted."""
    CT: tl.constexpr = p_r.dtype.element_ty
    NV: tl.constexpr = V // BV
    NK: tl.constexpr = K // BK
    i_v = tl.program_id(0) % NV
    i_kk = tl.program_id(0) // NV % NK
    i_p = tl.program_id(0) // (NV * NK) // B
    i_b = tl.program_id(0) // (NV * NK) % B
    i_hv = tl.program_id(1)
    start = tl.load(p_pieces + i_p * 8)
    stop = tl.load(p_pieces + i_p * 8 + 1)
    if tl.load(p_pieces + i_p * 8 + 2) != 0:
        return
    o_t = tl.arange(0, BT)
    o_k = i_kk * BK + tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    o_rk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_rv = o_t[:, None] * (HV * V) + o_v[None, :]
    b_de = tl.zeros([BK, BV], tl.float32)
    for t in range(start, stop, BT):
        # One 64-bit address per tensor, 32-bit offsets inside the chunk.
        row0 = (i_b.to(tl.int64) * T + t) * HV + i_hv
        m_row = (o_t < stop - t)[:, None]
        b_r = tl.load(p_r + row0 * K + o_rk, mask=m_row, other=0.0)
        b_do = tl.load(p_do + row0 * V + o_rv, mask=m_row, other=0.0)
        b_de = tl.dot(tl.trans(b_r), b_do.to(CT), b_de, input_precision=PREC)
    head = (i_p * B + i_b).to(tl.int64) * HV + i_hv
    o_state = o_k[:, None] * V + o_v[None, :]
    if p_de is not None:
        tl.store(p_de + head * K * V + o_state, b_de)
    if p_state is not None:
        row = tl.load(p_pieces + i_p * 8 + 4)
        if row >= 0:
            out = (row * B + i_b).to(tl.int64) * HV + i_hv
            tl.store(p_state + out * K * V + o_state, b_de)
    if p_transition is not None:
        row = tl.load(p_pieces + i_p * 8 + 5)
        if (row >= 0) & (i_v == 0):
            out = (row * B + i_b).to(tl.int64) * HV + i_hv
            o_c = tl.arange(0, K)
            o_m = o_k[:, None] * K + o_c[None, :]
            tl.store(p_transition + out * K * K + o_m, tl.load(p_m + head * K * K + o_m))


@triton.jit(do_not_specialize=["B", "T", "HV", "NC"])
def kda_backward_pass_kernel(
    p_qg,
    p_kd,
    p_w,
    p_u0,
    p_aqk,
    p_tinv,
    p_gc,
    p_do,
    p_s_in,
    p_ds_out,
    p_h,
    p_u,
    p_dh,
    p_y,
    p_ds_in,
    p_pieces,
    B,
    T,
    HV,
    NC,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    BY_SEGMENT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Walk every piece forward (programs of even axis 0) and backward (odd).

    BY_SEGMENT: ``p_ds_out`` has one row per segment (no segment is cut), else one per piece.
    ``p_ds_in`` has one per segment and is written by the segment's first piece.
    """
    CT: tl.constexpr = p_w.dtype.element_ty
    NV: tl.constexpr = V // BC
    backward = tl.program_id(0) % 2
    i_v = tl.program_id(0) // 2 % NV
    i_p = tl.program_id(0) // (2 * NV) // B
    i_b = tl.program_id(0) // (2 * NV) % B
    i_hv = tl.program_id(1)
    start = tl.load(p_pieces + i_p * 8)
    stop = tl.load(p_pieces + i_p * 8 + 1)
    segment = tl.load(p_pieces + i_p * 8 + 3)
    chunk0 = tl.load(p_pieces + i_p * 8 + 6)
    n = tl.cdiv(stop - start, BT)

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, K)
    o_v = i_v * BC + tl.arange(0, BC)
    head = (i_p * B + i_b).to(tl.int64) * HV + i_hv
    o_state = o_k[:, None] * V + o_v[None, :]
    chunk_head = (i_b.to(tl.int64) * NC + chunk0) * HV + i_hv
    o_rk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_rv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_tt = o_t[:, None] * (HV * BT) + o_t[None, :]

    if backward == 0:
        b_s = tl.load(p_s_in + head * K * V + o_state)
        for i in range(n):
            t = start + i * BT
            row0 = (i_b.to(tl.int64) * T + t) * HV + i_hv
            m_row = (o_t < stop - t)[:, None]
            b_sc = b_s.to(CT)
            tl.store(p_h + (chunk_head + i * HV) * K * V + o_state, b_sc)
            b_w = tl.load(p_w + row0 * K + o_rk, mask=m_row, other=0.0)
            b_u = tl.load(p_u0 + row0 * V + o_rv, mask=m_row, other=0.0).to(tl.float32)
            b_uc = (b_u - tl.dot(b_w, b_sc, input_precision=PREC)).to(CT)
            tl.store(p_u + row0 * V + o_rv, b_uc, mask=m_row)
            b_decay = decay(tl.load(p_gc + (row0 + (tl.minimum(BT, stop - t) - 1) * HV) * K + o_k))
            b_kd = tl.load(p_kd + row0 * K + o_rk, mask=m_row, other=0.0)
            b_s = tl.dot(tl.trans(b_kd), b_uc, b_s * b_decay[:, None], input_precision=PREC)
    else:
        row = segment if BY_SEGMENT else i_p
        b_ds = tl.load(p_ds_out + ((row * B + i_b).to(tl.int64) * HV + i_hv) * K * V + o_state)
        for j in range(n):
            i = n - 1 - j
            t = start + i * BT
            row0 = (i_b.to(tl.int64) * T + t) * HV + i_hv
            m_row = (o_t < stop - t)[:, None]
            b_dsc = b_ds.to(CT)
            tl.store(p_dh + (chunk_head + i * HV) * K * V + o_state, b_dsc)
            b_do = tl.load(p_do + row0 * V + o_rv, mask=m_row, other=0.0).to(CT)
            b_aqk = tl.load(p_aqk + row0 * BT + o_tt, mask=m_row, other=0.0)
            b_du = tl.dot(tl.trans(b_aqk), b_do, input_precision=PREC)
            b_kd = tl.load(p_kd + row0 * K + o_rk, mask=m_row, other=0.0)
            b_duc = tl.dot(b_kd, b_dsc, b_du, input_precision=PREC).to(CT)
            b_tinv = tl.load(p_tinv + row0 * BT + o_tt, mask=m_row, other=0.0)
            b_y = tl.dot(tl.trans(b_tinv), b_duc, input_precision=PREC)
            tl.store(p_y + row0 * V + o_rv, b_y.to(CT), mask=m_row)
            b_decay = decay(tl.load(p_gc + (row0 + (tl.minimum(BT, stop - t) - 1) * HV) * K + o_k))
            b_qg = tl.load(p_qg + row0 * K + o_rk, mask=m_row, other=0.0)
            b_ds = tl.dot(tl.trans(b_qg), b_do, b_ds * b_decay[:, None], input_precision=PREC)
            b_w = tl.load(p_w + row0 * K + o_rk, mask=m_row, other=0.0)
            b_ds -= tl.dot(tl.trans(b_w), b_duc, input_precision=PREC)
        if tl.load(p_pieces + i_p * 8 + 7) != 0:
            out = (segment * B + i_b).to(tl.int64) * HV + i_hv
            tl.store(p_ds_in + out * K * V + o_state, b_ds)
