# SPDX-License-Identifier: Apache-2.0
"""The one orchestration of all ops: local -> publish -> merge -> finish, forward and backward.

``OpCall`` holds what a call is, apart from its tensors; ``run_forward`` and ``run_backward``
execute it; ``apply`` ties both to autograd. States have the caller's layout outside and
the engine's inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from cptransport.context import CPContext
from cptransport.engines import Engine, LocalSegment, OpFacts, OutputGrads, Saved
from cptransport.exchange import Course, Exchange, Summaries, Wire, course, start
from cptransport.ops.once import history_of, once_differentiable
from cptransport.ops.scope import RunRecord, agree, op_step, reporting
from cptransport.plan import Plan

__all__ = [
    "ForwardResult",
    "OpCall",
    "SavedCall",
    "apply",
    "checked",
    "compute",
    "run_backward",
    "run_forward",
]


@dataclass(frozen=True, eq=False)
class OpCall:
    """One op call without its tensors; alike on every rank but for the context's rank.

    Calls of one signature share it, so what is worked out here is worked out once.

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
        record: what the call runs on.
        final: whether the final states are wanted.
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
    record: RunRecord
    final: bool = True

    @cached_property
    def rows(self) -> _Rows:
        """Which rows of a state table belong to which sequence."""
        context = self.context
        return _rows(context.plan, context.rank, self.facts.batch, self.wire.device)

    @cached_property
    def forward(self) -> Course:
        """The exchange of the forward."""
        return course(self.wire, self.context.plan, "forward", self.context.rank)

    @cached_property
    def backward(self) -> Course:
        """The exchange of the backward."""
        return course(self.wire, self.context.plan, "backward", self.context.rank)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """``[N, ...]`` of initial and final states in the engine's layout."""
        *lead, a, b = self.state_shape
        return (*lead, b, a) if self.swap else self.state_shape


@dataclass(frozen=True)
class ForwardResult:
    """What a forward gives.

    Attributes:
        output: of this rank's tokens.
        final_states: of all sequences, zeros where not owned; None unless wanted.
        saved: what the backward needs.
    """

    output: Tensor
    final_states: Tensor | None
    saved: Saved


@dataclass(frozen=True)
class SavedCall:
    """The ``saved`` of the explicit contracts: pass it to the backward of the same op, once.

    ``thd``: the tokens came without the batch axis.
    """

    call: OpCall
    saved: Saved
    thd: bool = False


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which rows of a state table belong to which sequence; ``states`` index the ``[N, ...]`` tensors."""

    segments: tuple[LocalSegment, ...]
    first_rows: Tensor
    first_states: Tensor
    last_rows: Tensor
    last_states: Tensor

    def of(self, which: str) -> tuple[Tensor, Tensor]:
        """Return the rows and the states of the sequences that are ``"first"``, ``"last"`` here."""
        if which == "first":
            return self.first_rows, self.first_states
        return self.last_rows, self.last_states


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


class _Entering:
    """The ``StateTable`` of a pass; ``summaries()`` is what came before any fold, where there is such."""

    __slots__ = ("_exchange", "_seed")

    def __init__(self, exchange: Exchange, seed: Tensor | None) -> None:
        self._exchange, self._seed = exchange, seed

    def __call__(self) -> Tensor:
        return self._exchange.incoming(self._seed)

    def summaries(self) -> Summaries | None:
        return self._exchange.summaries()


#: Checks a rank's inputs; see ``agree``.
Prepare = Callable[[], tuple[OpCall, str]]


def checked(context: CPContext, title: str, prepare: Prepare) -> OpCall:
    """Open the step of a forward and check its inputs."""
    with op_step(context.transport):
        return agree(context.transport, title, prepare)


def compute(
    context: CPContext,
    title: str,
    prepare: Prepare,
    tensors: Sequence[Tensor | None],
    initial_state: Tensor | None,
) -> tuple[OpCall, ForwardResult]:
    """Check inputs and compute a forward, in one step and without autograd."""
    call = checked(context, title, prepare)
    with torch.no_grad(), reporting(context.transport):
        return call, run_forward(call, tensors, initial_state)


def run_forward(
    call: OpCall, tensors: Sequence[Tensor | None], initial_state: Tensor | None
) -> ForwardResult:
    """Compute one forward. Runs inside the step and after the checks of the caller."""
    rows = call.rows
    seed = None if initial_state is None else _to_table(call, rows, "first", initial_state)
    exchange = start(call.forward, call.context.transport)
    local = call.engine.forward_local(
        call.build(tensors, seed), rows.segments, exchange.needs, exchange.out
    )
    exchange.publish()
    if not call.overlap:
        exchange.complete(seed)
    finished = call.engine.forward_finish(local, _Entering(exchange, seed))
    exchange.complete(seed)
    final = _from_table(call, rows, "last", finished.outgoing) if call.final else None
    return ForwardResult(finished.output, final, finished.saved)


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
    transport, rows = call.context.transport, call.rows

    def prepare() -> tuple[None, str]:
        check()
        return None, f"gradient dtype {grad_output.dtype}; plan {call.context.plan.digest()}"

    with op_step(transport):
        agree(transport, f"{call.title} backward", prepare)
        seed = None if grad_final is None else _to_table(call, rows, "last", grad_final)
        exchange = start(call.backward, transport)
        local = call.engine.backward_local(
            saved, OutputGrads(grad_output, seed), exchange.needs, exchange.out
        )
        exchange.publish()
        if not call.overlap:
            exchange.complete(seed)
        grads = call.engine.backward_finish(local, _Entering(exchange, seed))
        exchange.complete(seed)
    d_initial = None
    if call.initial_dtype is not None:
        d_initial = _from_table(call, rows, "first", grads.incoming).to(call.initial_dtype)
    inputs = dict(grads.inputs)
    for name, shape in call.flat.items():
        grad = inputs.get(name)
        inputs[name] = None if grad is None else grad.reshape(shape)
    return inputs, d_initial


def _to_table(call: OpCall, rows: _Rows, which: str, states: Tensor) -> Tensor:
    """Put rows of ``[N, ...]`` states in the caller's layout into an otherwise zero ``[R, ...]`` table."""
    inner = states.transpose(-1, -2) if call.swap else states
    targets, sources = rows.of(which)
    size = len(rows.segments) * call.facts.batch
    return _scatter(inner, sources, targets, size, call.facts.state_dtype)


