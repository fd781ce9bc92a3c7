# SPDX-License-Identifier: Apache-2.0
"""The one orchestration of all ops: local -> publish -> merge -> finish, forward and backward.

``OpCall`` holds what a call is, apart from its tensors; ``run_forward`` and ``run_backward``
execute it; ``apply`` ties both to autograd. States have the caller's layout outside and
the engine's inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cptransport.context import CPContext
from cptransport.engines import Engine, LocalSegment, OpFacts, OutputGrads, Saved
from cptransport.exchange import Wire, begin
from cptransport.ops.once import once_differentiable
from cptransport.ops.scope import agree, op_step, reporting
from cptransport.plan import Plan

__all__ = [
    "ForwardResult",
    "OpCall",
    "SavedCall",
    "apply",
    "run_backward",
    "run_forward",
]


@dataclass(frozen=True)
class OpCall:
    """One op call without its tensors; alike on every rank but for the context's rank.

    Attributes:
        title: the op's public name.
        names: input names in the order of the tensors, without the initial state.
        build: makes the engine's inputs from those tensors and the seed.
        engine, facts, context, wire: see their types.
        overlap: let the exchange run beside local work.
        state_shape: ``[N, ...]`` of initial and final states in the caller's layout.
        swap: the caller's state layout is the transpose of the engine's.
        initial_dtype: dtype of the initial state, None without one.
        flat: inputs whose gradient goes back in a shape other than the engine's.
    """

    title: str
    names: tuple[str, ...]
    build: Callable[[Sequence[Any], Tensor | None], Any]
    engine: Engine
    facts: OpFacts
    context: CPContext
    wire: Wire
    overlap: bool
    state_shape: tuple[int, ...]
    swap: bool
    initial_dtype: torch.dtype | None
    flat: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ForwardResult:
    """What a forward gives: output, final states of all sequences (zeros where not owned), and what backward needs."""

    output: Tensor
    final_states: Tensor
    saved: Saved


@dataclass(frozen=True)
class SavedCall:
    """The ``saved`` of the explicit contracts: pass it to the backward of the same op, once."""

    call: OpCall
    saved: Saved


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which rows of a state table belong to which sequence; ``states`` index the ``[N, ...]`` tensors."""

    segments: tuple[LocalSegment, ...]
    first_rows: Tensor
    first_states: Tensor
    last_rows: Tensor
    last_states: Tensor


@lru_cache(maxsize=256)
def _rows(plan: Plan, rank: int, batch: int, device: torch.device) -> _Rows:
    local = []
    for index, segment in enumerate(plan.segments):
        if segment.rank == rank:
            chain = plan.chain(segment.sequence)
            start = segment.local_start
            local.append(
                LocalSegment(
                    start,
                    start + segment.length,
                    segment.sequence,
                    first=index == chain[0],
                    last=index == chain[-1],
                )
            )

    def table(which: str) -> tuple[Tensor, Tensor]:
        pairs = [
            (row * batch + b, segment.sequence * batch + b)
            for row, segment in enumerate(local)
            if getattr(segment, which)
            for b in range(batch)
        ]
        both = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).to(device)
        return both[:, 0].contiguous(), both[:, 1].contiguous()

    return _Rows(tuple(local), *table("first"), *table("last"))


def run_forward(
    call: OpCall, tensors: Sequence[Tensor | None], initial_state: Tensor | None
) -> ForwardResult:
    """Compute one forward. Runs inside the step and after the checks of the caller."""
    transport, plan = call.context.transport, call.context.plan
    rows = _rows(plan, transport.rank, call.facts.batch, call.wire.device)
    seed = None if initial_state is None else _to_table(call, rows, "first", initial_state)
    exchange = begin(call.wire, plan, transport, "forward")
    local = call.engine.forward_local(
        call.build(tensors, seed), rows.segments, exchange.needs, exchange.out
    )
    exchange.publish()
    if not call.overlap:
        exchange.incoming(seed)
    finished = call.engine.forward_finish(local, lambda: exchange.incoming(seed))
    final = finished.outgoing.new_zeros(_inner_shape(call))
    final.index_copy_(0, rows.last_states, finished.outgoing.index_select(0, rows.last_rows))
    return ForwardResult(finished.output, _swapped(call, final), finished.saved)


