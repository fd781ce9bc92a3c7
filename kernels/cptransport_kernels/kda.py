# SPDX-License-Identifier: Apache-2.0
"""KDA on one rank: the kernels' launches in order, as functions of tensors and tables.

``forward`` (pass over all pieces, summaries of segments) -> ``enter`` (states that enter,
corrected outputs) -> ``entering_grad`` (backward summaries) -> ``backward`` (all gradients).
Nothing waits for the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cptransport_kernels.common import GATE_BOUNDED, GATE_GIVEN, GATE_SOFTPLUS
from cptransport_kernels.configs import KDAConfig
from cptransport_kernels.fold import fold
from cptransport_kernels.kda_backward import kda_backward_pass_kernel, kda_entering_grad_kernel
from cptransport_kernels.kda_chunk_backward import (
    kda_chunk_backward_kernel,
    kda_finish_grads_kernel,
    kda_pair_backward_kernel,
)
from cptransport_kernels.kda_forward import kda_correct_kernel, kda_forward_pass_kernel
from cptransport_kernels.kda_prepare import kda_prepare_kernel
from cptransport_kernels.launch import launch, on_gpu
from cptransport_kernels.pieces import Pieces

__all__ = [
    "KDAForward",
    "KDAGradients",
    "KDATensors",
    "Transforms",
    "backward",
    "enter",
    "entering_grad",
    "forward",
]


@dataclass(frozen=True)
class Transforms:
    """What is applied to the inputs inside the kernels; meanings as in the op's options."""

    scale: float
    l2norm: bool = False
    gate: bool = False
    lower_bound: float | None = None
    beta_sigmoid: bool = False
    beta_scale: float = 1.0

    @property
    def gate_mode(self) -> int:
        """The gate's formula, see ``common``."""
        if not self.gate:
            return GATE_GIVEN.value
        return (GATE_SOFTPLUS if self.lower_bound is None else GATE_BOUNDED).value


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
class KDAForward:
    """What the forward leaves behind.

    Attributes:
        o: ``[B, T, HV, V]``.
        e, m: ``[NP * B, HV, K, V]``, ``[NP * B, HV, K, K]`` of every piece (m None if all are
            seeded).
        s_in: ``[NP * B, HV, K, V]`` states that enter the pieces; complete after ``enter``.
        r: ``[B, T, HV, K]`` effective queries (None if all are seeded).
        gc, qg, kd, w, u0, aqk, tinv, rnorm: see ``kda_prepare``.
    """

    o: Tensor
    e: Tensor
    m: Tensor | None
    s_in: Tensor
    r: Tensor | None
    gc: Tensor
    qg: Tensor
    kd: Tensor
    w: Tensor
    u0: Tensor
    aqk: Tensor
    tinv: Tensor
    rnorm: Tensor | None


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


def _sizes(x: KDATensors) -> tuple[int, int, int, int, int, int]:
    batch, tokens, heads, key_dim = x.q.shape
    value_heads, value_dim = x.v.shape[2:]
    return batch, tokens, heads, value_heads, key_dim, value_dim


def _precision(config: KDAConfig, tensor: Tensor) -> dict[str, str]:
    return {"PREC": config.precision if on_gpu(tensor) else "ieee"}


def _flags(x: KDATensors, transforms: Transforms, config: KDAConfig) -> dict[str, Any]:
    return {
        "LEVELS": config.levels,
        "GATE": transforms.gate_mode,
        "L2NORM": transforms.l2norm,
        "BETA_SIGMOID": transforms.beta_sigmoid,
        "BETA_SCALE": transforms.beta_scale,
        **_precision(config, x.q),
    }