def _from_table(call: OpCall, rows: _Rows, which: str, table: Tensor | None) -> Tensor:
    """Take ``[N, ...]`` states in the caller's layout from a table; zeros for those that are not in it."""
    sources, targets = rows.of(which)
    inner = call.inner_shape
    if table is None:
        states = torch.zeros(inner, dtype=call.facts.state_dtype, device=call.wire.device)
    else:
        states = _scatter(table, sources, targets, inner[0], table.dtype)
    return states.transpose(-1, -2).contiguous() if call.swap else states


def _scatter(
    table: Tensor, sources: Tensor, targets: Tensor, size: int, dtype: torch.dtype
) -> Tensor:
    """Move rows to a table of ``size`` rows, zeros in the others; targets ascend."""
    picked = table.index_select(0, sources).to(dtype)
    if len(targets) == size:
        return picked
    moved = torch.zeros((size, *table.shape[1:]), dtype=dtype, device=table.device)
    return moved.index_copy_(0, targets, picked)


class _BoundaryFunction(torch.autograd.Function):
    """Autograd node of every op; outputs ``(output, final_states, history)``."""

    @staticmethod
    def forward(
        ctx: Any, call: OpCall, initial_state: Tensor | None, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Run the forward and save what the backward needs."""
        with reporting(call.context.transport):
            result = run_forward(call, tensors, initial_state)
        output = result.output
        if output._is_view():  # autograd lets nobody change a view that a function returns
            output = output.clone()
        ctx.call, ctx.meta = call, result.saved.meta
        ctx.output_like = (output.shape, output.dtype, output.device)
        ctx.set_materialize_grads(False)
        history = history_of(output)
        ctx.save_for_backward(history, *result.saved.tensors)
        return output, result.final_states, history

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_output: Tensor | None, grad_final: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        """Run the backward; gradients that are None count as zeros."""
        call: OpCall = ctx.call
        if grad_output is None:
            shape, dtype, device = ctx.output_like
            grad_output = torch.zeros(shape, dtype=dtype, device=device)
        saved = Saved(tuple(ctx.saved_tensors[1:]), ctx.meta)
        grads, d_initial = run_backward(call, saved, grad_output, grad_final)
        return (None, d_initial, *(grads.get(name) for name in call.names))


def apply(
    call: OpCall, initial_state: Tensor | None, *tensors: Tensor | None
) -> tuple[Tensor, Any]:
    """Run a call under autograd and return ``(output, final_states)``, these None unless wanted.

    Tensors stand in the order of ``call.names``.
    """
    output, final, _ = _BoundaryFunction.apply(call, initial_state, *tensors)  # type: ignore[no-untyped-call]
    return output, final
