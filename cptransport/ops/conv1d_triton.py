# SPDX-License-Identifier: Apache-2.0
"""A rank's causal convolution through the kernels of ``cptransport_kernels``.

Importing this module loads Triton.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

import cptransport_kernels.conv1d as kernels
from cptransport.halo import Halo, RankHalo, halo
from cptransport.ops.conv1d_exchange import ConvCall, ConvGrads, HaloExchange
from cptransport.plan import Plan
from cptransport_kernels.configs import ConvConfig, conv_config
from cptransport_kernels.conv1d_tables import (
    NONE,
    OWN,
    STATE,
    ConvSegment,
    ConvTables,
    RowTable,
    build_tables,
)
from cptransport_kernels.launch import interpreted

__all__ = ["TritonConvolution", "why_not"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def why_not(device_type: str, dtypes: Mapping[str, torch.dtype]) -> str | None:
    """Return why the kernels do not serve a call, None if they do.

    A pure function of what every rank knows alike.
    """
    if device_type != "cuda" and not (device_type == "cpu" and interpreted()):
        return f"needs CUDA tensors, not {device_type}"
    for name, dtype in dtypes.items():
        if dtype not in _FLOATS:
            return f"needs {name} in bfloat16, float16 or float32, not {dtype}"
    return None


class TritonConvolution:
    """A launch or two in the forward, three in the backward.

    Forward: the rows that peers need, then everything (and final states, if asked for). Backward:
    everything, then the sums of the parameters' gradients, then the rows whose gradients came back.
    """

    name = "triton"

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
        """See ``Convolution``. Reads peers' rows where they lie."""
        config = conv_config(call.width)
        tables = _tables_of(call, config)
        move = partial(kernels.move_rows, config=config, width=call.width)
        if exchange.table is not None:
            move(tables.pack, x, out=exchange.table.transpose(0, 1))
        exchange.publish()
        states = border = None
        if initial_state is not None and initial_state.numel():
            states = initial_state.to(call.dtype)
        rows = len(tables.conv.sources)
        if rows and (tables.borrows or states is not None):
            border = x.new_empty(rows, call.batch, call.channels)
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        run = partial(
            kernels.forward,
            x,
            weight.contiguous(),
            None if bias is None else bias.contiguous(),
            residual,
            y,
            tables=tables.conv,
            config=config,
            silu=call.silu,
        )
        early = tables.conv.inner if call.overlap else 0
        if early:
            run(border=None, blocks=slice(early))
        gathered = exchange.gather()
        addresses = None if gathered is None else gathered.addresses["halo"]
        run(border=border, states=states, addresses=addresses, blocks=slice(early, None))
        if not call.final:
            return y, None, border
        final = x.new_empty(call.state_shape)
        move(tables.final, x, states_out=final, states=states, addresses=addresses)
        return y, final, border

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
        config = conv_config(call.width)
        tables = _tables_of(call, config)
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        if tables.conv.gaps:
            dx.zero_()
        count = tables.back.count if call.initial_dtype is not None else tables.back_rows
        edges = None
        if count or exchange.table is not None:
            rows = len(tables.conv.sources)
            edges = torch.empty(
                (2, rows, call.batch, call.channels), dtype=torch.float32, device=x.device
            )
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        sums = kernels.backward(
            x,
            weight,
            bias,
            border,
            grad_y,
            dx,
            tables.conv,
            config,
            silu=call.silu,
            dfinal=grad_final,
            edges=edges,
            table=exchange.table,
        )
        exchange.publish()
        d_weight, d_bias = kernels.reduce(sums, weight, bias, config)
        gathered = exchange.gather()
        d_initial = None
        if call.initial_dtype is not None:
            d_initial = torch.empty(call.state_shape, dtype=call.initial_dtype, device=x.device)
        if edges is not None:
            kernels.move_rows(
                tables.back,
                edges.flatten(0, 1).transpose(0, 1),
                config,
                width=call.width,
                out=dx,
                states_out=d_initial,
                addresses=None if gathered is None else gathered.addresses["halo"],
                count=count,
            )
        d_residual = None
        if residual_dtype is not None:
            d_residual = grad_y.to(residual_dtype)
            if tables.tokens is not None:
                d_residual = torch.where(tables.tokens, d_residual, 0)
        return ConvGrads(dx, d_weight, d_bias, d_residual, d_initial)


@dataclass(frozen=True, eq=False)
class _Tables:
    """A rank's tables on the device.

    Attributes:
        conv: of its segments.
        borrows: whether any halo row is a token of this or of another rank.
        pack: rows of the published table that peers read.
        final: all columns of the final states.
        back: rows of dx whose gradients come back, ``back_rows`` of them, then all columns of the
            initial states.
        tokens (bool, [T, 1]): whether a row is of a segment; None if all are.
    """

    conv: ConvTables
    borrows: bool
    pack: RowTable
    final: RowTable
    back: RowTable
    back_rows: int
    tokens: Tensor | None


