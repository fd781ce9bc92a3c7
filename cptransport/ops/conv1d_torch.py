# SPDX-License-Identifier: Apache-2.0
"""A rank's causal convolution in plain torch: any device, any floating dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from cptransport.halo import RankHalo, RowCopy, halo
from cptransport.ops.conv1d_exchange import ConvCall, ConvGrads, HaloExchange
from cptransport.plan import Plan

__all__ = ["TorchConvolution"]


class TorchConvolution:
    """The reference."""

    name = "torch"

    def forward(
        self,
        call: ConvCall,
        exchange: HaloExchange,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See ``Convolution``."""
        tables = _tables(call)
        published = _table(call, exchange, call.dtype)
        rows = x.transpose(0, 1)  # [T, B, D]
        published[tables.publish.target] = rows[tables.publish.source]
        border = torch.zeros_like(published)
        for copy, table in _exchange(exchange, published, tables.receive):
            border[copy.target] = table[copy.source]
        if initial_state is not None:
            known = _state_rows(call, initial_state).to(call.dtype)
            border[tables.initial.target] = known[tables.initial.source]
        line = _line(call.context.plan, call.context.rank, call.width, x.device)
        values = _lay(line, border, x, call.compute)
        out = _correlate(values, weight.to(call.compute), bias).index_select(1, line.outputs)
        if call.silu:
            out = F.silu(out)
        if residual is not None:
            out = out + residual.index_select(1, line.rows).to(call.compute)
        y = torch.zeros_like(x, memory_format=torch.contiguous_format)
        y.index_copy_(1, line.rows, out.to(call.dtype))
        if not call.final:
            return y, None, border
        final = _no_rows(call, call.dtype, x.device)
        final[tables.final_halo.target] = border[tables.final_halo.source]
        final[tables.final_rows.target] = rows[tables.final_rows.source]
        return y, _rows_to_state(call, final), border

    def backward(
        self,
        call: ConvCall,
        exchange: HaloExchange,
        border: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual_dtype: torch.dtype | None,
        grad_y: Tensor,
        grad_final: Tensor | None,
    ) -> ConvGrads:
        """See ``Convolution``."""
        assert border is not None
        tables = _tables(call)
        line = _line(call.context.plan, call.context.rank, call.width, x.device)
        values = _lay(line, border, x, call.compute)
        weights = weight.to(call.compute)
        grad = grad_y.index_select(1, line.rows).to(call.compute)
        d_residual = None
        if residual_dtype is not None:
            d_residual = torch.zeros(x.shape, dtype=residual_dtype, device=x.device)
            d_residual.index_copy_(1, line.rows, grad.to(residual_dtype))
        if call.silu:
            taps = _correlate(values, weights, bias).index_select(1, line.outputs)
            gate = taps.sigmoid()
            grad = grad * gate * (1 + taps * (1 - gate))
        # Zeros where an output would straddle two segments.
        length = _outputs(values, call.width)
        spread = values.new_zeros(call.batch, length, call.channels)
        spread.index_copy_(1, line.outputs, grad)
        d_weight = torch.empty_like(weights)
        d_values = torch.zeros_like(values)
        for tap in range(call.width):
            shifted = slice(tap, tap + length)
            d_values[:, shifted] += spread * weights[:, tap]
            d_weight[:, tap] = (values[:, shifted] * spread).sum((0, 1))
        both = values.new_zeros(call.batch, len(border) + x.shape[1], call.channels)
        both.index_copy_(1, line.sources, d_values)
        d_border = _table(call, exchange, call.compute)
        d_border.copy_(both[:, : len(border)].transpose(0, 1))
        dx = both[:, len(border) :]
        rows = dx.transpose(0, 1)
        if grad_final is not None:
            final = _state_rows(call, grad_final).to(call.compute)
            d_border[tables.final_halo.source] += final[tables.final_halo.target]
            rows[tables.final_rows.source] += final[tables.final_rows.target]
        for copy, table in _exchange(exchange, d_border, tables.give_back):
            rows[copy.target] += table[copy.source]
        d_initial = None
        if call.initial_dtype is not None:
            known = _no_rows(call, call.compute, x.device)
            for copy in tables.give_back_initial:
                known[copy.target] += d_border[copy.source]
            d_initial = _rows_to_state(call, known).to(call.initial_dtype)
        return ConvGrads(
            dx.to(x.dtype),
            d_weight.to(weight.dtype),
            None if bias is None else grad.sum((0, 1)).to(bias.dtype),
            d_residual,
            d_initial,
        )


