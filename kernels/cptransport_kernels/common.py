# SPDX-License-Identifier: Apache-2.0
"""Device helpers that the KDA kernels share: gate, beta, and the binary tree over a chunk's tokens.

**The tree.** Inside a chunk of BT = 2^LEVELS tokens, two tokens i > j interact through
``exp(G_i - G_j)``, G being the cumulative log decay of each channel. Any pair is split by exactly
one node of the binary tree over the chunk: i lies in the node's upper half, j in its lower half.
With ``G_ref`` the value at the last token of the lower half,

    exp(G_i - G_j) = exp(G_i - G_ref) exp(G_ref - G_j)        both exponents <= 0

so level by level all pairs are full-tile matrix products of two decayed operands, and nothing can
overflow however strong the gate is. The gradient of a token's gate is the sum over the pairs that
straddle it. It is formed as a suffix sum of terms that each pair enters twice, with opposite
signs, and that terms of a token with itself never enter.

Source: docs/algebra.md, "KDA"; the factorisation is ours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from cptransport_kernels.launch import interpreted

#: Log decays below this are this: ``exp`` of it is exactly zero in float32, and sums over a chunk
#: stay accurate.
MIN_LOG_DECAY = tl.constexpr(-128.0)

LOG2_E = tl.constexpr(1.4426950408889634)

#: Whether the kernels are compiled; the interpreter has no inline assembly.
COMPILED = tl.constexpr(not interpreted())

#: How the gate is computed: as given, ``-exp(A_log) softplus``, or ``lower_bound * sigmoid``.
GATE_GIVEN = tl.constexpr(0)
GATE_SOFTPLUS = tl.constexpr(1)
GATE_BOUNDED = tl.constexpr(2)


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate for large negative x too (a short series replaces the
    logarithm near 1)."""
    y = tl.exp(-tl.abs(x))
    series = y * (1.0 - y * (0.5 - y * (0.3333333333333333 - y * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(y < 0.03, series, tl.log(1.0 + y))


@triton.jit
def gate_rate(a_log):
    """Return exp(A_log), kept finite: an infinite rate times a vanished softplus would be NaN."""
    return tl.exp(tl.minimum(a_log, 80.0))


@triton.jit
def log_decay(x, rate, lower_bound, GATE: tl.constexpr):
    """Return the log decay of the gate's input ``x`` (bias already added); ``rate`` is
    exp(A_log)."""
    if GATE == GATE_SOFTPLUS:
        x = -rate * softplus(x)
    if GATE == GATE_BOUNDED:
        x = lower_bound * tl.sigmoid(rate * x)
    # Not tl.maximum: a NaN gate must stay NaN.
    return tl.where(x < MIN_LOG_DECAY, MIN_LOG_DECAY, x)


@triton.jit
def beta_value(x, SIGMOID: tl.constexpr, SCALE: tl.constexpr):
    """Return beta of its input."""
    if SIGMOID:
        x = tl.sigmoid(x) * SCALE
    return x


@triton.jit
def exp2_flushed(x):
    """Return 2^x, zero where that is below the normal range: the plain instruction without its
    scaling for subnormals."""
    if COMPILED:
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.exp2(x)
    return x


@triton.jit
def decay(b_g):
    """Return exp of a sum of log decays."""
    return exp2_flushed(b_g * LOG2_E)


@triton.jit
def level_decay(b_gc, p_gc, row_stride, o_t, o_k, level, last):
    """Return the decays [BT, BK] of one level: from its node's reference to a token of the upper
    half, to it from one of the lower.

    Args:
        b_gc: cumulative log decays [BT, BK]; the rows after the chunk's last token repeat it.
        p_gc: where they lie, columns ``o_k``, ``row_stride`` elements from row to row. Read back
            from there: to shuffle rows through shared memory (``tl.gather``) measured slower.
        last: the chunk's last token.
    """
    o_ref = tl.minimum(((o_t >> (level + 1)) << (level + 1)) + ((1 << level) - 1), last)
    sign = tl.where(((o_t >> level) & 1) == 1, LOG2_E, -LOG2_E)
    b_ref = tl.load(p_gc + o_ref[:, None] * row_stride + o_k[None, :])
    return exp2_flushed((b_gc - b_ref) * sign[:, None])


@triton.jit
def split_at(o_t, level):
    """Return [BT, BT]: whether the tree splits the row's and the column's token at ``level``, in
    either order."""
    # Shifted before they are combined, or the [BT, BT] exclusive or would be kept in registers
    # over all levels.
    o_node = o_t >> level
    return (o_node[:, None] ^ o_node[None, :]) == 1
