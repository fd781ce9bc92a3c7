# SPDX-License-Identifier: Apache-2.0
"""KDA on one rank: the kernels' launches in order, as functions of tensors and tables.

``forward`` (pass over all pieces, summaries of segments) -> ``enter`` (states that enter,
corrected outputs) -> ``entering_grad`` (backward summaries) -> ``backward`` (all gradients).
Nothing waits for the host.

What the backward needs of every chunk is made again there from the inputs, but for the effective
query, the products of pairs of tokens and the inverse: 2 (K + 2 BT) bytes per token and head are
kept for bfloat16 inputs, not 2 (4 K + V + 2 BT) + 4 K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cptransport_kernels.fold import FoldSteps, fold
from cptransport_kernels.kda_kernels import KDAKernels
from cptransport_kernels.pieces import Pieces

__all__ = [
    "KDAForward",
    "KDAGradients",
    "KDAKept",
    "KDATensors",
    "backward",
    "enter",
    "entering_grad",
    "forward",
]


@dataclass(frozen=True)
class KDATensors:
    """Contiguous inputs.

    Attributes:
        q, k: ``[B, T, H, K]``. v: ``[B, T, HV, V]``. g: ``[B, T, HV, K]``. beta: ``[B, T, HV]``.
        A_log: ``[HV]``. dt_bias: ``[HV, K]``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None


@dataclass(frozen=True)
class KDAKept:
    """What a backward needs beside the inputs.

    Attributes:
        s_in: ``[NP * B, HV, K, V]`` states that enter the pieces; complete after ``enter``.
        m: ``[NP * B, HV, K, K]`` transitions of the pieces (None if nobody asks for one).
        r: ``[B, T, HV, K]`` effective queries (None if all pieces are seeded).
        aqk, tinv, rnorm: see ``kda_prepare``.
    """

    s_in: Tensor
    m: Tensor | None
    r: Tensor | None
    aqk: Tensor
    tinv: Tensor
    rnorm: Tensor | None


@dataclass(frozen=True)
class KDAForward:
    """What the forward leaves behind.

    Attributes:
        o: ``[B, T, HV, V]``.
        e: ``[NP * B, HV, K, V]`` of every piece (None if nobody asks for one).
        kept: for the backward.
    """

    o: Tensor
    e: Tensor | None
    kept: KDAKept


