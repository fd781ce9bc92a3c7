# SPDX-License-Identifier: Apache-2.0
"""The engine protocol on top of one differentiable recurrence.

An op says how a *block* (a few chunks of one segment) maps inputs and the state that enters to
outputs and the state that leaves, in two differentiable steps: ``prepare`` (all that no state
enters) and ``run``. This module does the rest:

* A segment is walked block by block, so that what a backward needs at once does not grow with the
  segment's length.
* The forward keeps the state that enters every block; the backward walks the blocks from the end,
  computes each again with a graph and asks autograd for its gradients.
* A segment that waits for nobody (in forward the first of its chain, in backward the last) is
  computed whole in the local half if its summary is needed, else in the other half before the
  exchange's result is asked for. For the others the forward has prepared all blocks by then.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from cptransport.engines import (
    Finished,
    Grads,
    LocalSegment,
    Need,
    OpFacts,
    OutputGrads,
    Saved,
    StateTable,
)
from cptransport.precision import ieee_math
from cptransport.transport import PartSpec

__all__ = ["Block", "SegmentEngine"]

PreparedT = TypeVar("PreparedT")
Shape = tuple[int, ...]
#: Per segment the row ranges of its blocks.
Spans = tuple[tuple[tuple[int, int], ...], ...]

_FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Block:
    """Inputs of one block, or of all local rows.

    Attributes:
        tokens: per-token inputs, ``[B, L, ...]``, in their own dtypes; absent ones are None.
        parameters: the op's other inputs, in the state dtype; absent ones are None.
        options: the op's options.
        dtype: the state dtype, in which everything is computed.
    """

    tokens: Mapping[str, Tensor | None]
    parameters: Mapping[str, Tensor | None]
    options: Any
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Number of tokens."""
        return next(iter(self.present().values())).shape[1]

    def token(self, name: str) -> Tensor:
        """Return a per-token input that is always there, in the state dtype."""
        x = self.tokens[name]
        assert x is not None
        return x.to(self.dtype)

    def rows(self, start: int, stop: int) -> Block:
        """Return the block of rows ``start`` to ``stop``; its tensors are views."""
        tokens = {name: None if x is None else x[:, start:stop] for name, x in self.tokens.items()}
        return Block(tokens, self.parameters, self.options, self.dtype)

    def leaves(self) -> Block:
        """Return the same block made of leaves of a new graph."""
        tokens = {name: _leaf(x) for name, x in self.tokens.items()}
        parameters = {name: _leaf(x) for name, x in self.parameters.items()}
        return Block(tokens, parameters, self.options, self.dtype)

    def present(self) -> dict[str, Tensor]:
        """Return the inputs that are there, by name."""
        everything = {**self.tokens, **self.parameters}
        return {name: x for name, x in everything.items() if x is not None}


@dataclass(frozen=True)
class _Meta:
    """What a forward leaves for its backward beside tensors.

    Attributes:
        segments: the rank's segments.
        spans: the row ranges of their blocks.
        kept: the segments whose transitions are saved, in that order.
        dtypes: of the inputs that are there.
        options: the op's options.
    """

    segments: tuple[LocalSegment, ...]
    spans: Spans
    kept: tuple[int, ...]
    dtypes: Mapping[str, torch.dtype]
    options: Any


@dataclass
class _Forward(Generic[PreparedT]):
    """Between the two halves of a forward.

    Attributes:
        starts: per segment the states that entered its blocks so far.
        pending: the prepared blocks of segments that still have to run.
    """

    inputs: Any
    whole: Block
    segments: tuple[LocalSegment, ...]
    spans: Spans
    seed: Tensor
    output: Tensor
    outgoing: Tensor
    starts: list[list[Tensor]]
    pending: dict[int, Iterable[PreparedT]] = field(default_factory=dict)
    transitions: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class _Backward:
    """Between the two halves of a backward.

    Attributes:
        starts: per segment the states that entered its blocks.
        grads: gradients of the inputs that are there; parameters' in the state dtype.
        pending: the segments whose gradients are still to be computed.
    """

    whole: Block
    meta: _Meta
    starts: list[tuple[Tensor, ...]]
    grad_output: Tensor
    seed: Tensor
    incoming: Tensor
    grads: dict[str, Tensor]
    pending: list[int] = field(default_factory=list)


