# SPDX-License-Identifier: Apache-2.0
"""The kernels of a causal convolution that read halos: its forward, and moving rows. See ``conv1d``."""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.common import COMPILED, LOG2_E, exp2_flushed

_OWN = tl.constexpr(-1)
_STATE = tl.constexpr(-2)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) without the scaling that a full division needs: what it divides by
    is at least 1."""
    y = 1.0 + exp2_flushed(x * -LOG2_E)
    if COMPILED:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [y], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / y
    return y


@triton.jit
def load_weights(p_weight, o_d, m_d, W: tl.constexpr, BW: tl.constexpr):
    """Return weights as [BD, BW] float32: neighbours in memory are loaded by neighbouring threads,
    which they would not be one tap after the other."""
    o_w = tl.arange(0, BW)
    return tl.load(
        p_weight + o_d[:, None] * W + o_w[None, :],
        mask=m_d[:, None] & (o_w < W)[None, :],
        other=0.0,
    ).to(tl.float32)


@triton.jit
def tap(b_weights, w, BW: tl.constexpr):
    """Return column ``w``, [BD]."""
    return tl.sum(tl.where(tl.arange(0, BW)[None, :] == w, b_weights, 0.0), 1)


@triton.jit
def _load_rows(
    p_own,
    p_states,
    p_addresses,
    kind,
    row,
    i_b,
    o_d,
    m_d,
    B,
    D,
    so_b,
    so_t,
    so_d,
    ss_n,
    ss_d,
    ss_c,
    H: tl.constexpr,
):
    """Return rows by kind, as [rows, BD] float32."""
    CT: tl.constexpr = p_own.dtype.element_ty
    m_own = (kind == _OWN)[:, None] & m_d[None, :]
    o_own = i_b * so_b + row[:, None] * so_t + o_d[None, :] * so_d
    b_x = tl.load(p_own + o_own, mask=m_own, other=0.0).to(tl.float32)
    if p_addresses is not None:
        m_peer = (kind >= 0)[:, None] & m_d[None, :]
        p_peer = tl.load(p_addresses + kind, mask=kind >= 0, other=0).to(tl.pointer_type(CT))
        # Past the L1 cache, which is not coherent with other devices.
        b_peer = tl.load(
            p_peer[:, None] + ((row * B + i_b) * D)[:, None] + o_d[None, :],
            mask=m_peer,
            other=0.0,
            cache_modifier=".cg",
        )
        b_x = tl.where(m_peer, b_peer.to(tl.float32), b_x)
    if p_states is not None:
        m_state = (kind == _STATE)[:, None] & m_d[None, :]
        o_state = (row // H + i_b) * ss_n + (row % H) * ss_c
        b_state = tl.load(
            p_states + o_state[:, None] + o_d[None, :] * ss_d, mask=m_state, other=0.0
        )
        b_x = tl.where(m_state, b_state.to(tl.float32), b_x)
    return b_x


@triton.jit(do_not_specialize=["first", "inner", "count", "B", "T"])
def conv_fwd_kernel(
    p_x,
    p_weight,
    p_bias,
    p_residual,
    p_y,
    p_border,
    p_states,
    p_addresses,
    p_sources,
    p_tokens,
    p_blocks,
    first,
    inner,
    count,
    B,
    T,
    D,
    sx_b,
    sx_t,
    sx_d,
    sr_b,
    sr_t,
    sr_d,
    ss_n,
    ss_d,
    ss_c,
    W: tl.constexpr,
    BW: tl.constexpr,
    SILU: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    UNROLL: tl.constexpr,
):
    H: tl.constexpr = W - 1
    ND = tl.cdiv(D, BD)
    i_p = tl.program_id(0) // ND
    i_n = first + i_p % count
    i_b = (i_p // count).to(tl.int64)
    o_d = (tl.program_id(0) % ND * BD + tl.arange(0, BD)).to(tl.int64)
    m_d = o_d < D
    o_t = tl.load(p_blocks + i_n) * BT + tl.arange(0, BT)
    m_t = o_t < T
    start = tl.load(p_tokens + 2 * o_t, mask=m_t, other=0)
    segment = tl.load(p_tokens + 2 * o_t + 1, mask=m_t, other=-1)
    m_s = segment >= 0

    b_weights = load_weights(p_weight, o_d, m_d, W, BW)
    b_y = tl.zeros([BT, BD], tl.float32)
    if p_bias is not None:
        b_y += tl.load(p_bias + o_d, mask=m_d, other=0.0).to(tl.float32)[None, :]
    # Taps that reach into the halo come first: the order of the sum is that of the taps.
    if p_border is not None:  # noqa: SIM102
        if i_n >= inner:
            for w in range(H):
                o_h = o_t - start + w
                m_h = m_s & (o_h < H)
                halo = segment.to(tl.int64) * H + o_h
                kind = tl.load(p_sources + 2 * halo, mask=m_h, other=-3)
                row = tl.load(p_sources + 2 * halo + 1, mask=m_h, other=0).to(tl.int64)
                b_h = _load_rows(
                    p_x,
                    p_states,
                    p_addresses,
                    kind,
                    row,
                    i_b,
                    o_d,
                    m_d,
                    B,
                    D,
                    sx_b,
                    sx_t,
                    sx_d,
                    ss_n,
                    ss_d,
                    ss_c,
                    H,
                )
                # A segment's first token sees the whole halo.
                m_first = m_h & (o_t == start)
                tl.store(
                    p_border + ((halo * B + i_b) * D)[:, None] + o_d[None, :],
                    b_h.to(p_border.dtype.element_ty),
                    mask=m_first[:, None] & m_d[None, :],
                )
                b_y += b_h * tap(b_weights, w, BW)[None, :]
    step = tl.cast(sx_t, tl.int64)
    o_x = o_t * step
    p_x += i_b * sx_b + o_d * sx_d
    for w in tl.range(0, W, loop_unroll_factor=UNROLL):
        b_x = tl.load(
            p_x[None, :] + (o_x + (w - H) * step)[:, None],
            mask=(m_s & (o_t + (w - H) >= start))[:, None] & m_d[None, :],
            other=0.0,
        )
        b_y += b_x.to(tl.float32) * tap(b_weights, w, BW)[None, :]
    if SILU:
        b_y = b_y * sigmoid(b_y)
    if p_residual is not None:
        b_y += tl.load(
            p_residual + i_b * sr_b + o_t.to(tl.int64)[:, None] * sr_t + o_d[None, :] * sr_d,
            mask=m_s[:, None] & m_d[None, :],
            other=0.0,
        ).to(tl.float32)
    # Rows of no segment are zero, whatever was read there.
    b_y = tl.where(m_s[:, None], b_y, 0.0)
    tl.store(
        p_y + ((i_b * T + o_t) * D)[:, None] + o_d[None, :],
        b_y.to(p_y.dtype.element_ty),
        mask=m_t[:, None] & m_d[None, :],
    )


@triton.jit(do_not_specialize=["R", "S", "B"])
def conv_rows_kernel(
    p_own,
    p_states,
    p_addresses,
    p_out,
    p_states_out,
    p_targets,
    p_sources,
    R,
    S,
    B,
    D,
    sx_b,
    sx_t,
    sx_d,
    ss_n,
    ss_d,
    ss_c,
    so_b,
    so_t,
    H: tl.constexpr,
    BR: tl.constexpr,
    BD: tl.constexpr,
):
    ND = tl.cdiv(D, BD)
    NR = tl.cdiv(R, BR)
    i_p = tl.program_id(0) // ND
    o_d = (tl.program_id(0) % ND * BD + tl.arange(0, BD)).to(tl.int64)
    m_d = o_d < D
    o_r = i_p % NR * BR + tl.arange(0, BR)
    i_b = (i_p // NR).to(tl.int64)
    m_r = o_r < R
    target = tl.load(p_targets + o_r, mask=m_r, other=0).to(tl.int64)
    # Not +0.0, which would lose the sign of a row that is only copied.
    b_x = tl.full([BR, BD], -0.0, tl.float32)
    for j in range(S):
        o_s = (o_r.to(tl.int64) * S + j) * 2
        b_x += _load_rows(
            p_own,
            p_states,
            p_addresses,
            tl.load(p_sources + o_s, mask=m_r, other=-3),
            tl.load(p_sources + o_s + 1, mask=m_r, other=0).to(tl.int64),
            i_b,
            o_d,
            m_d,
            B,
            D,
            sx_b,
            sx_t,
            sx_d,
            ss_n,
            ss_d,
            ss_c,
            H,
        )
    if p_out is not None:
        m_o = m_r & (target >= 0)
        tl.store(
            p_out + i_b * so_b + (target * so_t)[:, None] + o_d[None, :],
            b_x.to(p_out.dtype.element_ty),
            mask=m_o[:, None] & m_d[None, :],
        )
    if p_states_out is not None:
        m_o = m_r & (target < 0)
        o_n = -1 - target
        tl.store(
            p_states_out + ((o_n // H + i_b) * D * H + o_n % H)[:, None] + (o_d * H)[None, :],
            b_x.to(p_states_out.dtype.element_ty),
            mask=m_o[:, None] & m_d[None, :],
        )
