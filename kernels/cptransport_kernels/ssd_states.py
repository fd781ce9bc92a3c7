# SPDX-License-Identifier: Apache-2.0
"""The states of SSD on a rank: what pieces add, how pieces join, and the state at every chunk.

Both directions are one recurrence over chunks, with other operands (``docs/algebra.md``)::

    forward    S  <- exp(G_end) S  + sum_j exp(G_end - G_j) d_j x_j B_j^T
    reverse    dS <- exp(G_end) dS + sum_i exp(G_i) dy_i C_i^T

G being the log decay from before the chunk to after a token (in the kernels, to base 2). So is the
join of pieces: a scan with one number per head. What enters a segment is not needed for any of it:
it is added later, decayed.

Rows of states: ``row * B + b``, each ``[H, P, N]`` float32. Tables: ``ssd_tables``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.common import LOG2_E, MIN_LOG_DECAY, softplus

#: Log decays are split at multiples of 1 / this, which add up exactly over a chunk of 128 tokens.
GRID = tl.constexpr(512.0)

#: log2(e) less its float32 value: a rate that is wrong in the same direction for all tokens, however
#: little, shows in its gradient, which is a sum over all of them.
LOG2_E_REST = tl.constexpr(1.9259629911e-8)
LN_2 = tl.constexpr(0.6931471805599453)

#: What stands for a rate A of -inf, which may meet a step of zero.
MIN_RATE = tl.constexpr(-1.8e19)


@triton.jit
def load_rate(p_A, i_h):
    """Return A of a head, finite."""
    rate = tl.load(p_A + i_h).to(tl.float32)
    return tl.where(rate < MIN_RATE, MIN_RATE, rate)


@triton.jit
def load_bias(p_dt_bias, i_h):
    """Return dt_bias of a head."""
    bias = 0.0
    if p_dt_bias is not None:
        bias = tl.load(p_dt_bias + i_h).to(tl.float32)
    return bias


@triton.jit
def free_step(b_raw, SOFTPLUS: tl.constexpr):
    """Return the step of dt + dt_bias before it is clamped."""
    if SOFTPLUS:
        b_raw = softplus(b_raw)
    return b_raw


@triton.jit
def chunk_steps(p_dt, o_dt, m_t, bias, rate, dt_min, dt_max, SOFTPLUS: tl.constexpr):
    """Return a chunk's steps and the log2 of the decay from before it to after each token, [BT] each,
    the latter as (coarse, fine).

    A sum of log decays over part of the chunk is a difference of two such pairs. Where a strong
    decay precedes, a plain cumulative sum would have lost the small ones after it; here the coarse
    parts are exact and the fine ones too small to lose anything. Rows of no token have step 0.
    """
    b_d = free_step(tl.load(p_dt + o_dt, mask=m_t, other=0.0).to(tl.float32) + bias, SOFTPLUS)
    # Not tl.minimum and tl.maximum: a NaN must stay NaN.
    b_d = tl.where(b_d < dt_min, dt_min, b_d)
    b_d = tl.where(b_d > dt_max, dt_max, b_d)
    b_d = tl.where(m_t, b_d, 0.0)
    b_a = b_d * rate
    b_a = tl.where(b_a < MIN_LOG_DECAY, MIN_LOG_DECAY, b_a)
    b_log2 = b_a * LOG2_E
    b_coarse = tl.floor(b_log2 * GRID + 0.5) * (1.0 / GRID)
    b_fine = (b_log2 - b_coarse) + b_a * LOG2_E_REST
    return b_d, tl.cumsum(b_coarse, axis=0), tl.cumsum(b_fine, axis=0)


@triton.jit
def chunk_end(b_coarse, b_fine, o_t, BT: tl.constexpr):
    """Return the log2 decay over the chunk as (coarse, fine); rows after its last token repeat it."""
    last = o_t == BT - 1
    return tl.sum(tl.where(last, b_coarse, 0.0)), tl.sum(tl.where(last, b_fine, 0.0))


@triton.jit
def load_rows(p_u, o_t, u_t, o_p, mask):
    """Return rows ``u_t`` elements apart."""
    return tl.load(p_u + o_t[:, None] * u_t + o_p[None, :], mask=mask, other=0.0)


@triton.jit
def load_gated(p_dy, p_z, o_t, dy_t, z_t, o_p, mask):
    """Return rows of a gradient of the output, float32, times the gate if there is one."""
    b_dy = load_rows(p_dy, o_t, dy_t, o_p, mask).to(tl.float32)
    if p_z is not None:
        b_z = load_rows(p_z, o_t, z_t, o_p, mask).to(tl.float32)
        b_dy *= b_z * tl.sigmoid(b_z)
    return b_dy


@triton.jit
def walk_states(
    b_s,
    p_u,
    u_t,
    p_z,
    z_t,
    p_k,
    k_t,
    p_dt,
    dt_t,
    p_h,
    p_other,
    p_passing,
    heads,
    t0,
    chunk0,
    length,
    o_p,
    o_n,
    bias,
    rate,
    dt_min,
    dt_max,
    P: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    REVERSE: tl.constexpr,
    CT: tl.constexpr,
    PREC: tl.constexpr,
):
    """Walk a piece from state ``b_s`` [BP, BN]; return the state that leaves and the log2 decay.

    Args:
        p_u, p_z, p_k, p_dt: of the head (group): x or dy, the gate of dy, B or C, dt; ``_t``
            elements from token to token.
        p_h: of the head, where the state before each chunk in travel order goes, ``heads`` states
            from chunk to chunk; or None.
        p_other, p_passing: the same of the other direction, already there, and where its products
            with these go, ``heads`` elements from chunk to chunk; or None.
        t0, chunk0: the piece's first token and chunk, 64 bits.
    """
    o_t = tl.arange(0, BT)
    o_h = o_p[:, None] * N + o_n[None, :]
    m_p = (o_p < P)[None, :]
    m_n = (o_n < N)[None, :]
    n = tl.cdiv(length, BT)
    total = 0.0
    for i in range(n):
        c = i
        if REVERSE:
            c = n - 1 - i
        t = t0 + c * BT
        m_t = o_t < length - c * BT
        m_row = m_t[:, None]
        if p_h is not None:
            chunk = (chunk0 + c) * heads
            m_h = (o_p < P)[:, None] & m_n
            tl.store(p_h + chunk * (P * N) + o_h, b_s.to(CT), mask=m_h)
            if p_other is not None:
                b_other = tl.load(p_other + chunk * (P * N) + o_h, mask=m_h, other=0.0)
                tl.store(p_passing + chunk, tl.sum(b_other.to(tl.float32) * b_s))
        b_d, b_coarse, b_fine = chunk_steps(
            p_dt + t * dt_t, o_t * dt_t, m_t, bias, rate, dt_min, dt_max, SOFTPLUS
        )
        end_coarse, end_fine = chunk_end(b_coarse, b_fine, o_t, BT)
        if REVERSE:
            p_zt = p_z + t * z_t if p_z is not None else None
            b_u = load_gated(p_u + t * u_t, p_zt, o_t, u_t, z_t, o_p, m_row & m_p)
            b_w = tl.exp2(b_coarse + b_fine)
        else:
            b_u = load_rows(p_u + t * u_t, o_t, u_t, o_p, m_row & m_p).to(tl.float32)
            b_w = tl.exp2((end_coarse - b_coarse) + (end_fine - b_fine)) * b_d
        b_k = load_rows(p_k + t * k_t, o_t, k_t, o_n, m_row & m_n).to(CT)
        end = end_coarse + end_fine
        b_u = (b_u * b_w[:, None]).to(CT)
        b_s = tl.dot(tl.trans(b_u), b_k, b_s * tl.exp2(end), input_precision=PREC)
        total += end
    return b_s, total


@triton.jit(do_not_specialize=["B", "H", "G"])
def ssd_summary_kernel(
    p_u,
    u_b,
    u_t,
    p_z,
    z_b,
    z_t,
    p_k,
    k_b,
    k_t,
    p_dt,
    dt_b,
    dt_t,
    p_A,
    p_dt_bias,
    dt_min,
    dt_max,
    p_states,
    p_decay,
    p_seed,
    p_state,
    p_transition,
    p_pieces,
    B,
    H,
    G,
    P: tl.constexpr,
    N: tl.constexpr,
    BT: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    CUT: tl.constexpr,
    SOFTPLUS: tl.constexpr,
    REVERSE: tl.constexpr,
    BF16: tl.constexpr,
    PREC: tl.constexpr,
):
    """What each piece adds to the state, from zero, and its log2 decay; one program per piece, head
    and block of BP channels.

    CUT: they go to ``p_states``, ``p_decay``, where ``ssd_join_kernel`` finds them. Else every piece
    is a segment, and those that publish write their summary here; a seed, the state that enters,
    belongs to it.
    """
    CT: tl.constexpr = tl.bfloat16 if BF16 else tl.float32
    NP: tl.constexpr = (P + BP - 1) // BP
    i_pb = tl.program_id(0) % NP
    i_b = (tl.program_id(0) // NP % B).to(tl.int64)
    piece = p_pieces + tl.program_id(0) // NP // B * 8
    i_h = tl.program_id(1)
    if tl.load(piece + 5) == 0:
        return
    start = tl.load(piece)
    length = tl.load(piece + 1) - start
    segment = tl.load(piece + 2)
    row = tl.load(piece + 4)
    o_p = i_pb * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    b_s, total = walk_states(
        tl.zeros([BP, BN], tl.float32),
        p_u + i_b * u_b + i_h * P,
        u_t,
        p_z + i_b * z_b + i_h * P if p_z is not None else None,
        z_t,
        p_k + i_b * k_b + i_h // (H // G) * N,
        k_t,
        p_dt + i_b * dt_b + i_h,
        dt_t,
        None,
        None,
        None,
        0,
        start.to(tl.int64),
        0,
        length,
        o_p,
        o_n,
        load_bias(p_dt_bias, i_h),
        load_rate(p_A, i_h),
        dt_min,
        dt_max,
        P,
        N,
        BT,
        SOFTPLUS,
        REVERSE,
        CT,
        PREC,
    )
    o_s = o_p[:, None] * N + o_n[None, :]
    m_s = (o_p < P)[:, None] & (o_n < N)[None, :]
    if CUT:
        if row >= 0:
            tl.store(p_states + ((row * B + i_b) * H + i_h) * P * N + o_s, b_s, mask=m_s)
        if i_pb == 0:
            tl.store(p_decay + tl.program_id(0) // NP * H + i_h, total)
    else:
        out = (segment * B + i_b) * H + i_h
        published = tl.load(piece + 7)
        if p_state is not None:
            m_s = m_s & (published % 2 == 1)
            if p_seed is not None:
                b_s += tl.exp2(total) * tl.load(p_seed + out * P * N + o_s, mask=m_s, other=0.0)
            tl.store(p_state + out * P * N + o_s, b_s, mask=m_s)
        if p_transition is not None:
            tl.store(p_transition + out, total * LN_2, mask=(published >= 2) & (i_pb == 0))


@triton.jit(do_not_specialize=["B", "H"])
def ssd_join_kernel(
    p_states,
    p_decay,
    p_before,
    p_seed,
    p_state,
    p_transition,
    p_pieces,
    p_segments,
    B,
    H,
    E: tl.constexpr,
    BE: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """Scan the pieces of each segment; one program per segment, head and BE of its E = P * N states.

    ``p_states`` become, in place, what enters each piece from a zero start; ``p_decay`` [NP * B, H]
    are the pieces' own log2 decays, ``p_before`` become those up to each piece. Segments that publish
    write their summary.
    """
    NE: tl.constexpr = (E + BE - 1) // BE
    i_e = tl.program_id(0) % NE
    i_b = (tl.program_id(0) // NE % B).to(tl.int64)
    i_s = tl.program_id(0) // NE // B
    i_h = tl.program_id(1)
    first = tl.load(p_segments + i_s * 4)
    n = tl.load(p_segments + i_s * 4 + 1)
    o_e = i_e * BE + tl.arange(0, BE)
    m_e = o_e < E
    b_s = tl.zeros([BE], tl.float32)
    total = 0.0
    for i in range(n):
        i_p = first + i
        if REVERSE:
            i_p = first + n - 1 - i
        row = tl.load(p_pieces + i_p * 8 + 4)
        walked = tl.load(p_pieces + i_p * 8 + 5) != 0
        here = (i_p * B + i_b) * H + i_h
        p_row = p_states + ((tl.maximum(row, 0) * B + i_b) * H + i_h) * E
        b_e = tl.load(p_row + o_e, mask=m_e & (row >= 0) & walked, other=0.0)
        tl.store(p_row + o_e, b_s, mask=m_e & (row >= 0))
        if i_e == 0:
            tl.store(p_before + here, total)
        log_decay = tl.load(p_decay + here, mask=walked, other=0.0)
        b_s = b_e + tl.exp2(log_decay) * b_s
        total += log_decay
    out = (i_s * B + i_b) * H + i_h
    if p_state is not None:
        m_e = m_e & (tl.load(p_segments + i_s * 4 + 2) != 0)
        if p_seed is not None:
            b_s += tl.exp2(total) * tl.load(p_seed + out * E + o_e, mask=m_e, other=0.0)
        tl.store(p_state + out * E + o_e, b_s, mask=m_e)
    if p_transition is not None:
        published = tl.load(p_segments + i_s * 4 + 3) != 0
        tl.store(p_transition + out, total * LN_2, mask=published & (i_e == 0))


@triton.jit
def entering_state(
    p_incoming,
    p_states,
    p_before,
    i_p,
    row,
    segment,
    i_b,
    i_h,
    o_s,
    m_s,
    B,
    H,
    E: tl.constexpr,
    CUT: tl.constexpr,
):
    """Return the state that enters piece ``i_p``: what pieces before it left from a zero start, and
    what remains of the state that enters its segment. Without ``p_incoming``, ``p_states`` has it, and
    without either it is zero."""
    m_s = m_s & (row >= 0)
    b_s = tl.zeros(o_s.shape, tl.float32)
    if p_incoming is not None:
        p_row = p_incoming + ((segment * B + i_b) * H + i_h) * E
        b_s = tl.load(p_row + o_s, mask=m_s, other=0.0)
        if CUT:
            b_s *= tl.exp2(tl.load(p_before + (i_p * B + i_b) * H + i_h))
    if p_states is not None and (CUT or p_incoming is None):
        p_row = p_states + ((tl.maximum(row, 0) * B + i_b) * H + i_h) * E
        b_s += tl.load(p_row + o_s, mask=m_s, other=0.0)
    return b_s


@triton.jit(do_not_specialize=["B", "H", "G", "NC"])
def ssd_chunk_states_kernel(
    p_u,
    u_b,
    u_t,
    p_z,
    z_b,
    z_t,
    p_k,
    k_b,
    k_t,
    p_dt,
    dt_b,
    dt_t,
    p_A,
    p_dt_bias,
    dt_min,
    dt_max,
    p_incoming,
    p_states,
    p_before,
    p_h,
    p_other,
    p_passing,
    p_leaving,
    p_pieces,
    B,
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
    REVERSE: tl.constexpr,
    PREC: tl.constexpr,
):
    """The state before every chunk in travel order, ``p_h`` [B, NC, H, P, N], by a walk over every
    piece from its true state.

    Args:
        p_incoming, p_states, p_before: as ``entering_state``.
        p_other, p_passing: those of the other direction, and [blocks of P, B * NC, H] for their
            products with these; or None.
        p_leaving: [NS * B, H, P, N], where states go that leave segments; or None.
    """
    CT: tl.constexpr = p_h.dtype.element_ty
    NP: tl.constexpr = (P + BP - 1) // BP
    i_pb = tl.program_id(0) % NP
    i_b = (tl.program_id(0) // NP % B).to(tl.int64)
    i_p = tl.program_id(0) // NP // B
    i_h = tl.program_id(1)
    start = tl.load(p_pieces + i_p * 8)
    length = tl.load(p_pieces + i_p * 8 + 1) - start
    segment = tl.load(p_pieces + i_p * 8 + 2)
    chunk0 = i_b * NC + tl.load(p_pieces + i_p * 8 + 3)
    row = tl.load(p_pieces + i_p * 8 + 4)
    o_p = i_pb * BP + tl.arange(0, BP)
    o_n = tl.arange(0, BN)
    o_s = o_p[:, None] * N + o_n[None, :]
    m_s = (o_p < P)[:, None] & (o_n < N)[None, :]
    b_s = entering_state(
        p_incoming, p_states, p_before, i_p, row, segment, i_b, i_h, o_s, m_s, B, H, P * N, CUT
    )
    b_s, _ = walk_states(
        b_s,
        p_u + i_b * u_b + i_h * P,
        u_t,
        p_z + i_b * z_b + i_h * P if p_z is not None else None,
        z_t,
        p_k + i_b * k_b + i_h // (H // G) * N,
        k_t,
        p_dt + i_b * dt_b + i_h,
        dt_t,
        p_h + i_h * P * N,
        p_other + i_h * P * N if p_other is not None else None,
        p_passing + i_pb * (NC * B.to(tl.int64)) * H + i_h if p_passing is not None else None,
        H,
        start.to(tl.int64),
        chunk0,
        length,
        o_p,
        o_n,
        load_bias(p_dt_bias, i_h),
        load_rate(p_A, i_h),
        dt_min,
        dt_max,
        P,
        N,
        BT,
        SOFTPLUS,
        REVERSE,
        CT,
        PREC,
    )
    if p_leaving is not None:
        m_s = m_s & (tl.load(p_pieces + i_p * 8 + 6) != 0)
        tl.store(p_leaving + ((segment * B + i_b) * H + i_h) * P * N + o_s, b_s, mask=m_s)