class SegmentEngine(ABC, Generic[PreparedT]):
    """An engine made of one op's differentiable blocks.

    Subclasses set the class attributes and implement the abstract methods. Tensors they see are in
    the state dtype, except ``Block.tokens``; states are ``[B, ...]``.

    Attributes:
        op: as in ``cptransport.engines.Engine``.
        name: likewise.
        token_names: the per-token inputs; the first one gives the output's shape and dtype.
        parameter_names: the other inputs.
    """

    op: str
    name: str = "torch"
    token_names: ClassVar[tuple[str, ...]]
    parameter_names: ClassVar[tuple[str, ...]]

    @abstractmethod
    def slot_shapes(self, facts: OpFacts) -> tuple[Shape, Shape]:
        """Return the shapes of one state and of one transition, without the batch axis."""

    @abstractmethod
    def state_shape(self, inputs: Any) -> Shape:
        """Return the shape of one state, without the batch axis."""

    @abstractmethod
    def block_tokens(self, inputs: Any) -> int:
        """Return how many tokens to compute at once, a multiple of the chunk.

        A function of shapes and options only, so that runs repeat bit by bit.
        """

    @abstractmethod
    def prepare(self, block: Block) -> PreparedT:
        """Compute what no state enters, differentiably. The block has at least one token."""

    @abstractmethod
    def run(self, prepared: PreparedT, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output ``[B, L, ...]`` and the state that leaves, differentiably."""

    @abstractmethod
    def advance(self, prepared: PreparedT, state: Tensor) -> Tensor:
        """Return the state that leaves, without the output."""

    @abstractmethod
    def transition(self, prepared: Iterable[PreparedT], state: Tensor) -> Tensor:
        """Return the transition ``[B, ...]`` over blocks; without any, the identity.

        Args:
            prepared: the blocks.
            state: ``[B, ...]``; only its shape, dtype and device matter.
        """

    def eligible(self, facts: OpFacts) -> str | None:
        """Return why these facts cannot be served, or None."""
        if facts.op != self.op:
            return f"it computes {self.op!r}, not {facts.op!r}"
        others = [f"{name} is {kind}" for name, kind in facts.dtypes.items() if kind not in _FLOATS]
        return f"it takes floating point of 16 to 64 bits: {', '.join(others)}" if others else None

    def slot_parts(self, facts: OpFacts) -> tuple[PartSpec, ...]:
        """Return the parts of the summaries, ``[max_segments * B, ...]``."""
        rows = facts.max_segments * facts.batch
        state, transition = self.slot_shapes(facts)
        return (
            PartSpec("state", (rows, *state), facts.state_dtype),
            PartSpec("transition", (rows, *transition), facts.state_dtype),
        )

    def forward_local(
        self,
        inputs: Any,
        segments: Sequence[LocalSegment],
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> _Forward[PreparedT]:
        """Write the summaries that are needed; run first segments whose final state is needed."""
        with _computing(getattr(inputs, self.token_names[0])):
            local = self._open(inputs, segments)
            for index, (segment, needs) in enumerate(zip(local.segments, need, strict=True)):
                rows = _rows(index, local.output)
                state = local.seed[rows]
                prepared: Iterable[PreparedT] = self._prepared(local, index)
                if needs.transition or not segment.first:
                    prepared = list(prepared)
                if needs.transition:
                    local.transitions[index] = self.transition(prepared, state)
                    out["transition"][rows] = local.transitions[index]
                if needs.state and segment.first:
                    out["state"][rows] = self._run_segment(local, index, prepared, state)
                    continue
                local.pending[index] = prepared
                if needs.state:
                    for block in prepared:
                        state = self.advance(block, state)
                    out["state"][rows] = state
            return local

    def forward_finish(self, local: _Forward[PreparedT], incoming: StateTable) -> Finished:
        """Run the segments that have not run yet. ``incoming`` is called exactly once."""
        self._run_pending(local, local.seed, first=True)
        self._run_pending(local, incoming(), first=False)
        saved = (
            *(getattr(local.inputs, name) for name in self.token_names + self.parameter_names),
            _stack([state for states in local.starts for state in states], local.seed),
            _stack(local.transitions.values(), local.seed),
        )
        dtypes = {name: getattr(local.inputs, name).dtype for name in local.whole.present()}
        kept = tuple(local.transitions)
        meta = _Meta(local.segments, local.spans, kept, dtypes, local.whole.options)
        return Finished(local.output, local.outgoing, Saved(saved, meta))

    def backward_local(
        self,
        saved: Saved,
        grad_out: OutputGrads,
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> _Backward:
        """Write the summaries that are needed; finish last segments whose summary is needed."""
        with _computing(grad_out.output):
            backward, transitions = self._reopen(saved, grad_out)
            segments = backward.meta.segments
            for index, (segment, needs) in enumerate(zip(segments, need, strict=True)):
                rows = _rows(index, grad_out.output)
                grad = backward.seed[rows]
                if needs.transition:
                    out["transition"][rows] = transitions[index]
                if needs.state and segment.last:
                    out["state"][rows] = self._pull_back(backward, index, grad)
                    continue
                backward.pending.append(index)
                if needs.state:
                    out["state"][rows] = self._pull_back(backward, index, grad, inputs=False)
            return backward

    def backward_finish(self, local_grad: _Backward, grad_outgoing: StateTable) -> Grads:
        """Compute the remaining gradients. ``grad_outgoing`` is called exactly once."""
        self._pull_back_pending(local_grad, local_grad.seed, last=True)
        self._pull_back_pending(local_grad, grad_outgoing(), last=False)
        inputs: dict[str, Tensor | None] = dict.fromkeys(self.token_names + self.parameter_names)
        for name, dtype in local_grad.meta.dtypes.items():
            inputs[name] = local_grad.grads[name].to(dtype)
        return Grads(inputs, local_grad.incoming)

    def _open(self, inputs: Any, segments: Sequence[LocalSegment]) -> _Forward[PreparedT]:
        shaped: Tensor = getattr(inputs, self.token_names[0])
        dtype = torch.float64 if shaped.dtype == torch.float64 else torch.float32
        seed = inputs.seed
        if seed is None:
            rows = len(segments) * shaped.shape[0]
            seed = shaped.new_zeros(rows, *self.state_shape(inputs), dtype=dtype)
        step = self.block_tokens(inputs)
        named = {name: getattr(inputs, name) for name in self.token_names + self.parameter_names}
        return _Forward(
            inputs=inputs,
            whole=self._whole(named, inputs.options, dtype),
            segments=tuple(segments),
            spans=tuple(
                tuple((start, min(start + step, s.stop)) for start in range(s.start, s.stop, step))
                for s in segments
            ),
            seed=seed,
            output=torch.zeros_like(shaped, memory_format=torch.contiguous_format),
            outgoing=torch.empty_like(seed),
            starts=[[] for _ in segments],
        )

    def _reopen(
        self, saved: Saved, grad_out: OutputGrads
    ) -> tuple[_Backward, Mapping[int, Tensor]]:
        meta: _Meta = saved.meta
        *values, starts, transitions = saved.tensors
        assert starts is not None
        assert transitions is not None
        named = dict(zip(self.token_names + self.parameter_names, values, strict=True))
        whole = self._whole(named, meta.options, starts.dtype)
        seed = grad_out.seed
        if seed is None:
            rows = len(meta.segments) * grad_out.output.shape[0]
            seed = starts.new_zeros(rows, *starts.shape[2:])
        states = iter(starts.unbind())
        backward = _Backward(
            whole=whole,
            meta=meta,
            starts=[tuple(islice(states, len(blocks))) for blocks in meta.spans],
            grad_output=grad_out.output,
            seed=seed,
            incoming=torch.empty_like(seed),
            grads={
                name: torch.zeros_like(x, memory_format=torch.contiguous_format)
                for name, x in whole.present().items()
            },
        )
        return backward, dict(zip(meta.kept, transitions.unbind(), strict=True))

    def _whole(self, named: Mapping[str, Tensor | None], options: Any, dtype: torch.dtype) -> Block:
        parameters = {name: named[name] for name in self.parameter_names}
        return Block(
            {name: named[name] for name in self.token_names},
            {name: None if x is None else x.to(dtype) for name, x in parameters.items()},
            options,
            dtype,
        )

    def _prepared(self, local: _Forward[PreparedT], index: int) -> Iterator[PreparedT]:
        return (self.prepare(local.whole.rows(*span)) for span in local.spans[index])

    def _run_pending(self, local: _Forward[PreparedT], states: Tensor, *, first: bool) -> None:
        with _computing(local.output):
            for index in [i for i in local.pending if local.segments[i].first is first]:
                prepared = local.pending.pop(index)
                self._run_segment(local, index, prepared, states[_rows(index, local.output)])

    def _run_segment(
        self, local: _Forward[PreparedT], index: int, prepared: Iterable[PreparedT], state: Tensor
    ) -> Tensor:
        """Compute a segment's outputs from the state that enters; return the one that leaves."""
        for (start, stop), block in zip(local.spans[index], prepared, strict=True):
            local.starts[index].append(state)
            local.output[:, start:stop], state = self.run(block, state)
        local.outgoing[_rows(index, local.output)] = state
        return state

    def _pull_back_pending(self, backward: _Backward, grads: Tensor, *, last: bool) -> None:
        with _computing(backward.grad_output):
            for index in backward.pending:
                if backward.meta.segments[index].last is last:
                    rows = _rows(index, backward.grad_output)
                    self._pull_back(backward, index, grads[rows])

    def _pull_back(
        self, backward: _Backward, index: int, grad: Tensor, *, inputs: bool = True
    ) -> Tensor:
        """Pull the gradient of the state that leaves a segment back to the one that enters.

        Args:
            backward: takes the gradients of inputs.
            index: the segment.
            grad: gradient of the state that leaves, ``[B, ...]``.
            inputs: compute the gradients of inputs too.

        Returns:
            The gradient of the state that enters.
        """
        spans, starts = backward.meta.spans[index], backward.starts[index]
        for (start, stop), entering in zip(reversed(spans), reversed(starts), strict=True):
            block = backward.whole.rows(start, stop)
            leaves = {}
            if inputs:
                block = block.leaves()
                leaves = block.present()
            state = entering.detach().requires_grad_()
            with torch.enable_grad():
                ends = self.run(self.prepare(block), state)
            grad_output = backward.grad_output[:, start:stop].to(grad.dtype)
            grad, *grads = torch.autograd.grad(
                ends, (state, *leaves.values()), (grad_output, grad), materialize_grads=True
            )
            for name, value in zip(leaves, grads, strict=True):
                if name in block.tokens:
                    backward.grads[name][:, start:stop] = value
                else:
                    backward.grads[name] += value
        if inputs:
            backward.incoming[_rows(index, backward.grad_output)] = grad
        return grad


@contextmanager
def _computing(x: Tensor) -> Iterator[None]:
    with torch.no_grad(), ieee_math(x.device.type):
        yield


def _rows(segment: int, output: Tensor) -> slice:
    """Rows of a segment in a table of states."""
    return slice(segment * output.shape[0], (segment + 1) * output.shape[0])


def _stack(states: Collection[Tensor], table: Tensor) -> Tensor:
    """Copy states into one tensor, so that every rank saves equally many."""
    return torch.stack(tuple(states)) if states else table.new_empty(0, *table.shape)


def _leaf(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach().requires_grad_()