def forward(
    x: KDATensors,
    transforms: Transforms,
    config: KDAConfig,
    pieces: Pieces,
    *,
    seed: Tensor | None,
    state: Tensor | None,
    transition: Tensor | None,
    keep_r: bool,
) -> KDAForward:
    """Run the chunk-local work and the pass over all pieces, and write the summaries that the
    tables ask for.

    Args:
        seed: float32 ``[num_segments * B, HV, K, V]`` or None (zero).
        state, transition: float32 summaries ``[rows * B, HV, K, V or K]``; rows not asked for stay
            untouched.
        keep_r: whether the effective query is needed: outputs to be corrected or a backward.
    """
    batch, tokens, heads, value_heads, key_dim, value_dim = _sizes(x)
    chunk, like = config.chunk, x.q

    def rows(width: int, dtype: torch.dtype = config.dtype) -> Tensor:
        return torch.empty(batch, tokens, value_heads, width, dtype=dtype, device=like.device)

    gc, qg, kd, w = rows(key_dim, torch.float32), rows(key_dim), rows(key_dim), rows(key_dim)
    u0, aqk, tinv = rows(value_dim), rows(chunk), rows(chunk)
    rnorm = None
    if transforms.l2norm:
        rnorm = torch.empty(2, batch, tokens, heads, dtype=torch.float32, device=like.device)
    tile = config.prepare
    launch(
        kda_prepare_kernel,
        (pieces.num_chunks, batch * value_heads),
        x.q,
        x.k,
        x.v,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        gc,
        qg,
        kd,
        w,
        u0,
        aqk,
        tinv,
        rnorm,
        pieces.chunks,
        transforms.scale,
        transforms.lower_bound or 0.0,
        batch,
        tokens,
        heads,
        value_heads,
        K=key_dim,
        V=value_dim,
        BT=chunk,
        BK=min(tile.block, key_dim),
        BV=min(tile.block, value_dim),
        PREC_SOLVE=config.solve_precision if on_gpu(like) else "ieee",
        **_flags(x, transforms, config),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

    def states(width: int) -> Tensor:
        shape = (pieces.num_pieces * batch, value_heads, key_dim, width)
        return torch.empty(shape, dtype=torch.float32, device=like.device)

    # Rows of no segment are zero.
    o = (torch.zeros_like if pieces.gaps else torch.empty_like)(x.v)
    e, s_in = states(value_dim), states(value_dim)
    m = states(key_dim) if pieces.unseeded else None
    r = rows(key_dim) if pieces.unseeded and keep_r else None
    tile = config.walk
    columns = min(tile.block, key_dim, value_dim)
    num_columns = (value_dim + (key_dim if pieces.unseeded else 0)) // columns
    launch(
        kda_forward_pass_kernel,
        (num_columns * pieces.num_pieces * batch, value_heads),
        qg,
        kd,
        w,
        u0,
        aqk,
        gc,
        seed,
        o,
        r,
        e,
        m,
        s_in,
        state,
        transition,
        pieces.forward,
        batch,
        tokens,
        value_heads,
        K=key_dim,
        V=value_dim,
        BT=chunk,
        BC=columns,
        NCOL=num_columns,
        **_precision(config, like),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if pieces.compose is not None and state is not None:
        fold(pieces.compose, e, m, shape=(value_heads, key_dim, value_dim), batch=batch, out=state)
    _compose_transitions(pieces.compose_transition, m, transition, batch)
    return KDAForward(o, e, m, s_in, r, gc, qg, kd, w, u0, aqk, tinv, rnorm)


def _compose_transitions(steps: Any, m: Tensor | None, out: Tensor | None, batch: int) -> None:
    if steps is not None and m is not None and out is not None:
        fold(steps, m, m, shape=(m.shape[1], m.shape[2], m.shape[2]), batch=batch, out=out)


def enter(
    done: KDAForward, config: KDAConfig, pieces: Pieces, incoming: Tensor | None, *, outgoing: bool
) -> Tensor:
    """Let states enter: correct the outputs in place, complete ``s_in``; return the states that
    leave the segments.

    Args:
        incoming: float32 ``[num_segments * B, HV, K, V]``; None if no piece needs one.
        outgoing: whether the result is read; else some tensor of the right shape comes back.
    """
    batch, tokens, value_heads, value_dim = done.o.shape
    key_dim = done.e.shape[2]
    shape = (value_heads, key_dim, value_dim)
    leaving = done.e
    if pieces.cut or (pieces.unseeded and outgoing):
        leaving = fold(
            pieces.enter_leave if outgoing else pieces.enter,
            done.e,
            done.m,
            shape=shape,
            batch=batch,
            start=incoming,
            prefix=done.s_in if pieces.cut else None,
        )
    if pieces.unseeded:
        tile = config.correct
        columns = min(tile.block, value_dim)
        launch(
            kda_correct_kernel,
            (pieces.num_chunks, value_dim // columns, batch * value_heads),
            done.o,
            done.r,
            incoming,
            done.s_in,
            pieces.chunks,
            pieces.forward,
            batch,
            tokens,
            value_heads,
            K=key_dim,
            V=value_dim,
            BT=config.chunk,
            BV=columns,
            BY_SEGMENT=not pieces.cut,
            **_precision(config, done.o),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return leaving


def entering_grad(
    done: KDAForward,
    config: KDAConfig,
    pieces: Pieces,
    do: Tensor,
    *,
    seed: Tensor | None,
    state: Tensor | None,
    transition: Tensor | None,
) -> Tensor | None:
    """Write dE and M of the segments that publish them; return dE of every piece (None if all are
    seeded).

    Args:
        do: contiguous gradient of the output, ``[B, T, HV, V]``.
        seed: float32 ``[num_segments * B, HV, K, V]``, gradients of final states, or None (zero).
        state, transition: as in ``forward``.
    """
    if not pieces.unseeded:
        return None
    assert done.r is not None
    assert done.m is not None
    batch, tokens, value_heads, value_dim = done.o.shape
    key_dim = done.e.shape[2]
    de = torch.empty_like(done.e)
    tile = config.enter
    block_k, block_v = min(64, key_dim), min(tile.block, value_dim)
    launch(
        kda_entering_grad_kernel,
        (key_dim // block_k * (value_dim // block_v) * pieces.num_pieces * batch, value_heads),
        done.r,
        do,
        de,
        done.m,
        state,
        transition,
        pieces.backward,
        batch,
        tokens,
        value_heads,
        K=key_dim,
        V=value_dim,
        BT=config.chunk,
        BK=block_k,
        BV=block_v,
        **_precision(config, do),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if state is not None and (pieces.cut or seed is not None):
        shape = (value_heads, key_dim, value_dim)
        fold(
            pieces.grad_compose,
            de,
            done.m,
            shape=shape,
            batch=batch,
            start=seed,
            out=state,
            transposed=True,
        )
    _compose_transitions(pieces.grad_transition, done.m, transition, batch)
    return de


def backward(
    x: KDATensors,
    transforms: Transforms,
    config: KDAConfig,
    pieces: Pieces,
    done: KDAForward,
    do: Tensor,
    de: Tensor | None,
    ds_out: Tensor,
) -> KDAGradients:
    """Compute every gradient of the rank's inputs.

    Args:
        done: of the forward, ``s_in`` complete.
        do: contiguous gradient of the output.
        de: what ``entering_grad`` returned.
        ds_out: float32 ``[num_segments * B, HV, K, V]`` gradients of the states that leave the
            segments.
    """
    batch, tokens, heads, value_heads, key_dim, value_dim = _sizes(x)
    chunk, chunks = config.chunk, pieces.num_chunks
    shape = (value_heads, key_dim, value_dim)
    empty = torch.zeros_like if pieces.gaps else torch.empty_like
    ds_piece = ds_out
    if pieces.cut:
        ds_piece = torch.empty_like(done.s_in)
        fold(
            pieces.leave,
            de if de is not None else done.e,
            done.m,
            shape=shape,
            batch=batch,
            start=ds_out,
            prefix=ds_piece,
            out=ds_out,
            transposed=True,
        )

    h = torch.empty(batch, chunks, *shape, dtype=config.dtype, device=do.device)
    dh, u, y = torch.empty_like(h), torch.empty_like(done.u0), torch.empty_like(done.u0)
    ds_in = torch.empty(pieces.num_segments * batch, *shape, dtype=torch.float32, device=do.device)
    tile = config.back_walk
    columns = min(tile.block, value_dim)
    launch(
        kda_backward_pass_kernel,
        (2 * (value_dim // columns) * pieces.num_pieces * batch, value_heads),
        done.qg,
        done.kd,
        done.w,
        done.u0,
        done.aqk,
        done.tinv,
        done.gc,
        do,
        done.s_in,
        ds_piece,
        h,
        u,
        dh,
        y,
        ds_in,
        pieces.backward,
        batch,
        tokens,
        value_heads,
        chunks,
        K=key_dim,
        V=value_dim,
        BT=chunk,
        BC=columns,
        BY_SEGMENT=not pieces.cut,
        **_precision(config, do),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )

    by_heads = heads != value_heads or transforms.l2norm
    tile = config.chunk_grad
    block_k, block_v = min(tile.block, key_dim), min(tile.block, value_dim)
    blocks = key_dim // block_k
    dq, dk = empty(x.q), empty(x.k)
    dv, dg, dbeta = empty(x.v), empty(x.g), empty(x.beta)
    dq_heads, dk_heads = dq, dk
    if by_heads:
        dq_heads = torch.empty(x.g.shape, dtype=torch.float32, device=do.device)
        dk_heads = torch.empty_like(dq_heads)
    db_parts = torch.empty(blocks + 1, *x.beta.shape, dtype=torch.float32, device=do.device)
    gate_sums = None
    if transforms.gate:
        gate_sums = torch.empty(
            2, batch * chunks, value_heads, key_dim, dtype=torch.float32, device=do.device
        )
    pair = config.pair_grad
    daqk, dakk = torch.empty_like(done.aqk), torch.empty_like(done.aqk)
    launch(
        kda_pair_backward_kernel,
        (chunks, batch * value_heads),
        x.v,
        x.beta,
        do,
        u,
        y,
        daqk,
        dakk,
        dv,
        db_parts,
        pieces.chunks,
        transforms.scale,
        batch,
        tokens,
        value_heads,
        V=value_dim,
        BT=chunk,
        BV=min(pair.block, value_dim),
        BETA_SIGMOID=transforms.beta_sigmoid,
        BETA_SCALE=transforms.beta_scale,
        **_precision(config, do),
        num_warps=pair.warps,
        num_stages=pair.stages,
    )
    launch(
        kda_chunk_backward_kernel,
        (blocks * chunks, batch * value_heads),
        x.q,
        x.k,
        x.g,
        x.beta,
        x.A_log,
        x.dt_bias,
        done.gc,
        done.rnorm,
        do,
        u,
        y,
        h,
        dh,
        daqk,
        dakk,
        dq_heads,
        dk_heads,
        dg,
        db_parts,
        gate_sums,
        pieces.chunks,
        transforms.scale,
        transforms.lower_bound or 0.0,
        batch,
        tokens,
        heads,
        value_heads,
        chunks,
        K=key_dim,
        V=value_dim,
        BT=chunk,
        BK=block_k,
        BV=block_v,
        **_flags(x, transforms, config),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    tile = config.finish
    launch(
        kda_finish_grads_kernel,
        (chunks, batch * heads),
        x.q,
        x.k,
        x.beta,
        done.rnorm,
        dq_heads,
        dk_heads,
        db_parts,
        dq,
        dk,
        dbeta,
        pieces.chunks,
        batch,
        tokens,
        heads,
        value_heads,
        K=key_dim,
        BT=chunk,
        PARTS=blocks + 1,
        HEADS=by_heads,
        L2NORM=transforms.l2norm,
        BETA_SIGMOID=transforms.beta_sigmoid,
        BETA_SCALE=transforms.beta_scale,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    dA_log = ddt_bias = None
    if gate_sums is not None:
        if x.A_log is not None:
            dA_log = gate_sums[0].sum(dim=(0, 2)).to(x.A_log.dtype)
        if x.dt_bias is not None:
            ddt_bias = gate_sums[1].sum(dim=0).to(x.dt_bias.dtype)
    return KDAGradients(dq, dk, dv, dg, dbeta, dA_log, ddt_bias, ds_in)