def _tables_of(call: ConvCall, config: ConvConfig) -> _Tables:
    plan = call.context.plan
    return _tables(plan, halo(plan, call.width), call.context.rank, config, call.device)


@lru_cache(maxsize=64)
def _tables(
    plan: Plan, moves: Halo, rank: int, config: ConvConfig, device: torch.device
) -> _Tables:
    width = moves.width
    copies = moves.ranks[rank]
    segments = [
        ConvSegment(
            segment.local_start,
            segment.local_start + segment.length,
            segment.sequence if index == plan.chain(segment.sequence)[-1] else -1,
        )
        for index, segment in enumerate(plan.segments)
        if segment.rank == rank
    ]
    sources = _sources(copies, rank, len(segments) * (width - 1))
    states = plan.num_sequences * (width - 1)
    final = torch.tensor([NONE, 0], dtype=torch.int32).repeat(states, 1)
    final[copies.final_halo.target] = sources[copies.final_halo.source]
    final[copies.final_rows.target] = _pairs(OWN, copies.final_rows.source)
    columns = -1 - torch.arange(states, dtype=torch.int32)
    sent = sorted({row for source, _, row in moves.forward if source == rank})
    token_of = dict(
        zip(copies.publish.target.tolist(), copies.publish.source.tolist(), strict=True)
    )
    pack = [(row, [(OWN, token_of[row])]) for row in sent]
    rows, initial = _give_back(copies, rank, len(sources), states)
    tokens = plan.for_rank(rank).num_tokens
    conv = build_tables(segments, tokens, width, config, sources.to(device))
    return _Tables(
        conv=conv,
        borrows=bool((sources[:, 0] >= OWN).any()),
        pack=_row_table(pack, device),
        final=RowTable(columns.to(device), final[:, None].to(device)),
        back=_row_table(rows + initial, device),
        back_rows=len(rows),
        tokens=(conv.tokens[:, 1:] >= 0) if conv.gaps else None,
    )


def _sources(copies: RankHalo, rank: int, rows: int) -> Tensor:
    """Return where each row of the halos comes from, int32 ``[rows, 2]``."""
    sources = torch.tensor([NONE, 0], dtype=torch.int32).repeat(rows, 1)
    token_of = torch.zeros(rows, dtype=torch.int64)
    token_of[copies.publish.target] = copies.publish.source
    for copy in copies.receive:
        # One's own rows are read where they are.
        own = copy.peer == rank
        sources[copy.target] = (
            _pairs(OWN, token_of[copy.source]) if own else _pairs(copy.peer, copy.source)
        )
    sources[copies.initial.target] = _pairs(STATE, copies.initial.source)
    return sources


def _pairs(kind: int, rows: Tensor) -> Tensor:
    return torch.stack([torch.full_like(rows, kind), rows], 1).to(torch.int32)


#: A row to be written, and kinds and rows of what it is the sum of.
_Sum = tuple[int, list[tuple[int, int]]]


def _give_back(
    copies: RankHalo, rank: int, rows: int, states: int
) -> tuple[list[_Sum], list[_Sum]]:
    """Return the rows of dx that get gradients back, and the columns of the initial states.

    One's own rows are those of ``edges``: the last rows of segments, then their halos.
    """
    edge_of = dict(zip(copies.publish.source.tolist(), copies.publish.target.tolist(), strict=True))
    tokens: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for copy in copies.give_back:
        for target, source in zip(copy.target.tolist(), copy.source.tolist(), strict=True):
            own = copy.peer == rank
            tokens[target].append((OWN, rows + source) if own else (copy.peer, source))
    columns: dict[int, list[tuple[int, int]]] = {column: [] for column in range(states)}
    for copy in copies.give_back_initial:
        for target, source in zip(copy.target.tolist(), copy.source.tolist(), strict=True):
            columns[target].append((OWN, rows + source))
    return (
        [(token, [(OWN, edge_of[token]), *came]) for token, came in sorted(tokens.items())],
        [(-1 - column, came) for column, came in columns.items()],
    )


def _row_table(sums: list[_Sum], device: torch.device) -> RowTable:
    most = max((len(sources) for _, sources in sums), default=0) or 1
    padded = [[*sources, *[(NONE, 0)] * (most - len(sources))] for _, sources in sums]
    return RowTable(
        torch.tensor([target for target, _ in sums], dtype=torch.int32).to(device),
        torch.tensor(padded, dtype=torch.int32).reshape(-1, most, 2).to(device),
    )
