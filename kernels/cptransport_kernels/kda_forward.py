# SPDX-License-Identifier: Apache-2.0
"""The state pass of KDA over a rank's pieces, and the correction of outputs by entering states.

A *piece* is a run of tokens that one program walks chunk by chunk: a segment, or a part of a long
one. A *seeded* piece knows the state that enters it. Any other piece starts from zero and carries
K columns more, which start from the identity with v = 0: their final value is the piece's
transition M, their output its effective query R. So one pass yields

    state update E [K, V]      transition M [K, K]      o_ext [T, V]      R [T, K]

and later ``o = o_ext + R S_in``, ``S_out = M S_in + E``.

Tables: ``pieces`` int32 [NP, 8] = start, stop, seeded, segment, row of E in the summary (-1: none),
row of M, first chunk, whether the segment starts here. States are ``[NP * B, HV, K, V]``, row =
piece * B + b; summaries and seeds have row = segment * B + b.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.common import decay


@triton.jit(do_not_specialize=["B", "T", "HV"])
def kda_forward_pass_kernel(
    p_qg,
    p_kd,
    p_w,
    p_u0,
    p_aqk,
    p_gc,
    p_seed,
    p_o,
    p_r,
    p_e,
    p_m,
    p_s_in,
    p_state,
    p_transition,
    p_pieces,
    B,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
    NCOL: tl.constexpr,
    PREC: tl.constexpr,
):
    CT: tl.constexpr = p_w.dtype.element_ty
    NV: tl.constexpr = V // BC
    i_col = tl.program_id(0) % NCOL
    i_p = tl.program_id(0) // NCOL // B
    i_b = tl.program_id(0) // NCOL % B
    i_hv = tl.program_id(1)
    start = tl.load(p_pieces + i_p * 8)
    stop = tl.load(p_pieces + i_p * 8 + 1)
    seeded = tl.load(p_pieces + i_p * 8 + 2)
    segment = tl.load(p_pieces + i_p * 8 + 3)
    is_v = i_col < NV
    if (seeded != 0) & (i_col >= NV):
        return

    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, K)
    o_c = tl.arange(0, BC) + tl.where(is_v, i_col, i_col - NV) * BC
    width = tl.where(is_v, V, K)
    head = (i_p * B + i_b).to(tl.int64) * HV + i_hv
    o_state = o_k[:, None] * width + o_c[None, :]
    b_s = tl.where(o_k[:, None] == o_c[None, :], 1.0, 0.0) * tl.where(is_v, 0.0, 1.0)
    if seeded != 0:
        if p_seed is not None:
            seed_head = (segment * B + i_b).to(tl.int64) * HV + i_hv
            b_s = tl.load(p_seed + seed_head * K * V + o_state)
        tl.store(p_s_in + head * K * V + o_state, b_s)

    o_rk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_rc = o_t[:, None] * (HV * width) + o_c[None, :]
    o_rv = o_t[:, None] * (HV * V) + o_c[None, :]
    o_tt = o_t[:, None] * (HV * BT) + o_t[None, :]
    for t in range(start, stop, BT):
        # One 64-bit address per tensor, 32-bit offsets inside the chunk.
        row0 = (i_b.to(tl.int64) * T + t) * HV + i_hv
        m_row = (o_t < stop - t)[:, None]
        b_w = tl.load(p_w + row0 * K + o_rk, mask=m_row, other=0.0)
        b_u = tl.load(p_u0 + row0 * V + o_rv, mask=m_row & is_v, other=0.0).to(tl.float32)
        b_sc = b_s.to(CT)
        b_uc = (b_u - tl.dot(b_w, b_sc, input_precision=PREC)).to(CT)
        b_qg = tl.load(p_qg + row0 * K + o_rk, mask=m_row, other=0.0)
        b_aqk = tl.load(p_aqk + row0 * BT + o_tt, mask=m_row, other=0.0)
        b_o = tl.dot(b_qg, b_sc, input_precision=PREC)
        b_o = tl.dot(b_aqk, b_uc, b_o, input_precision=PREC)
        b_decay = decay(tl.load(p_gc + (row0 + (tl.minimum(BT, stop - t) - 1) * HV) * K + o_k))
        b_kd = tl.load(p_kd + row0 * K + o_rk, mask=m_row, other=0.0)
        b_s = tl.dot(tl.trans(b_kd), b_uc, b_s * b_decay[:, None], input_precision=PREC)
        if is_v:
            tl.store(p_o + row0 * V + o_rv, b_o.to(p_o.dtype.element_ty), mask=m_row)
        else:
            if p_r is not None:
                tl.store(p_r + row0 * K + o_rc, b_o.to(CT), mask=m_row)

    if is_v:
        if p_e is not None:
            tl.store(p_e + head * K * V + o_state, b_s)
        if p_state is not None:
            row = tl.load(p_pieces + i_p * 8 + 4)
            if row >= 0:
                out = (row * B + i_b).to(tl.int64) * HV + i_hv
                tl.store(p_state + out * K * V + o_state, b_s)
    elif p_m is not None:
        tl.store(p_m + head * K * K + o_state, b_s)
        if p_transition is not None:
            row = tl.load(p_pieces + i_p * 8 + 5)
            if row >= 0:
                out = (row * B + i_b).to(tl.int64) * HV + i_hv
                tl.store(p_transition + out * K * K + o_state, b_s)


@triton.jit(do_not_specialize=["B", "T", "HV"])
def kda_correct_kernel(
    p_o,
    p_r,
    p_incoming,
    p_s_in,
    p_chunks,
    p_pieces,
    B,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BV: tl.constexpr,
    BY_SEGMENT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Add R S_in to the outputs of pieces that are not seeded.

    BY_SEGMENT: the entering states come in one row per segment (no segment is cut), and the program
    of a piece's first chunk keeps a copy in ``p_s_in`` for the backward.
    """
    CT: tl.constexpr = p_r.dtype.element_ty
    i_c = tl.program_id(0)
    i_v = tl.program_id(1)
    i_b = tl.program_id(2) // HV
    i_hv = tl.program_id(2) % HV
    start = tl.load(p_chunks + i_c * 4)
    stop = tl.load(p_chunks + i_c * 4 + 1)
    i_p = tl.load(p_chunks + i_c * 4 + 2)
    if tl.load(p_pieces + i_p * 8 + 2) != 0:
        return
    o_t = tl.arange(0, BT)
    o_k = tl.arange(0, K)
    o_v = i_v * BV + tl.arange(0, BV)
    head = (i_p * B + i_b).to(tl.int64) * HV + i_hv
    o_state = o_k[:, None] * V + o_v[None, :]
    if BY_SEGMENT:
        segment = tl.load(p_pieces + i_p * 8 + 3)
        b_s = tl.load(p_incoming + ((segment * B + i_b).to(tl.int64) * HV + i_hv) * K * V + o_state)
        if tl.load(p_pieces + i_p * 8 + 6) == i_c:
            tl.store(p_s_in + head * K * V + o_state, b_s)
    else:
        b_s = tl.load(p_s_in + head * K * V + o_state)
    m_row = (start + o_t < stop)[:, None]
    row0 = (i_b.to(tl.int64) * T + start) * HV + i_hv
    p_o += row0 * V
    o_rv = o_t[:, None] * (HV * V) + o_v[None, :]
    b_r = tl.load(p_r + row0 * K + o_t[:, None] * (HV * K) + o_k[None, :], mask=m_row, other=0.0)
    b_o = tl.load(p_o + o_rv, mask=m_row, other=0.0).to(tl.float32)
    b_o = tl.dot(b_r, b_s.to(CT), b_o, input_precision=PREC)
    tl.store(p_o + o_rv, b_o.to(p_o.dtype.element_ty), mask=m_row)
