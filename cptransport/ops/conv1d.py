# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution, sequence-sharded: each segment borrows its halo from the ranks before it.

Forward moves the last inputs of predecessors, backward returns each halo row's gradient to the rank
it came from; which rows, ``cptransport.halo`` says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cptransport import env
from cptransport.composition import expand_routes
from cptransport.context import CPContext
from cptransport.errors import OpInputError
from cptransport.halo import RankHalo, RowCopy, halo
from cptransport.ops.inputs import (
    check_batch,
    check_context,
    check_floating,
    check_shape,
    op_device,
    refuse_upstream,
    state_dtype,
)
from cptransport.ops.once import once_differentiable
from cptransport.ops.scope import RunRecord, agree, op_step, record_run, reporting
from cptransport.plan import Plan
from cptransport.transport import PartSpec, Slot

__all__ = ["causal_conv1d"]

_UPSTREAM = {
    "cu_seqlens": "the plan in cp_context says where sequences start",
    "cu_seqlens_cpu": "the plan in cp_context says where sequences start",
    "chunk_indices": "segments come from the plan",
    "seq_idx": "the plan in cp_context says where sequences start",
    "backend": "use engine selection",
    "initial_states": "the argument is initial_state, [N, D, W-1]",
    "return_final_states": "the argument is output_final_state",
    "final_states_out": "the op allocates its final state",
}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cp_context: CPContext,
    activation: str | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **upstream: Any,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution over sequences that are sharded as ``cp_context`` says.

    ``y_t = act(bias + sum_w weight[:, w] * x_{t - W + 1 + w}) + residual_t``; inputs before a
    sequence's start come from its initial state (oldest first), zeros without one.

    Args:
        x: ``[B, T, D]``, T this rank's local length, any strides.
        weight: ``[D, W]``, W >= 1.
        bias: ``[D]``.
        cp_context: from ``build_cp_context``.
        activation: None, ``"silu"`` or ``"swish"``.
        residual: ``[B, T, D]``, added last.
        initial_state: ``[N, D, W-1]``, any float dtype, replicated, one row per sequence (dense: N
            = B).
        output_final_state: return the last W-1 inputs of each sequence.
        upstream: other libraries' arguments; refused by name.

    Returns:
        y ``[B, T, D]`` in x's dtype, and final_state ``[N, D, W-1]`` in x's dtype on the rank that
        owns each sequence's last token, zeros elsewhere; None unless asked.

    Raises:
        OpInputError (a ValueError), UnsupportedOptionError, PeerFailedError, TransportTimeoutError:
        as ``chunk_kda``.

    Collective: yes, forward and backward, over the context's transport.
    Source: ``causal_conv1d`` of the package of that name, and FLA's ``ShortConvolution``.
    """
    transport = check_context(cp_context).transport
    with op_step(transport):
        call = agree(
            transport,
            "causal_conv1d",
            lambda: _prepare(
                x, weight, bias, residual, initial_state, cp_context, activation, upstream
            ),
        )
    y, final_state = _Conv.apply(call, x, weight, bias, residual, initial_state)  # type: ignore[no-untyped-call]
    return y, final_state if output_final_state else None


@dataclass(frozen=True)
class _Call:
    """A call without its tensors."""

    context: CPContext
    width: int
    batch: int
    channels: int
    states: int
    activate: bool
    dtype: torch.dtype
    compute: torch.dtype
    initial_dtype: torch.dtype | None
    device: torch.device


def _prepare(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    context: CPContext,
    activation: str | None,
    upstream: Mapping[str, Any],
) -> tuple[_Call, str]:
    refuse_upstream("causal_conv1d", upstream, _UPSTREAM)
    if activation not in (None, "silu", "swish"):
        raise OpInputError(f"activation must be None, 'silu' or 'swish', got {activation!r}")
    check_shape("x", x, (None, None, None), "[B, T, D]")
    states = check_batch("x", x, context)
    batch, length, channels = x.shape
    check_shape("weight", weight, (channels, None), "[D, W]")
    width = weight.shape[1]
    if width < 1:
        raise OpInputError("weight must be [D, W] with W >= 1, got W = 0")
    if bias is not None:
        check_shape("bias", bias, (channels,), "[D]")
    if residual is not None:
        check_shape("residual", residual, (batch, length, channels), "[B, T, D]")
    if initial_state is not None:
        check_shape("initial_state", initial_state, (states, channels, width - 1), "[N, D, W-1]")
    given = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "initial_state": initial_state,
    }
    transport = context.transport
    device = op_device(context, x)
    check_floating(given, device)
    call = _Call(
        context,
        width,
        batch,
        channels,
        states,
        activation is not None,
        x.dtype,
        state_dtype(x),
        None if initial_state is None else initial_state.dtype,
        device,
    )
    record_run(
        RunRecord(
            "causal_conv1d",
            "torch",
            transport.name,
            "halo",
            env.flag(env.OVERLAP),
            transport.world_size,
        )
    )
    dtypes = {name: str(t.dtype) for name, t in given.items() if t is not None}
    tracked = sorted(
        name
        for name, t in given.items()
        if t is not None and t.requires_grad and torch.is_grad_enabled()
    )
    text = (
        f"plan {context.plan.digest()}; B {batch}; D {channels}; W {width}; activation {activation}; "
        f"dtypes {dtypes}; requires_grad {tracked}"
    )
    return call, text


class _HaloExchange:
    """Moves one halo table; ``W = 1`` or a plan without borrowed rows moves nothing."""

    def __init__(self, call: _Call, direction: str, dtype: torch.dtype) -> None:
        plan, self._transport = call.context.plan, call.context.transport
        moves = halo(plan, call.width)
        self.tables: RankHalo = moves.for_rank(self._transport.rank, call.device)
        routes = moves.routes(direction)
        shape = (plan.max_segments * (call.width - 1), call.batch, call.channels)
        self._slot = None
        if routes:
            self._slot = Slot(
                f"conv1d.{direction}", (PartSpec("halo", shape, dtype, expand_routes(routes, 1)),)
            )
            self.table = self._transport.stage(self._slot)["halo"]
        else:
            self.table = torch.empty(shape, dtype=dtype, device=call.device)

    def exchange(self, sources: Sequence[RowCopy]) -> list[tuple[RowCopy, Tensor]]:
        """Publish what was written into ``table``; return every source's copy with the table it reads."""
        if self._slot is None:
            return [(copy, self.table) for copy in sources]
        self._transport.publish(self._slot)
        gathered = self._transport.gather(self._slot)
        return [(copy, gathered.tensor("halo", copy.peer)) for copy in sources]


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: _Call,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        with reporting(call.context.transport):
            y, final, border = _forward(call, x, weight, bias, residual, initial_state)
        ctx.call = call
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        # The initial state only shows a second backward where it would have to go.
        ctx.save_for_backward(x, border, weight, bias, initial_state)
        return y, final

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        x, border, weight, bias, _ = ctx.saved_tensors
        transport = call.context.transport
        with op_step(transport):
            agree(
                transport,
                "causal_conv1d backward",
                lambda: (None, f"plan {call.context.plan.digest()}; W {call.width}"),
            )
            exchange = _HaloExchange(call, "backward", call.compute)
            tables = exchange.tables
            line = _line(call.context.plan, transport.rank, call.width, x.device)
            values = _lay(line, border, x, call.compute)
            weights = weight.to(call.compute)
            if grad_y is None:
                grad_y = torch.zeros_like(x)
            grad = grad_y.index_select(1, line.rows).to(call.compute)
            d_residual = torch.zeros(x.shape, dtype=call.compute, device=x.device)
            d_residual.index_copy_(1, line.rows, grad)
            if call.activate:
                taps = _correlate(values, weights, bias).index_select(1, line.outputs)
                gate = taps.sigmoid()
                grad = grad * gate * (1 + taps * (1 - gate))
            d_bias = grad.sum((0, 1))
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
            d_border = exchange.table.copy_(both[:, : len(border)].transpose(0, 1))
            dx = both[:, len(border) :]
            rows = dx.transpose(0, 1)
            if grad_final is not None:
                final = _state_rows(call, grad_final).to(call.compute)
                d_border[tables.final_halo.source] += final[tables.final_halo.target]
                rows[tables.final_rows.source] += final[tables.final_rows.target]
            for copy, table in exchange.exchange(tables.give_back):
                rows[copy.target] += table[copy.source]
            d_initial = None
            if call.initial_dtype is not None:
                known = _no_rows(call, call.compute, x.device)
                for copy in tables.give_back_initial:
                    known[copy.target] += d_border[copy.source]
                d_initial = _rows_to_state(call, known).to(call.initial_dtype)
        return (
            None,
            dx.to(x.dtype),
            d_weight.to(weight.dtype),
            None if bias is None else d_bias.to(bias.dtype),
            None if ctx.residual_dtype is None else d_residual.to(ctx.residual_dtype),
            d_initial,
        )