def _tables(call: ConvCall) -> RankHalo:
    return halo(call.context.plan, call.width).for_rank(call.context.rank, call.device)


def _table(call: ConvCall, exchange: HaloExchange, dtype: torch.dtype) -> Tensor:
    """Return the table that peers read, one of one's own where there are none."""
    if exchange.table is not None:
        return exchange.table
    return torch.empty(call.table_shape, dtype=dtype, device=call.device)


def _exchange(
    exchange: HaloExchange, own: Tensor, sources: Sequence[RowCopy]
) -> list[tuple[RowCopy, Tensor]]:
    """Publish the table; return every source's copy with the table it reads."""
    exchange.publish()
    gathered = exchange.gather()
    if gathered is None:
        return [(copy, own) for copy in sources]
    return [(copy, gathered.tensor("halo", copy.peer)) for copy in sources]


@dataclass(frozen=True, eq=False)
class _Line:
    """A rank's segments one after the other, each behind its halo: one convolution serves them all.

    Attributes:
        sources (int64, [m + halo rows]): where its rows are, in the borders followed by x.
        outputs (int64, [m]): where the tokens' outputs are in a convolution of the line.
        rows (int64, [m]): the tokens' local rows.
    """

    sources: Tensor
    outputs: Tensor
    rows: Tensor


@lru_cache(maxsize=32)
def _line(plan: Plan, rank: int, width: int, device: torch.device) -> _Line:
    h = width - 1
    sources, outputs, rows = ([torch.empty(0, dtype=torch.int64)] for _ in range(3))
    filled = 0
    for index, segment in enumerate(plan.for_rank(rank).segments):
        if not segment.length:
            continue
        local = torch.arange(segment.local_start, segment.local_start + segment.length)
        sources += [torch.arange(index * h, (index + 1) * h), plan.max_segments * h + local]
        outputs.append(torch.arange(filled, filled + segment.length))
        rows.append(local)
        filled += h + segment.length
    return _Line(*(torch.cat(pieces).to(device) for pieces in (sources, outputs, rows)))


def _lay(line: _Line, border: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the rows of the line, ``[B, m + halo rows, D]``."""
    return torch.cat([border.transpose(0, 1), x], 1).index_select(1, line.sources).to(dtype)


def _outputs(values: Tensor, width: int) -> int:
    """Number of outputs of a convolution without padding."""
    return max(0, values.shape[1] - width + 1)


def _correlate(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Sum the taps in a fixed order: exact in the compute dtype on every device, which library convolutions are not."""
    channels, width = weight.shape
    length = _outputs(values, width)
    total = values.new_zeros((values.shape[0], length, channels))
    if bias is not None:
        total = total + bias.to(values.dtype)
    for tap in range(width):
        total = total + values[:, tap : tap + length] * weight[:, tap]
    return total


def _no_rows(call: ConvCall, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero conv states as rows, ``[sequences * (W-1), B, D]``; ``halo`` says how they are addressed."""
    rows = call.context.plan.num_sequences * (call.width - 1)
    return torch.zeros((rows, call.batch, call.channels), dtype=dtype, device=device)


def _state_rows(call: ConvCall, state: Tensor) -> Tensor:
    """View conv states ``[N, D, W-1]`` as rows: one sequence and B rows of it, or packed sequences and B = 1."""
    if call.context.plan.num_sequences == 1:
        return state.permute(2, 0, 1)
    return state.transpose(1, 2).reshape(-1, 1, call.channels)


def _rows_to_state(call: ConvCall, rows: Tensor) -> Tensor:
    """The inverse of ``_state_rows``."""
    if call.context.plan.num_sequences == 1:
        return rows.permute(1, 2, 0).contiguous()
    shape = (call.states, call.width - 1, call.channels)
    return rows.reshape(shape).transpose(1, 2).contiguous()