def run_backward(
    call: OpCall,
    saved: Saved,
    grad_output: Tensor,
    grad_final: Tensor | None,
    *,
    check: Callable[[], None] = lambda: None,
) -> tuple[dict[str, Tensor | None], Tensor | None]:
    """Compute one backward: gradients by input name, and of the initial states (None without one).

    ``check`` raises what is wrong with gradients that did not come from autograd.
    """
    transport, plan = call.context.transport, call.context.plan

    def prepare() -> tuple[None, str]:
        check()
        return None, f"gradient dtype {grad_output.dtype}; plan {plan.digest()}"

    with op_step(transport):
        agree(transport, f"{call.title} backward", prepare)
        rows = _rows(plan, transport.rank, call.facts.batch, call.wire.device)
        seed = None if grad_final is None else _to_table(call, rows, "last", grad_final)
        exchange = begin(call.wire, plan, transport, "backward")
        local = call.engine.backward_local(
            saved, OutputGrads(grad_output, seed), exchange.needs, exchange.out
        )
        exchange.publish()
        if not call.overlap:
            exchange.incoming(seed)
        grads = call.engine.backward_finish(local, lambda: exchange.incoming(seed))
    d_initial = None
    if call.initial_dtype is not None:
        d_initial = grads.incoming.new_zeros(_inner_shape(call))
        d_initial.index_copy_(0, rows.first_states, grads.incoming.index_select(0, rows.first_rows))
        d_initial = _swapped(call, d_initial).to(call.initial_dtype)
    inputs = dict(grads.inputs)
    for name, shape in call.flat.items():
        grad = inputs.get(name)
        inputs[name] = None if grad is None else grad.reshape(shape)
    return inputs, d_initial


def _inner_shape(call: OpCall) -> tuple[int, ...]:
    *lead, a, b = call.state_shape
    return (*lead, b, a) if call.swap else call.state_shape


def _swapped(call: OpCall, states: Tensor) -> Tensor:
    return states.transpose(-1, -2).contiguous() if call.swap else states


def _to_table(call: OpCall, rows: _Rows, which: str, states: Tensor) -> Tensor:
    """Put rows of ``[N, ...]`` states in the caller's layout into an otherwise zero ``[R, ...]`` table."""
    inner = states.transpose(-1, -2) if call.swap else states
    targets, sources = (
        (rows.first_rows, rows.first_states)
        if which == "first"
        else (rows.last_rows, rows.last_states)
    )
    table = torch.zeros(
        (len(rows.segments) * call.facts.batch, *inner.shape[1:]),
        dtype=call.facts.state_dtype,
        device=states.device,
    )
    return table.index_copy_(0, targets, inner.index_select(0, sources).to(table.dtype))


class _BoundaryFunction(torch.autograd.Function):
    """Autograd node of every op; outputs ``(output, final_states)``."""

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, initial_state: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run the forward and save what the backward needs."""
        with reporting(call.context.transport):
            result = run_forward(call, tensors, initial_state)
        ctx.call, ctx.meta = call, result.saved.meta
        ctx.output_like = (result.output.shape, result.output.dtype, result.output.device)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*result.saved.tensors)
        return result.output, result.final_states

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Run the backward; gradients that are None count as zeros."""
        call: OpCall = ctx.call
        if grad_output is None:
            shape, dtype, device = ctx.output_like
            grad_output = torch.zeros(shape, dtype=dtype, device=device)
        saved = Saved(tuple(ctx.saved_tensors), ctx.meta)
        grads, d_initial = run_backward(call, saved, grad_output, grad_final)
        return (None, d_initial, *(grads.get(name) for name in call.names))


def apply(
    call: OpCall, initial_state: Tensor | None, *tensors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Run a call under autograd and return ``(output, final_states)``; tensors in the order of ``call.names``."""
    return _BoundaryFunction.apply(call, initial_state, *tensors)  # type: ignore[no-untyped-call, no-any-return]
