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
from typing import Any

import torch
from torch import Tensor

from cptransport_kernels.launch import launch, on_gpu, processors
from cptransport_kernels.ssd_chunk_backward import (
    ssd_group_grads_kernel,
    ssd_pair_grads_kernel,
    ssd_parameter_grads_kernel,
    ssd_read_grads_kernel,
    ssd_write_grads_kernel,
)
from cptransport_kernels.ssd_configs import SSDConfig, ssd_splits
from cptransport_kernels.ssd_output import ssd_output_kernel, ssd_scores_kernel
from cptransport_kernels.ssd_states import (
    ssd_chunk_states_kernel,
    ssd_join_kernel,
    ssd_summary_kernel,
)
from cptransport_kernels.ssd_tables import SSDTables

__all__ = [
    "PairGrads",
    "SSDGradients",
    "SSDSteps",
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

#: Elements of a state that one program of the scan over pieces takes; of a sum of parts likewise.
_ELEMENTS = 1024


@dataclass(frozen=True)
class SSDSteps:
    """How a step is made of dt; meanings as in the op's options."""

    softplus: bool
    low: float
    high: float


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

    @property
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


def _blocks(x: SSDTensors, config: SSDConfig) -> dict[str, Any]:
    *_, headdim, dstate = x.sizes
    return {
        "P": headdim,
        "N": dstate,
        "BT": config.chunk,
        "BP": config.channels,
        "BN": config.columns,
        "PREC": config.precision if on_gpu(x.x) else "ieee",
    }


def _walked(x: SSDTensors, dy: Tensor | None) -> tuple[Any, ...]:
    """What a walk takes of tokens: x and B, or the gradient of the output, its gate and C."""
    if dy is None:
        return *_rows(x.x), *_rows(None), *_rows(x.B)
    return *_rows(dy), *_rows(x.z), *_rows(x.C)


def _run(run: Any) -> dict[str, int]:
    return {"num_warps": run.warps, "num_stages": run.stages}


def _walks(x: SSDTensors, config: SSDConfig, tables: SSDTables) -> tuple[int, int]:
    batch, _, heads, _, headdim, _ = x.sizes
    return -(-headdim // config.channels) * tables.num_pieces * batch, heads


def summarise(
    x: SSDTensors,
    steps: SSDSteps,
    config: SSDConfig,
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
        launch(
            ssd_summary_kernel,
            _walks(x, config, tables),
            *_walked(x, dy),
            *_rows(x.dt),
            x.A,
            x.dt_bias,
            steps.low,
            steps.high,
            states,
            decays,
            seed,
            state,
            transition,
            tables.pieces,
            batch,
            heads,
            groups,
            CUT=tables.cut,
            SOFTPLUS=steps.softplus,
            REVERSE=reverse,
            BF16=config.dtype == torch.bfloat16,
            **_blocks(x, config),
            **_run(config.summary),
        )
    if tables.cut:
        elements = headdim * dstate
        launch(
            ssd_join_kernel,
            (-(-elements // _ELEMENTS) * tables.num_segments * batch, heads),
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
            E=elements,
            BE=_ELEMENTS,
            REVERSE=reverse,
            num_warps=4,
            num_stages=1,
        )
    return Summaries(states, before)


def scores(x: SSDTensors, config: SSDConfig, tables: SSDTables) -> Tensor:
    """Return C_i . B_j of every pair of a chunk, ``[b, T, G, chunk]``; rows of no segment are not
    written."""
    batch, tokens, _, groups, _, _ = x.sizes
    shape = (batch, tokens, groups, config.chunk)
    result = torch.empty(shape, dtype=config.dtype, device=x.x.device)
    blocks = _blocks(x, config)
    launch(
        ssd_scores_kernel,
        (tables.num_chunks, batch * groups),
        *_rows(x.B),
        *_rows(x.C),
        result,
        tables.chunks,
        tokens,
        groups,
        **{name: blocks[name] for name in ("N", "BT", "BN", "PREC")},
        **_run(config.scores),
    )
    return result


def _output(
    x: SSDTensors,
    steps: SSDSteps,
    config: SSDConfig,
    tables: SSDTables,
    pairs: Tensor,
    states: tuple[Any, ...],
    y: Tensor,
    outgoing: Tensor | None,
    backward: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    batch, tokens, heads, groups, _, _ = x.sizes
    launch(
        ssd_output_kernel,
        _walks(x, config, tables),
        *_rows(x.x),
        *_rows(x.z),
        *_rows(x.B),
        *_rows(x.C),
        *_rows(x.dt),
        x.A,
        x.dt_bias,
        x.D,
        steps.low,
        steps.high,
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
        CUT=tables.cut,
        SOFTPLUS=steps.softplus,
        CHANNEL_D=x.D is not None and x.D.dim() == 2,
        **_blocks(x, config),
        **_run(config.output),
    )


def _like(tensor: Tensor, tables: SSDTables) -> Tensor:
    """A dense tensor whose rows of no segment are zero."""
    make = torch.zeros if tables.gaps else torch.empty
    return make(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def outputs(
    x: SSDTensors,
    steps: SSDSteps,
    config: SSDConfig,
    tables: SSDTables,
    summaries: Summaries,
    pairs: Tensor,
    incoming: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the states that leave the segments, and those that enter the pieces.

    Args:
        summaries: of the forward; its states are overwritten.
        pairs: from ``scores``.
        incoming: float32 ``[num_segments * b, H, P, N]``, states that enter the segments.
    """
    batch, _, heads, _, headdim, dstate = x.sizes
    states = summaries.states
    if states is None:
        states = incoming.new_empty(tables.num_rows * batch, heads, headdim, dstate)
    y, outgoing = _like(x.x, tables), torch.empty_like(incoming)
    entering = (incoming, states, summaries.before)
    _output(x, steps, config, tables, pairs, entering, y, outgoing, (None, None, None))
    return y, outgoing, states


def gate_gradient(
    x: SSDTensors,
    steps: SSDSteps,
    config: SSDConfig,
    tables: SSDTables,
    entering: Tensor,
    dy: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the states before every chunk, as ``chunk_states``, the gradient of z, and that of the
    output before the gate: one walk that computes that output again."""
    batch, _, heads, _, headdim, dstate = x.sizes
    assert x.z is not None
    shape = (batch, tables.num_chunks, heads, headdim, dstate)
    h = torch.empty(shape, dtype=config.dtype, device=dy.device)
    dz, pairs = _like(x.z, tables), scores(x, config, tables)
    gated = torch.empty(x.x.shape, dtype=x.x.dtype, device=dy.device)
    entered = (None, entering, None)
    _output(x, steps, config, tables, pairs, entered, dz, None, (dy, gated, h))
    return h, dz, gated


def chunk_states(
    x: SSDTensors,
    steps: SSDSteps,
    config: SSDConfig,
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
    h = torch.empty(batch, chunks, heads, headdim, dstate, dtype=config.dtype, device=device)
    passing = leaving = None
    if reverse:
        blocks = -(-headdim // config.channels)
        passing = torch.empty(blocks, batch * chunks, heads, dtype=torch.float32, device=device)
        shape = (tables.num_segments * batch, heads, headdim, dstate)
        leaving = torch.empty(shape, dtype=torch.float32, device=device)
    launch(
        ssd_chunk_states_kernel,
        _walks(x, config, tables),
        *_walked(x, dy),
        *_rows(x.dt),
        x.A,
        x.dt_bias,
        steps.low,
        steps.high,
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
        CUT=tables.cut,
        SOFTPLUS=steps.softplus,
        REVERSE=reverse,
        **_blocks(x, config),
        **_run(config.states),
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


def _tokenwise(x: SSDTensors, steps: SSDSteps, dy: Tensor) -> tuple[Any, ...]:
    return (
        *_rows(x.x),
        *_rows(dy),
        *_rows(x.B),
        *_rows(x.C),
        *_rows(x.dt),
        x.A,
        x.dt_bias,
        x.D,
        steps.low,
        steps.high,
    )


def _gradient_launch(
    x: SSDTensors, steps: SSDSteps, config: SSDConfig, tables: SSDTables
) -> tuple[int, tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Splits of a group's heads, grid, sizes and constants of the kernels of chunks and groups."""
    batch, tokens, heads, groups, headdim, _ = x.sizes
    chunks, per_group = tables.num_chunks, heads // groups
    splits = ssd_splits(chunks, batch * groups, per_group, processors(x.x.device))
    per_channel = x.D is not None and x.D.dim() == 2
    constants = {
        "SPLITS": splits,
        "SUMS": 2 + (0 if x.D is None else headdim if per_channel else 1),
        "SOFTPLUS": steps.softplus,
        "CHANNEL_D": per_channel,
        **_blocks(x, config),
    }
    sizes = (tables.chunks, batch, tokens, heads, groups, chunks, -(-per_group // splits))
    return splits, (chunks * splits, batch * groups), sizes, constants


def pair_gradients(
    x: SSDTensors, steps: SSDSteps, config: SSDConfig, tables: SSDTables, dy: Tensor
) -> PairGrads:
    """Compute what needs no state, from the gradient of the output before the gate. Rows of no
    segment are not written."""
    batch, tokens, heads, groups, _, _ = x.sizes
    device = x.x.device
    splits, grid, sizes, constants = _gradient_launch(x, steps, config, tables)
    dscores = torch.empty(
        splits, batch, tokens, groups, config.chunk, dtype=config.dtype, device=device
    )
    dd, da = torch.empty(2, batch, tokens, heads, dtype=torch.float32, device=device)
    rows, num_sums = batch * tables.num_chunks, constants["SUMS"]
    sums = torch.empty(rows, heads, num_sums, dtype=torch.float32, device=device)
    launch(
        ssd_pair_grads_kernel,
        grid,
        *_tokenwise(x, steps, dy),
        dscores,
        dd,
        da,
        sums,
        *sizes,
        **constants,
        **_run(config.pair_grads),
    )
    return PairGrads(dscores, dd, da, sums)


def gradients(
    x: SSDTensors,
    steps: SSDSteps,
    config: SSDConfig,
    tables: SSDTables,
    reverse: SSDTables,
    summaries: Summaries,
    h: Tensor,
    pairs: PairGrads,
    dy: Tensor,
    incoming: Tensor,
) -> SSDGradients:
    """Compute every gradient of the rank's inputs but the gate's.

    Args:
        tables, reverse: of the forward and of the backward.
        summaries: of the backward.
        h: from ``chunk_states``, forward, or ``gate_gradient``.
        pairs: from ``pair_gradients``; overwritten.
        dy: gradient of the output; of x without a gate, since ``gate_gradient`` has it applied.
        incoming: float32 ``[num_segments * b, H, P, N]``, gradients of the states that leave the
            segments.
    """
    batch, _, heads, _, _, _ = x.sizes
    device, chunks = x.x.device, tables.num_chunks
    dh, passing, dincoming = chunk_states(
        x,
        steps,
        config,
        reverse,
        summaries.states,
        dy=dy,
        incoming=incoming,
        before=summaries.before,
        forward=h,
    )
    assert dincoming is not None
    splits, grid, sizes, constants = _gradient_launch(x, steps, config, tables)
    num_sums = constants["SUMS"]
    dx, ddt, dB, dC = (_like(tensor, tables) for tensor in (x.x, x.dt, x.B, x.C))
    dB_parts, dC_parts = dB, dC
    if splits > 1:
        # Parts of rows of no segment are summed too.
        make = torch.zeros if tables.gaps else torch.empty
        dB_parts, dC_parts = make(2, splits, *x.B.shape, dtype=torch.float32, device=device)
    launch(
        ssd_write_grads_kernel,
        grid,
        *_tokenwise(x, steps, dy),
        dh,
        passing,
        pairs.dscores,
        dx,
        dB_parts,
        pairs.dd,
        pairs.da,
        *sizes,
        **constants,
        **_run(config.write_grads),
    )
    launch(
        ssd_read_grads_kernel,
        grid,
        *_tokenwise(x, steps, dy),
        h,
        pairs.dscores,
        pairs.dd,
        pairs.da,
        dC_parts,
        ddt,
        pairs.sums,
        *sizes,
        **constants,
        **_run(config.read_grads),
    )
    dA = torch.empty_like(x.A, memory_format=torch.contiguous_format)
    dD = None if x.D is None else torch.empty_like(x.D, memory_format=torch.contiguous_format)
    ddt_bias = None
    if x.dt_bias is not None:
        ddt_bias = torch.empty_like(x.dt_bias, memory_format=torch.contiguous_format)
    launch(
        ssd_parameter_grads_kernel,
        (heads,),
        pairs.sums,
        dA,
        ddt_bias,
        dD,
        batch * chunks,
        heads,
        SUMS=num_sums,
        BR=64,
        BS=max(4, 1 << (num_sums - 1).bit_length()),
        num_warps=4,
        num_stages=1,
    )
    if splits > 1:
        launch(
            ssd_group_grads_kernel,
            (-(-dB.numel() // _ELEMENTS),),
            dB_parts,
            dC_parts,
            dB,
            dC,
            dB.numel(),
            SPLITS=splits,
            BE=_ELEMENTS,
            num_warps=4,
            num_stages=1,
        )
    return SSDGradients(dx, ddt, dA, dB, dC, dD, ddt_bias, dincoming)
