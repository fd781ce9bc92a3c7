# SPDX-License-Identifier: Apache-2.0
"""SSD on one rank: the kernels' launches in order, as functions of tensors and tables.

Forward: ``summarise`` (what pieces add to the state, summaries of segments) -> ``scores`` (no state
needed) -> ``outputs`` (with the states that enter). Backward: ``summarise`` the other way ->
``chunk_states`` (of the forward, once more; ``gate_gradient`` if there is a gate) and
``pair_gradients`` (no state needed) -> ``gradients`` (with those that enter). Nothing waits for the
host.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from cptransport_kernels.launch import processors
from cptransport_kernels.ssd_configs import ssd_splits
from cptransport_kernels.ssd_kernels import ELEMENTS, GradientKernels, SSDKernels
from cptransport_kernels.ssd_tables import SSDTables

__all__ = [
    "PairGrads",
    "SSDGradients",
    "SSDTensors",
    "Summaries",
    "chunk_states",
    "gate_gradient",
    "gradients",
    "outputs",
    "pair_gradients",
    "scores",
    "summarise",
]


@dataclass(frozen=True)
class SSDTensors:
    """Inputs whose last axes are dense: only batch rows and tokens may lie apart.

    Attributes:
        x: ``[b, T, H, P]``. dt: ``[b, T, H]``. A: ``[H]``. B, C: ``[b, T, G, N]``.
        D: ``[H]`` or ``[H, P]``. z: like x. dt_bias: ``[H]``.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None
    z: Tensor | None = None
    dt_bias: Tensor | None = None

    @cached_property
    def sizes(self) -> tuple[int, int, int, int, int, int]:
        """Batch rows, T, H, G, P, N."""
        batch, tokens, heads, headdim = self.x.shape
        groups, dstate = self.B.shape[2:]
        return batch, tokens, heads, groups, headdim, dstate


@dataclass(frozen=True)
class Summaries:
    """What pieces tell of each other.

    Attributes:
        states: float32 ``[num_rows * b, H, P, N]``, what enters each piece from a zero start.
        before: float32 ``[NP * b, H]``, log2 decay from the segment's start to each piece. Both None
            if no segment is cut: then what enters a segment enters its piece.
    """

    states: Tensor | None
    before: Tensor | None


@dataclass(frozen=True)
class SSDGradients:
    """Gradients of the inputs but the gate, in their shapes and dtypes, and of the states that enter
    the segments ``[num_segments * b, H, P, N]``."""

    dx: Tensor
    ddt: Tensor
    dA: Tensor
    dB: Tensor
    dC: Tensor
    dD: Tensor | None
    ddt_bias: Tensor | None
    dincoming: Tensor


def _rows(tensor: Tensor | None) -> tuple[Tensor | None, int, int]:
    """A tensor as kernels take it: with the strides of batch rows and tokens."""
    return (None, 0, 0) if tensor is None else (tensor, tensor.stride(0), tensor.stride(1))


def _walked(x: SSDTensors, dy: Tensor | None) -> tuple[Any, ...]:
    """What a walk takes of tokens: x and B, or the gradient of the output, its gate and C."""
    if dy is None:
        return *_rows(x.x), *_rows(None), *_rows(x.B)
    return *_rows(dy), *_rows(x.z), *_rows(x.C)


def _walks(x: SSDTensors, kernels: SSDKernels, tables: SSDTables) -> tuple[int, int]:
    batch, _, heads, _, _, _ = x.sizes
    return kernels.blocks * tables.num_pieces * batch, heads


