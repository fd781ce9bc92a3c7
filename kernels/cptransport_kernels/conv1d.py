# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution: forward, backward, and the rows that move between segments.

``conv1d_tables`` says which rows are tokens of which segment and where the rows before a segment,
its *halo*, come from. Every row that is moved is named by a *kind* and a row number:

    kind >= 0   row of a peer's table ``[rows, B, D]``, at ``addresses[kind]``
    OWN         row of this rank's own tensor ``[B, T, D]``, any strides
    STATE       column ``row % h`` of the states ``[N, D, h]`` of sequence ``row // h``, h = W - 1
    NONE        zeros

The forward reads its halo where it lies, in peers' memory too, and keeps a copy for the backward;
blocks of tokens that no halo reaches into can run before it has come. The backward computes the
pre-activation again. It walks down the tokens with the last W inputs and gradients in registers,
so that each is read once; wide convolutions take a slower kernel without that limit. Sums over
tokens go through partial sums of fixed spans, added in a fixed order.

Arithmetic is float32, taps are added oldest first. Offsets are 64 bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cptransport_kernels.configs import ConvConfig
from cptransport_kernels.conv1d_backward import (
    conv_bwd_kernel,
    conv_bwd_wide_kernel,
    conv_reduce_kernel,
)
from cptransport_kernels.conv1d_forward import conv_fwd_kernel, conv_rows_kernel
from cptransport_kernels.conv1d_tables import ConvTables, RowTable
from cptransport_kernels.launch import launch

__all__ = ["backward", "forward", "move_rows", "reduce"]


def _strides(x: Tensor, *dims: int) -> tuple[int, ...]:
    """Return strides of dimensions, 0 where there is one entry: fewer values, fewer compilations."""
    return tuple(x.stride(dim) if x.shape[dim] > 1 else 0 for dim in dims)


def _blocks(size: int, block: int) -> int:
    """Triton's own takes tens of microseconds on the host."""
    return -(-size // block)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    y: Tensor,
    border: Tensor | None,
    tables: ConvTables,
    config: ConvConfig,
    *,
    silu: bool,
    states: Tensor | None = None,
    addresses: Tensor | None = None,
    blocks: slice = slice(None),
) -> None:
    """Compute blocks of tokens.

    Args:
        x: ``[B, T, D]``, any strides.
        weight: ``[D, W]`` contiguous. bias: ``[D]`` contiguous or None.
        residual: ``[B, T, D]``, any strides, or None.
        y: ``[B, T, D]`` contiguous; rows of no segment get zeros.
        border: ``[segments * h, B, D]`` contiguous in x's dtype; gets the halo of every segment that
            has tokens. None: all halos are zero.
        tables: of the rank. config: of the width.
        silu: apply it.
        states: ``[N, D, h]`` in x's dtype, any strides, or None.
        addresses: int64 ``[world_size]`` of peers' tables in x's dtype, or None.
        blocks: of ``tables.blocks``; those before ``tables.inner`` need no halo.

    Stream: runs on the current stream.
    """
    batch, tokens, channels = x.shape
    first, last, _ = blocks.indices(tables.num_blocks)
    count = last - first
    tile = config.forward
    launch(
        conv_fwd_kernel,
        (count * batch * _blocks(channels, tile.channels),),
        x,
        weight,
        bias,
        residual,
        y,
        border,
        states,
        addresses,
        tables.sources,
        tables.tokens,
        tables.blocks,
        first,
        tables.inner,
        count,
        batch,
        tokens,
        channels,
        *_strides(x, 0, 1, 2),
        *((0, 0, 0) if residual is None else _strides(residual, 0, 1, 2)),
        *((0, 0, 0) if states is None else _strides(states, 0, 1, 2)),
        W=weight.shape[1],
        BW=_power_of_two(weight.shape[1]),
        SILU=silu,
        BT=tile.tokens,
        BD=tile.channels,
        UNROLL=weight.shape[1] if config.walk else 1,
        num_warps=tile.warps,
        num_stages=1,
    )