@dataclass(frozen=True)
class KDAGradients:
    """Gradients of the inputs, in their shapes and dtypes, and of the entering states
    ``[num_segments * B, HV, K, V]``."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dg: Tensor
    dbeta: Tensor
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    ds_in: Tensor


class _Chunks:
    """What of every chunk is made in the forward and again in the backward; see ``kda_prepare``."""

    def __init__(self, x: KDATensors, dtype: torch.dtype) -> None:
        like = x.g
        self.gc = torch.empty_like(like, dtype=torch.float32)
        self.qg = torch.empty_like(like, dtype=dtype)
        self.kd = torch.empty_like(like, dtype=dtype)
        self.w = torch.empty_like(like, dtype=dtype)
        self.u0 = torch.empty_like(x.v, dtype=dtype)


def forward(
    x: KDATensors,
    kernels: KDAKernels,
    pieces: Pieces,
    *,
    seed: Tensor | None,
    state: Tensor | None,
    transition: Tensor | None,
) -> KDAForward:
    """Run the chunk-local work and the pass over all pieces, and write the summaries that the
    tables ask for.

    Args:
        seed: float32 ``[num_segments * B, HV, K, V]`` or None (zero).
        state, transition: float32 summaries ``[rows * B, HV, K, V or K]``; rows not asked for stay
            untouched.
    """
    batch, tokens, heads, key_dim = x.q.shape
    value_heads, value_dim = x.v.shape[2:]
    config, chunk, device = kernels.config, kernels.config.chunk, x.q.device
    made = _Chunks(x, config.dtype)
    aqk = torch.empty(batch, tokens, value_heads, chunk, dtype=config.dtype, device=device)
    tinv = torch.empty_like(aqk)
    rnorm = None
    if kernels.transforms.l2norm:
        rnorm = torch.empty(2, batch, tokens, heads, dtype=torch.float32, device=device)
    kernels.prepare(
        (pieces.num_chunks, batch * value_heads),
        *_inputs(x, kernels),
        made.gc, made.qg, made.kd, made.w, made.u0, aqk, tinv, rnorm,
        pieces.chunks, batch, tokens, heads, value_heads,
    )  # fmt: skip

    def states(width: int) -> Tensor:
        shape = (pieces.num_pieces * batch, value_heads, key_dim, width)
        return torch.empty(shape, dtype=torch.float32, device=device)

    # Rows of no segment are zero.
    o = (torch.zeros_like if pieces.gaps else torch.empty_like)(x.v)
    s_in = states(value_dim)
    e = states(value_dim) if pieces.keeps_state else None
    m = states(key_dim) if pieces.keeps_transition else None
    r = torch.empty_like(made.w) if pieces.unseeded else None
    walk, num_columns = kernels.walk[pieces.unseeded]
    walk(
        (num_columns * pieces.num_pieces * batch, value_heads),
        made.qg, made.kd, made.w, made.u0, aqk, made.gc,
        seed, o, r, e, m, s_in, state, transition,
        pieces.forward, batch, tokens, value_heads,
    )  # fmt: skip
    if pieces.compose is not None and state is not None:
        assert e is not None
        fold(pieces.compose, e, m, shape=(value_heads, key_dim, value_dim), batch=batch, out=state)
    _compose_transitions(pieces.compose_transition, m, transition, batch)
    return KDAForward(o, e, KDAKept(s_in, m, r, aqk, tinv, rnorm))


def _inputs(x: KDATensors, kernels: KDAKernels) -> tuple[Any, ...]:
    """The first arguments of the kernels that read q, k, v and the gate."""
    transforms = kernels.transforms
    scale, bound = transforms.scale, transforms.lower_bound or 0.0
    return x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias, scale, bound


def _compose_transitions(
    steps: FoldSteps | None, m: Tensor | None, out: Tensor | None, batch: int
) -> None:
    if steps is not None and m is not None and out is not None:
        fold(steps, m, m, shape=(m.shape[1], m.shape[2], m.shape[2]), batch=batch, out=out)


def enter(
    done: KDAForward, kernels: KDAKernels, pieces: Pieces, incoming: Tensor | None
) -> Tensor | None:
    """Let states enter: correct the outputs in place, complete ``s_in``.

    Args:
        incoming: float32 ``[num_segments * B, HV, K, V]``; None if no piece needs one.

    Returns:
        The states that leave the segments, ``[num_segments * B, HV, K, V]``; None unless the tables
        say that they are wanted.
    """
    batch, tokens, value_heads, _ = done.o.shape
    key_dim, value_dim = kernels.key_dim, kernels.value_dim
    kept = done.kept
    leaving = done.e if pieces.outgoing else None
    if pieces.cut or (pieces.unseeded and pieces.outgoing):
        assert done.e is not None
        left = fold(
            pieces.enter_leave if pieces.outgoing else pieces.enter,
            done.e,
            kept.m,
            shape=(value_heads, key_dim, value_dim),
            batch=batch,
            start=incoming,
            prefix=kept.s_in if pieces.cut else None,
        )
        leaving = left if pieces.outgoing else None
    if pieces.unseeded:
        correct, columns = kernels.correct[not pieces.cut]
        correct(
            (pieces.num_chunks, columns, batch * value_heads),
            done.o, kept.r, incoming, kept.s_in,
            pieces.chunks, pieces.forward, batch, tokens, value_heads,
        )  # fmt: skip
    return leaving


def entering_grad(
    kept: KDAKept,
    kernels: KDAKernels,
    pieces: Pieces,
    do: Tensor,
    *,
    seed: Tensor | None,
    state: Tensor | None,
    transition: Tensor | None,
) -> Tensor | None:
    """Write dE and M of the segments that publish them; return dE of every piece (None if nobody
    asks for it).

    Args:
        do: contiguous gradient of the output, ``[B, T, HV, V]``.
        seed: float32 ``[num_segments * B, HV, K, V]``, gradients of final states, or None (zero).
        state, transition: as in ``forward``.
    """
    if not pieces.unseeded:
        return None
    assert kept.r is not None
    batch, tokens, value_heads, _ = do.shape
    if kept.m is None:  # no segment here publishes one, others may
        transition = None
    folded = pieces.cut or (seed is not None and state is not None)
    de = torch.empty_like(kept.s_in) if folded else None
    kernel, blocks = kernels.entering_grad
    kernel(
        (blocks * pieces.num_pieces * batch, value_heads),
        kept.r, do, de, kept.m, state, transition,
        pieces.backward, batch, tokens, value_heads,
    )  # fmt: skip
    if folded and state is not None:
        assert de is not None
        fold(
            pieces.grad_compose,
            de,
            kept.m,
            shape=(value_heads, kernels.key_dim, kernels.value_dim),
            batch=batch,
            start=seed,
            out=state,
            transposed=True,
        )
    _compose_transitions(pieces.grad_transition, kept.m, transition, batch)
    return de


def backward(
    x: KDATensors,
    kernels: KDAKernels,
    pieces: Pieces,
    kept: KDAKept,
    do: Tensor,
    de: Tensor | None,
    leaving: Callable[[], Tensor],
) -> KDAGradients:
    """Compute every gradient of the rank's inputs.

    Args:
        kept: of the forward, ``s_in`` complete.
        do: contiguous gradient of the output.
        de: what ``entering_grad`` returned.
        leaving: returns the gradients of the states that leave the segments, float32
            ``[num_segments * B, HV, K, V]``. It may wait, so it is called when all that does not
            need them has been launched.
    """
    batch, tokens, heads, key_dim = x.q.shape
    value_heads, value_dim = x.v.shape[2:]
    chunks, device = pieces.num_chunks, do.device
    shape = (value_heads, key_dim, value_dim)
    made = _remake(x, kernels, pieces, kept)
    ds_piece = ds_out = leaving()
    if pieces.cut:
        ds_piece = torch.empty_like(kept.s_in)
        fold(
            pieces.leave,
            de if de is not None else kept.s_in,
            kept.m,
            shape=shape,
            batch=batch,
            start=ds_out,
            prefix=ds_piece,
            out=ds_out,
            transposed=True,
        )

    h = torch.empty(batch, chunks, *shape, dtype=kernels.config.dtype, device=device)
    dh, u, y = torch.empty_like(h), torch.empty_like(made.u0), torch.empty_like(made.u0)
    ds_in = torch.empty(pieces.num_segments * batch, *shape, dtype=torch.float32, device=device)
    walk, num_columns = kernels.back_walk[not pieces.cut]
    walk(
        (2 * num_columns * pieces.num_pieces * batch, value_heads),
        made.qg, made.kd, made.w, made.u0, kept.aqk, kept.tinv, made.gc,
        do, kept.s_in, ds_piece, h, u, dh, y, ds_in,
        pieces.backward, batch, tokens, value_heads, chunks,
    )  # fmt: skip
    gc = made.gc
    del made  # its memory holds gradients next

    empty = torch.zeros_like if pieces.gaps else torch.empty_like
    dq, dk = empty(x.q), empty(x.k)
    dv, dg, dbeta = empty(x.v), empty(x.g), empty(x.beta)
    dq_heads, dk_heads = dq, dk
    if kernels.by_heads:
        dq_heads = torch.empty_like(x.g, dtype=torch.float32)
        dk_heads = torch.empty_like(dq_heads)
    chunk_grad, blocks = kernels.chunk_grad
    db_parts = torch.empty(blocks + 1, *x.beta.shape, dtype=torch.float32, device=device)
    gate_sums = None
    if kernels.transforms.gate:
        sums = (2, batch * chunks, value_heads, key_dim)
        gate_sums = torch.empty(sums, dtype=torch.float32, device=device)
    daqk, dakk = torch.empty_like(kept.aqk), torch.empty_like(kept.aqk)
    scale, bound = kernels.transforms.scale, kernels.transforms.lower_bound or 0.0
    kernels.pair_grad(
        (chunks, batch * value_heads),
        x.v, x.beta, do, u, y, daqk, dakk, dv, db_parts,
        pieces.chunks, scale, batch, tokens, value_heads,
    )  # fmt: skip
    chunk_grad(
        (blocks * chunks, batch * value_heads),
        x.q, x.k, x.g, x.beta, x.A_log, x.dt_bias, gc, kept.rnorm,
        do, u, y, h, dh, daqk, dakk, dq_heads, dk_heads, dg, db_parts, gate_sums,
        pieces.chunks, scale, bound, batch, tokens, heads, value_heads, chunks,
    )  # fmt: skip
    kernels.finish(
        (chunks, batch * heads),
        x.q, x.k, x.beta, kept.rnorm, dq_heads, dk_heads, db_parts, dq, dk, dbeta,
        pieces.chunks, batch, tokens, heads, value_heads,
    )  # fmt: skip
    dA_log = ddt_bias = None
    if gate_sums is not None:
        if x.A_log is not None:
            dA_log = gate_sums[0].sum(dim=(0, 2)).to(x.A_log.dtype)
        if x.dt_bias is not None:
            ddt_bias = gate_sums[1].sum(dim=0).to(x.dt_bias.dtype)
    return KDAGradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, ds_in)


def _remake(x: KDATensors, kernels: KDAKernels, pieces: Pieces, kept: KDAKept) -> _Chunks:
    """Make again what of every chunk the forward did not keep."""
    batch, tokens, heads, _ = x.q.shape
    value_heads = x.v.shape[2]
    made = _Chunks(x, kernels.config.dtype)
    kernels.remake(
        (pieces.num_chunks, batch * value_heads),
        *_inputs(x, kernels),
        kept.tinv, kept.rnorm, made.gc, made.qg, made.kd, made.w, made.u0,
        pieces.chunks, batch, tokens, heads, value_heads,
    )  # fmt: skip
    return made