def summarise(
    x: SSDTensors,
    kernels: SSDKernels,
    tables: SSDTables,
    dy: Tensor | None,
    *,
    seed: Tensor | None,
    state: Tensor | None,
    transition: Tensor | None,
) -> Summaries:
    """Compute what pieces add to the state, and write the summaries that the tables ask for.

    Args:
        dy: gradient of the output: go the other way, for gradients of states. None: forward.
        seed: float32 ``[num_segments * b, H, P, N]``, states known to enter; None: zero. Only those
            that publish read it.
        state, transition: float32 summaries, ``[rows * b, H, P, N]`` and ``[rows * b, H]``; rows not
            asked for stay untouched.
    """
    batch, _, heads, groups, headdim, dstate = x.sizes
    reverse = dy is not None
    states = decays = before = None
    if tables.cut:
        shape = (tables.num_rows * batch, heads, headdim, dstate)
        states = torch.empty(shape, dtype=torch.float32, device=x.x.device)
        decays = torch.empty(
            tables.num_pieces * batch, heads, dtype=torch.float32, device=x.x.device
        )
        before = torch.empty_like(decays)
    if tables.walked:
        kernels.summary[tables.cut, reverse](
            _walks(x, kernels, tables),
            *_walked(x, dy),
            *_rows(x.dt),
            x.A,
            x.dt_bias,
            kernels.steps.low,
            kernels.steps.high,
            states,
            decays,
            seed,
            state,
            transition,
            tables.pieces,
            batch,
            heads,
            groups,
        )
    if tables.cut:
        kernels.join[reverse](
            (-(-headdim * dstate // ELEMENTS) * tables.num_segments * batch, heads),
            states,
            decays,
            before,
            seed,
            state,
            transition,
            tables.pieces,
            tables.segments,
            batch,
            heads,
        )
    return Summaries(states, before)


def scores(x: SSDTensors, kernels: SSDKernels, tables: SSDTables) -> Tensor:
    """Return C_i . B_j of every pair of a chunk, ``[b, T, G, chunk]``; rows of no segment are not
    written."""
    batch, tokens, _, groups, _, _ = x.sizes
    config = kernels.config
    shape = (batch, tokens, groups, config.chunk)
    result = torch.empty(shape, dtype=config.dtype, device=x.x.device)
    kernels.scores(
        (tables.num_chunks, batch * groups),
        *_rows(x.B),
        *_rows(x.C),
        result,
        tables.chunks,
        tokens,
        groups,
    )
    return result


def _output(
    x: SSDTensors,
    kernels: SSDKernels,
    tables: SSDTables,
    pairs: Tensor,
    states: tuple[Any, ...],
    y: Tensor,
    outgoing: Tensor | None,
    backward: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    batch, tokens, heads, groups, _, _ = x.sizes
    kernels.output[tables.cut](
        _walks(x, kernels, tables),
        *_rows(x.x),
        *_rows(x.z),
        *_rows(x.B),
        *_rows(x.C),
        *_rows(x.dt),
        x.A,
        x.dt_bias,
        x.D,
        kernels.steps.low,
        kernels.steps.high,
        pairs,
        *states,
        y,
        outgoing,
        *_rows(backward[0]),
        *backward[1:],
        tables.pieces,
        batch,
        tokens,
        heads,
        groups,
        tables.num_chunks,
    )


def _like(tensor: Tensor, tables: SSDTables) -> Tensor:
    """A dense tensor whose rows of no segment are zero."""
    make = torch.zeros if tables.gaps else torch.empty
    return make(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def outputs(
    x: SSDTensors,
    kernels: SSDKernels,
    tables: SSDTables,
    summaries: Summaries,
    pairs: Tensor,
    incoming: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the states that leave the segments, and those that enter the pieces.

    Args:
        summaries: of the forward; its states are overwritten.
        pairs: from ``scores``.
        incoming: float32 ``[num_segments * b, H, P, N]``, states that enter the segments; None: all
            zero.
    """
    batch, _, heads, _, headdim, dstate = x.sizes
    made: dict[str, Any] = {"dtype": torch.float32, "device": x.x.device}
    states = summaries.states
    if states is None:
        states = torch.empty(tables.num_rows * batch, heads, headdim, dstate, **made)
    y = _like(x.x, tables)
    outgoing = torch.empty(tables.num_segments * batch, heads, headdim, dstate, **made)
    entering = (incoming, states, summaries.before)
    _output(x, kernels, tables, pairs, entering, y, outgoing, (None, None, None))
    return y, outgoing, states


def gate_gradient(
    x: SSDTensors,
    kernels: SSDKernels,
    tables: SSDTables,
    entering: Tensor,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before every chunk, as ``chunk_states``, the gradient of z, and that of the
    output before the gate: one walk that computes that output again."""
    batch, _, heads, _, headdim, dstate = x.sizes
    assert x.z is not None
    shape = (batch, tables.num_chunks, heads, headdim, dstate)
    h = torch.empty(shape, dtype=kernels.config.dtype, device=dy.device)
    dz, pairs = _like(x.z, tables), scores(x, kernels, tables)
    gated = torch.empty(x.x.shape, dtype=x.x.dtype, device=dy.device)
    entered = (None, entering, None)
    _output(x, kernels, tables, pairs, entered, dz, None, (dy, gated, h))
    return h, dz, gated


def chunk_states(
    x: SSDTensors,
    kernels: SSDKernels,
    tables: SSDTables,
    entering: Tensor | None,
    *,
    dy: Tensor | None = None,
    incoming: Tensor | None = None,
    before: Tensor | None = None,
    forward: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the state before every chunk in travel order, ``[b, NC, H, P, N]``.

    Forward, from the states that enter the pieces, complete. With ``dy`` the other way, gradients of
    states, from what ``summarise`` said of pieces and what comes in; then also the products with
    the states of the ``forward``, ``[blocks of P, b * NC, H]``, and what leaves the segments.
    """
    batch, _, heads, groups, headdim, dstate = x.sizes
    chunks, device = tables.num_chunks, x.x.device
    reverse = dy is not None
    h_shape = (batch, chunks, heads, headdim, dstate)
    h = torch.empty(h_shape, dtype=kernels.config.dtype, device=device)
    passing = leaving = None
    if reverse:
        made: dict[str, Any] = {"dtype": torch.float32, "device": device}
        passing = torch.empty(kernels.blocks, batch * chunks, heads, **made)
        leaving = torch.empty(tables.num_segments * batch, heads, headdim, dstate, **made)
    kernels.states[tables.cut, reverse](
        _walks(x, kernels, tables),
        *_walked(x, dy),
        *_rows(x.dt),
        x.A,
        x.dt_bias,
        kernels.steps.low,
        kernels.steps.high,
        incoming,
        entering,
        before,
        h,
        forward,
        passing,
        leaving,
        tables.pieces,
        batch,
        heads,
        groups,
        chunks,
    )
    return h, passing, leaving


@dataclass(frozen=True)
class PairGrads:
    """What pairs of tokens say: ``[splits, b, T, G, chunk]`` of scores, float32 ``[b, T, H]`` of steps
    and log decays, float32 ``[b * NC, H, sums]`` of D, with room for A and dt_bias."""

    dscores: Tensor
    dd: Tensor
    da: Tensor
    sums: Tensor


def _tokenwise(x: SSDTensors, kernels: SSDKernels, dy: Tensor) -> tuple[Any, ...]:
    return (
        *_rows(x.x),
        *_rows(dy),
        *_rows(x.B),
        *_rows(x.C),
        *_rows(x.dt),
        x.A,
        x.dt_bias,
        x.D,
        kernels.steps.low,
        kernels.steps.high,
    )


def _gradient_launch(
    x: SSDTensors, kernels: SSDKernels, tables: SSDTables
) -> tuple[int, GradientKernels, tuple[int, int], tuple[Any, ...]]:
    """Splits of a group's heads; of those, the kernels of chunks and groups, their grid and sizes."""
    batch, tokens, heads, groups, _, _ = x.sizes
    chunks, per_group = tables.num_chunks, heads // groups
    splits = ssd_splits(chunks, batch * groups, per_group, processors(x.x.device))
    sizes = (tables.chunks, batch, tokens, heads, groups, chunks, -(-per_group // splits))
    return splits, kernels.gradients(splits), (chunks * splits, batch * groups), sizes


def pair_gradients(x: SSDTensors, kernels: SSDKernels, tables: SSDTables, dy: Tensor) -> PairGrads:
    """Compute what needs no state, from the gradient of the output before the gate. Rows of no
    segment are not written."""
    batch, tokens, heads, groups, _, _ = x.sizes
    device, config = x.x.device, kernels.config
    splits, run, grid, sizes = _gradient_launch(x, kernels, tables)
    shape = (splits, batch, tokens, groups, config.chunk)
    dscores = torch.empty(shape, dtype=config.dtype, device=device)
    dd, da = torch.empty(2, batch, tokens, heads, dtype=torch.float32, device=device)
    rows = batch * tables.num_chunks
    sums = torch.empty(rows, heads, kernels.sums, dtype=torch.float32, device=device)
    run.pair_grads(grid, *_tokenwise(x, kernels, dy), dscores, dd, da, sums, *sizes)
    return PairGrads(dscores, dd, da, sums)


def gradients(
    x: SSDTensors,
    kernels: SSDKernels,
    tables: SSDTables,
    reverse: SSDTables,
    summaries: Summaries,
    h: Tensor,
    pairs: PairGrads,
    dy: Tensor,
    incoming: Tensor | None,
) -> SSDGradients:
    """Compute every gradient of the rank's inputs but the gate's.

    Args:
        tables, reverse: of the forward and of the backward.
        summaries: of the backward.
        h: from ``chunk_states``, forward, or ``gate_gradient``.
        pairs: from ``pair_gradients``; overwritten.
        dy: gradient of the output; of x without a gate, since ``gate_gradient`` has it applied.
        incoming: float32 ``[num_segments * b, H, P, N]``, gradients of the states that leave the
            segments; None: all zero.
    """
    batch, _, heads, _, _, _ = x.sizes
    dh, passing, dincoming = chunk_states(
        x,
        kernels,
        reverse,
        summaries.states,
        dy=dy,
        incoming=incoming,
        before=summaries.before,
        forward=h,
    )
    assert dincoming is not None
    splits, run, grid, sizes = _gradient_launch(x, kernels, tables)
    given, scored = _tokenwise(x, kernels, dy), pairs.dscores
    dx, ddt, dB, dC = (_like(tensor, tables) for tensor in (x.x, x.dt, x.B, x.C))
    dB_parts, dC_parts = dB, dC
    if splits > 1:
        # Parts of rows of no segment are summed too.
        make = torch.zeros if tables.gaps else torch.empty
        dB_parts, dC_parts = make(2, splits, *x.B.shape, dtype=torch.float32, device=dy.device)
    run.write_grads(grid, *given, dh, passing, scored, dx, dB_parts, pairs.dd, pairs.da, *sizes)
    run.read_grads(grid, *given, h, scored, pairs.dd, pairs.da, dC_parts, ddt, pairs.sums, *sizes)
    dA, dD, ddt_bias = (
        None if tensor is None else torch.empty_like(tensor) for tensor in (x.A, x.D, x.dt_bias)
    )
    assert dA is not None
    elements = dB.numel()
    run.sum_grads(
        (heads + (-(-elements // ELEMENTS) if splits > 1 else 0),),
        pairs.sums,
        dA,
        ddt_bias,
        dD,
        batch * tables.num_chunks,
        heads,
        dB_parts if splits > 1 else None,
        dC_parts if splits > 1 else None,
        dB,
        dC,
        elements,
    )
    return SSDGradients(dx, ddt, dA, dB, dC, dD, ddt_bias, dincoming)
