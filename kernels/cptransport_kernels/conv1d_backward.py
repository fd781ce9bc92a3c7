# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of a causal convolution. See ``conv1d``."""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.conv1d_forward import load_weights, sigmoid, tap


@triton.jit
def _silu_grad(b_pre):
    b_s = sigmoid(b_pre)
    return b_s * (1.0 + b_pre * (1.0 - b_s))


@triton.jit
def _store_edge(p_edges, p_table, b_dx, row, shift, m, i_b, o_d, B, D):
    """Keep float32 rows of the gradient: the last of a segment, and after ``shift`` of those its
    halo, which goes to peers."""
    tl.store(p_edges + (row * B + i_b) * D + o_d, b_dx, mask=m)
    if p_table is not None:
        tl.store(p_table + ((row - shift) * B + i_b) * D + o_d, b_dx, mask=m & (row >= shift))


@triton.jit(do_not_specialize=["NP", "B", "T", "halo_rows"])
def conv_bwd_kernel(
    p_x,
    p_border,
    p_weight,
    p_bias,
    p_dy,
    p_dfinal,
    p_dx,
    p_edges,
    p_table,
    p_partial,
    p_programs,
    p_spans,
    NP,
    B,
    T,
    D,
    halo_rows,
    sx_b,
    sx_t,
    sx_d,
    sy_b,
    sy_t,
    sy_d,
    sf_n,
    sf_d,
    sf_c,
    W: tl.constexpr,
    BW: tl.constexpr,
    SILU: tl.constexpr,
    STEP: tl.constexpr,
    BD: tl.constexpr,
):
    H: tl.constexpr = W - 1
    ND = tl.cdiv(D, BD)
    i_n = tl.program_id(0) // ND
    i_p = i_n % NP
    i_b = (i_n // NP).to(tl.int64)
    o_d = (tl.program_id(0) % ND * BD + tl.arange(0, BD)).to(tl.int64)
    m_d = o_d < D
    p_x += i_b * sx_b + o_d * sx_d
    p_dy += i_b * sy_b + o_d * sy_d
    p_dx += i_b * T * D + o_d

    b_bias = tl.zeros([BD], tl.float32)
    if p_bias is not None:
        b_bias += tl.load(p_bias + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_weights = load_weights(p_weight, o_d, m_d, W, BW)
    weights = ()  # type: tuple
    d_weights = ()  # type: tuple
    for w in tl.static_range(W):
        weights += (tap(b_weights, w, BW),)
        d_weights += (tl.zeros([BD], tl.float32),)
    d_bias = tl.zeros([BD], tl.float32)

    for i_s in range(tl.load(p_programs + i_p), tl.load(p_programs + i_p + 1)):
        t0 = tl.load(p_spans + 6 * i_s)
        t1 = tl.load(p_spans + 6 * i_s + 1)
        start = tl.load(p_spans + 6 * i_s + 2)
        stop = tl.load(p_spans + 6 * i_s + 3)
        halo = tl.load(p_spans + 6 * i_s + 4).to(tl.int64) * H
        state = tl.load(p_spans + 6 * i_s + 5)
        # Offsets of the rows: added up, since 64-bit products would cost more than the rest.
        o_x = t0.to(tl.int64) * sx_t
        o_y = t0.to(tl.int64) * sy_t
        o_dx = (t0 - H).to(tl.int64) * D
        # The last H inputs before the token, and the gradients that reached their outputs.
        inputs = ()  # type: tuple
        grads = ()  # type: tuple
        for j in tl.static_range(H):
            o_r = t0 - H + j
            b_x = tl.load(
                p_x + (o_x + (j - H) * tl.cast(sx_t, tl.int64)),
                mask=m_d & (o_r >= start),
                other=0.0,
            )
            b_x = b_x.to(tl.float32)
            if p_border is not None:
                b_x += tl.load(
                    p_border + ((halo + (o_r - start + H)) * B + i_b) * D + o_d,
                    # An empty segment has no first token that would have kept its halo.
                    mask=m_d & (o_r < start) & (start < stop),
                    other=0.0,
                ).to(tl.float32)
            inputs += (b_x,)
            grads += (tl.zeros([BD], tl.float32),)
        for u0 in range(t0, t1 + H, STEP):
            rows = ()  # type: tuple
            for j in tl.static_range(STEP):
                m_u = m_d & (u0 + j < stop)
                rows += (
                    tl.load(p_x + o_x, mask=m_u, other=0.0),
                    tl.load(p_dy + o_y, mask=m_u, other=0.0),
                )
                o_x += sx_t
                o_y += sy_t
            for j in tl.static_range(STEP):
                u = u0 + j
                window = inputs + (rows[2 * j].to(tl.float32),)
                # After the segment's end it is zero, or NaN where its last rows got NaN too.
                b_g = rows[2 * j + 1].to(tl.float32)
                if SILU:
                    b_pre = b_bias
                    for w in tl.static_range(W):
                        b_pre += window[w] * weights[w]
                    b_g *= _silu_grad(b_pre)
                b_own = tl.where(u < t1, b_g, 0.0)
                d_bias += b_own
                sums = ()  # type: tuple
                for w in tl.static_range(W):
                    sums += (d_weights[w] + b_own * window[w],)
                d_weights = sums
                reached = grads + (b_g,)
                # Complete now: the gradient of the row H before the token.
                b_dx = b_g * weights[0]
                for w in tl.static_range(1, W):
                    b_dx += reached[H - w] * weights[w]
                if p_dfinal is not None:  # noqa: SIM102
                    # What the final state hands to its rows comes as if from tokens after the end.
                    if u >= stop:
                        b_dx += tl.load(
                            p_dfinal
                            + (state + i_b) * sf_n
                            + o_d * sf_d
                            + (u - stop) * tl.cast(sf_c, tl.int64),
                            mask=m_d & (state >= 0) & (u < stop + H),
                            other=0.0,
                        ).to(tl.float32)
                m_row = (u >= t0 + H) & (u < t1 + H)
                tl.store(p_dx + o_dx, b_dx.to(p_dx.dtype.element_ty), mask=m_d & m_row)
                o_dx += D
                if p_edges is not None:  # noqa: SIM102
                    if (u < start + H) | (u >= stop):
                        # In first spans only: no span but the last is shorter than a halo.
                        m_halo = u < start + H
                        edge = halo + tl.where(m_halo, halo_rows + u - start, u - stop)
                        m_edge = m_d & (m_halo | (m_row & (u >= stop)))
                        _store_edge(p_edges, p_table, b_dx, edge, halo_rows, m_edge, i_b, o_d, B, D)
                inputs = window[1:]
                grads = reached[1:]
    p_partial += i_n.to(tl.int64) * (W + 1) * D + o_d
    for w in tl.static_range(W):
        tl.store(p_partial + w * D, d_weights[w], mask=m_d)
    tl.store(p_partial + W * D, d_bias, mask=m_d)


@triton.jit
def _load_before(p_x, p_border, o_r, start, stop, halo, i_b, o_d, m_d, B, D, sx_t, H: tl.constexpr):
    """Return inputs of rows from ``start - H`` on, as [rows, BD] float32; zeros after the end."""
    m_x = (o_r >= start) & (o_r < stop)
    b_x = tl.load(
        p_x[None, :] + (o_r * sx_t)[:, None],
        mask=m_x[:, None] & m_d[None, :],
        other=0.0,
    ).to(tl.float32)
    if p_border is not None:
        m_h = (o_r < start) & (o_r >= start - H) & (start < stop)
        b_x += tl.load(
            p_border + (((halo + (o_r - start + H)) * B + i_b) * D)[:, None] + o_d[None, :],
            mask=m_h[:, None] & m_d[None, :],
            other=0.0,
        ).to(tl.float32)
    return b_x


@triton.jit(do_not_specialize=["NP", "B", "T", "halo_rows"])
def conv_bwd_wide_kernel(
    p_x,
    p_border,
    p_weight,
    p_bias,
    p_dy,
    p_dfinal,
    p_dx,
    p_edges,
    p_table,
    p_partial,
    p_programs,
    p_spans,
    NP,
    B,
    T,
    D,
    halo_rows,
    sx_b,
    sx_t,
    sx_d,
    sy_b,
    sy_t,
    sy_d,
    sf_n,
    sf_d,
    sf_c,
    W: tl.constexpr,
    BW: tl.constexpr,
    SILU: tl.constexpr,
    STEP: tl.constexpr,
    BD: tl.constexpr,
):
    H: tl.constexpr = W - 1
    ND = tl.cdiv(D, BD)
    i_n = tl.program_id(0) // ND
    i_p = i_n % NP
    i_b = (i_n // NP).to(tl.int64)
    o_d = (tl.program_id(0) % ND * BD + tl.arange(0, BD)).to(tl.int64)
    m_d = o_d < D
    p_x += i_b * sx_b + o_d * sx_d
    p_dy += i_b * sy_b + o_d * sy_d
    p_dx += i_b * T * D
    p_partial += i_n.to(tl.int64) * (W + 1) * D + o_d
    for w in range(W + 1):
        tl.store(p_partial + w * D, tl.zeros([BD], tl.float32), mask=m_d)
    tl.debug_barrier()
    b_bias = tl.zeros([BD], tl.float32)
    if p_bias is not None:
        b_bias += tl.load(p_bias + o_d, mask=m_d, other=0.0).to(tl.float32)

    for i_s in range(tl.load(p_programs + i_p), tl.load(p_programs + i_p + 1)):
        t0 = tl.load(p_spans + 6 * i_s).to(tl.int64)
        t1 = tl.load(p_spans + 6 * i_s + 1).to(tl.int64)
        start = tl.load(p_spans + 6 * i_s + 2).to(tl.int64)
        stop = tl.load(p_spans + 6 * i_s + 3).to(tl.int64)
        halo = tl.load(p_spans + 6 * i_s + 4).to(tl.int64) * H
        state = tl.load(p_spans + 6 * i_s + 5)
        # A segment's first span has the rows of its halo too.
        for q0 in range(tl.where(t0 == start, t0 - H, t0), t1, STEP):
            o_q = q0 + tl.arange(0, STEP).to(tl.int64)
            b_dx = tl.zeros([STEP, BD], tl.float32)
            b_own = tl.zeros([STEP, BD], tl.float32)
            for s in range(W):
                o_u = o_q + s
                m_u = (o_u >= start) & (o_u < stop)
                b_g = tl.load(
                    p_dy[None, :] + (o_u * sy_t)[:, None],
                    mask=m_u[:, None] & m_d[None, :],
                    other=0.0,
                ).to(tl.float32)
                if SILU:
                    b_pre = tl.zeros([STEP, BD], tl.float32) + b_bias[None, :]
                    for w in range(W):
                        b_x = _load_before(
                            p_x,
                            p_border,
                            o_u - H + w,
                            start,
                            stop,
                            halo,
                            i_b,
                            o_d,
                            m_d,
                            B,
                            D,
                            sx_t,
                            H,
                        )
                        b_w = tl.load(p_weight + o_d * W + w, mask=m_d, other=0.0)
                        b_pre += b_x * b_w.to(tl.float32)[None, :]
                    b_g *= _silu_grad(b_pre)
                b_g = tl.where(m_u[:, None], b_g, 0.0)
                b_w = tl.load(p_weight + o_d * W + H - s, mask=m_d, other=0.0)
                b_dx += b_g * b_w.to(tl.float32)[None, :]
                b_own = tl.where(s == 0, b_g, b_own)
            if p_dfinal is not None:
                column = o_q + H - stop
                b_dx += tl.load(
                    p_dfinal
                    + (state + i_b) * sf_n
                    + (column * sf_c)[:, None]
                    + (o_d * sf_d)[None, :],
                    mask=((state >= 0) & (column >= 0) & (column < H))[:, None] & m_d[None, :],
                    other=0.0,
                ).to(tl.float32)
            m_row = (o_q >= t0) & (o_q < t1)
            tl.store(
                p_dx + (o_q * D)[:, None] + o_d[None, :],
                b_dx.to(p_dx.dtype.element_ty),
                mask=m_row[:, None] & m_d[None, :],
            )
            if p_edges is not None:
                m_halo = o_q < start
                edge = halo + tl.where(m_halo, halo_rows + o_q + H - start, o_q + H - stop)
                m_edge = m_halo | (m_row & (o_q >= stop - H))
                _store_edge(
                    p_edges,
                    p_table,
                    b_dx,
                    edge[:, None],
                    halo_rows,
                    m_edge[:, None] & m_d[None, :],
                    i_b,
                    o_d[None, :],
                    B,
                    D,
                )
            b_own = tl.where(m_row[:, None], b_own, 0.0)
            for w in range(W):
                b_x = _load_before(
                    p_x, p_border, o_q - H + w, start, stop, halo, i_b, o_d, m_d, B, D, sx_t, H
                )
                b_sum = tl.load(p_partial + w * D, mask=m_d, other=0.0) + tl.sum(b_own * b_x, 0)
                tl.store(p_partial + w * D, b_sum, mask=m_d)
            b_sum = tl.load(p_partial + W * D, mask=m_d, other=0.0) + tl.sum(b_own, 0)
            tl.store(p_partial + W * D, b_sum, mask=m_d)
            # Other threads of this program read the sums back.
            tl.debug_barrier()


@triton.jit(do_not_specialize=["P"])
def conv_reduce_kernel(
    p_partial,
    p_dweight,
    p_dbias,
    P,
    D,
    W: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    o_d = (tl.program_id(0) * BD + tl.arange(0, BD)).to(tl.int64)
    m_d = o_d < D
    w = tl.program_id(1)
    b_sum = tl.zeros([BP, BD], tl.float32)
    for i in range(0, P, BP):
        o_p = i + tl.arange(0, BP)
        b_sum += tl.load(
            p_partial + ((o_p.to(tl.int64) * (W + 1) + w) * D)[:, None] + o_d[None, :],
            mask=(o_p < P)[:, None] & m_d[None, :],
            other=0.0,
        )
    b_total = tl.sum(b_sum, 0)
    if w < W:
        tl.store(p_dweight + o_d * W + w, b_total.to(p_dweight.dtype.element_ty), mask=m_d)
    elif p_dbias is not None:
        tl.store(p_dbias + o_d, b_total.to(p_dbias.dtype.element_ty), mask=m_d)