def _forward(
    call: _Call,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, the final states, and what stood before each segment."""
    exchange = _HaloExchange(call, "forward", call.dtype)
    tables = exchange.tables
    rows = x.transpose(0, 1)  # [T, B, D]
    exchange.table[tables.publish.target] = rows[tables.publish.source]
    border = torch.zeros_like(exchange.table)
    for copy, table in exchange.exchange(tables.receive):
        border[copy.target] = table[copy.source]
    if initial_state is not None:
        known = _state_rows(call, initial_state).to(call.dtype)
        border[tables.initial.target] = known[tables.initial.source]
    line = _line(call.context.plan, call.context.rank, call.width, x.device)
    values = _lay(line, border, x, call.compute)
    out = _correlate(values, weight.to(call.compute), bias).index_select(1, line.outputs)
    if call.activate:
        out = F.silu(out)
    if residual is not None:
        out = out + residual.index_select(1, line.rows).to(call.compute)
    y = torch.zeros_like(x, memory_format=torch.contiguous_format)
    y.index_copy_(1, line.rows, out.to(call.dtype))
    final = _no_rows(call, call.dtype, x.device)
    final[tables.final_halo.target] = border[tables.final_halo.source]
    final[tables.final_rows.target] = rows[tables.final_rows.source]
    return y, _rows_to_state(call, final), border


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


def _no_rows(call: _Call, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zero conv states as rows, ``[sequences * (W-1), B, D]``; ``halo`` says how they are addressed."""
    rows = call.context.plan.num_sequences * (call.width - 1)
    return torch.zeros((rows, call.batch, call.channels), dtype=dtype, device=device)


def _state_rows(call: _Call, state: Tensor) -> Tensor:
    """View conv states ``[N, D, W-1]`` as rows: one sequence and B rows of it, or packed sequences and B = 1."""
    if call.context.plan.num_sequences == 1:
        return state.permute(2, 0, 1)
    return state.transpose(1, 2).reshape(-1, 1, call.channels)


def _rows_to_state(call: _Call, rows: Tensor) -> Tensor:
    """The inverse of ``_state_rows``."""
    if call.context.plan.num_sequences == 1:
        return rows.permute(1, 2, 0).contiguous()
    shape = (call.states, call.width - 1, call.channels)
    return rows.reshape(shape).transpose(1, 2).contiguous()