def move_rows(
    rows: RowTable,
    own: Tensor,
    config: ConvConfig,
    *,
    width: int,
    out: Tensor | None = None,
    states_out: Tensor | None = None,
    states: Tensor | None = None,
    addresses: Tensor | None = None,
    count: int | None = None,
) -> None:
    """Write rows that are sums of rows, added in the table's order in float32.

    Args:
        rows: which, and of what.
        own: ``[B, T, D]``, any strides: rows of kind OWN; says the dtype of peers' tables.
        config: of the width. width: W.
        out: ``[B, rows, D]``, any strides but contiguous in D: rows of targets >= 0.
        states_out: ``[N, D, h]`` contiguous: target -1 - (n h + c) is column c of row n.
        states, addresses: as in ``forward``.
        count: only so many of the rows; None: all.

    Stream: runs on the current stream.
    """
    batch, _, channels = own.shape
    count = rows.count if count is None else count
    tile = config.rows
    launch(
        conv_rows_kernel,
        (_blocks(count, tile.tokens) * batch * _blocks(channels, tile.channels),),
        own,
        states,
        addresses,
        out,
        states_out,
        rows.targets,
        rows.sources,
        count,
        rows.sources.shape[1],
        batch,
        channels,
        *_strides(own, 0, 1, 2),
        *((0, 0, 0) if states is None else _strides(states, 0, 1, 2)),
        *((0, 0) if out is None else _strides(out, 0, 1)),
        H=width - 1,
        BR=tile.tokens,
        BD=tile.channels,
        num_warps=tile.warps,
        num_stages=1,
    )


def backward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    border: Tensor | None,
    dy: Tensor,
    dx: Tensor,
    tables: ConvTables,
    config: ConvConfig,
    *,
    silu: bool,
    dfinal: Tensor | None = None,
    edges: Tensor | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """Compute the gradients of this rank's own tokens.

    Args:
        x, weight, bias, silu: as in ``forward``. border: what it kept.
        dy: ``[B, T, D]``, any strides. Rows of no segment are not read.
        dx: ``[B, T, D]`` contiguous; rows of no segment are not written.
        tables: of the rank. config: of the width.
        dfinal: ``[N, D, h]``, any strides: gradient of the final states, or None.
        edges: float32 ``[2, segments * h, B, D]`` contiguous: [0] gets the gradients of each
            segment's last min(length, h) rows, right aligned, [1] those of its halo. None: not
            wanted.
        table: float32 ``[>= segments * h, B, D]`` contiguous: gets [1] too, for peers.

    Returns:
        Partial sums for ``reduce``.

    Stream: runs on the current stream.
    """
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    tile = config.backward
    programs = tables.num_programs
    partial = torch.empty(
        (batch * programs, width + 1, channels), dtype=torch.float32, device=x.device
    )
    launch(
        conv_bwd_kernel if config.walk else conv_bwd_wide_kernel,
        (programs * batch * _blocks(channels, tile.channels),),
        x,
        border,
        weight,
        bias,
        dy,
        dfinal,
        dx,
        edges,
        table,
        partial,
        tables.programs,
        tables.spans,
        programs,
        batch,
        tokens,
        channels,
        0 if edges is None else edges.shape[1],
        *_strides(x, 0, 1, 2),
        *_strides(dy, 0, 1, 2),
        *((0, 0, 0) if dfinal is None else _strides(dfinal, 0, 1, 2)),
        W=width,
        BW=_power_of_two(width),
        SILU=silu,
        STEP=tile.tokens,
        BD=tile.channels,
        num_warps=tile.warps,
        num_stages=1,
    )
    return partial


def reduce(
    partial: Tensor, weight: Tensor, bias: Tensor | None, config: ConvConfig
) -> tuple[Tensor, Tensor | None]:
    """Add the partial sums of ``backward`` in a fixed order: gradients like ``weight`` and ``bias``.

    Stream: runs on the current stream.
    """
    d_weight = torch.empty_like(weight, memory_format=torch.contiguous_format)
    d_bias = None if bias is None else torch.empty_like(bias)
    channels, width = weight.shape
    tile = config.reduce
    launch(
        conv_reduce_kernel,
        (_blocks(channels, tile.channels), width + (bias is not None)),
        partial,
        d_weight,
        d_bias,
        partial.shape[0],
        channels,
        W=width,
        BP=tile.tokens,
        BD=tile.channels,
        num_warps=tile.warps,
        num_stages=1,
    )
    return d_weight, d_bias
