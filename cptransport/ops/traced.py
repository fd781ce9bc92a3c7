# SPDX-License-Identifier: Apache-2.0
"""Ops inside ``torch.compile``: one operator that it does not look into, and that one's backward.

What an op does between its inputs and its output (plans, transports, kernels) is no graph. While
``torch.compile`` traces, an op therefore calls ``torch.ops.cptransport.op``, and the compiled
program calls that with tensors alone: what else the op was given travels as text, the context by
its key. The operator calls the op as it is without ``torch.compile``, so every check, and the
choice of engine and composition, is made when the program runs.

What the backward needs does not pass through the graph either, since only the engine knows what
that is. The operator returns a *ticket*, a number in a CPU tensor; what it stands for lives as long
as the memory of that tensor, which autograd keeps as it would keep the rest. Hooks on saved tensors
(offloading, say) therefore see the ticket and the inputs, and must not copy the ticket.

Collective: the graphs of all ranks must hold the same ops in the same order. An output that nothing
uses is cut from a graph with its op, on that rank alone; ``join_backward`` uses it.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from cptransport.context import CPContext, context_of
from cptransport.errors import OpInputError
from cptransport.ops.once import refuse

__all__ = ["Like", "register", "trace"]

#: Shape and dtype of an output.
Like = tuple[Sequence[int], torch.dtype]
#: From context, inputs by name and settings to what output and final states are like; None for
#: these unless asked for.
Likes = Callable[[CPContext, Mapping[str, Tensor], Mapping[str, Any]], tuple[Like, Like | None]]


@dataclass(frozen=True)
class _Op:
    """A public op, and what its results are like."""

    call: Callable[..., Any]
    likes: Likes


@dataclass(frozen=True)
class _Kept:
    """What a backward needs: where gradients enter, and the inputs that get some."""

    edges: tuple[GradientEdge, ...]
    leaves: dict[str, Tensor]


_ops: dict[str, _Op] = {}
_numbers = itertools.count(1)
_kept: dict[int, _Kept] = {}


def register(call: Callable[..., Any], likes: Likes) -> None:
    """Let ``trace`` know a public op, by its name.

    Args:
        call: takes its tensors, ``cp_context`` and settings by name; returns an output, or output
            and final states.
        likes: for inputs that fit together.
    """
    _ops[call.__name__] = _Op(call, likes)


def trace(
    title: str,
    context: CPContext,
    tensors: Mapping[str, Tensor | None],
    settings: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Put an op into the graph that is being traced.

    Args:
        title: name of a registered op.
        context: of the op.
        tensors: inputs by name.
        settings: what else the op was given, by name: numbers, texts, None.

    Returns:
        Output and final states; without those the second has no elements.
    """
    from cptransport.ops.traced_text import fixed, text_of

    given = {name: x for name, x in tensors.items() if x is not None}
    tracked = [n for n, x in given.items() if x.requires_grad] if torch.is_grad_enabled() else []
    absent = [name for name, x in tensors.items() if x is None]
    names = tuple(" ".join(some) for some in (given, absent, tracked, settings))
    text = text_of(title, context.key, *names, *map(fixed, settings.values()))
    output, final, _ = torch.ops.cptransport.op(list(given.values()), text)
    return output, final


@dataclass(frozen=True)
class _Call:
    """What the operator was given."""

    op: _Op
    context: CPContext
    given: dict[str, Tensor]
    absent: list[str]
    tracked: list[str]
    settings: dict[str, Any]

    @staticmethod
    def of(inputs: Sequence[Tensor], text: str) -> _Call:
        title, key, names, absent, tracked, settings = json.loads(text)
        given = dict(zip(names, inputs, strict=True))
        return _Call(_ops[title], context_of(key), given, absent, tracked, settings)

    @property
    def likes(self) -> tuple[Like, Like | None]:
        return self.op.likes(self.context, self.given, self.settings)


def _edge(result: Tensor) -> GradientEdge:
    """Where the gradient of a result enters; as long as that is kept, so is the graph behind it.

    The node of a Python function owns nothing (before torch 2.13 it ends with the function's last
    output), hence the view's: that owns the graph and keeps a shape, but no memory.
    """
    return get_gradient_edge(result.view_as(result))


@torch.library.custom_op(
    "cptransport::op",
    mutates_args=(),
    schema="(Tensor[] inputs, str text) -> (Tensor, Tensor, Tensor)",
)
def _op(inputs: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor, Tensor]:
    call = _Call.of(inputs, text)
    leaves = {n: x.detach().requires_grad_(n in call.tracked) for n, x in call.given.items()}
    with _with_autograd(), torch.set_grad_enabled(bool(call.tracked)):
        absent = dict.fromkeys(call.absent)
        found = call.op.call(**leaves, **absent, cp_context=call.context, **call.settings)
        output, final = found if isinstance(found, tuple) else (found, None)
        results = [output] if final is None else [output, final]
        edges = tuple(map(_edge, results)) if call.tracked else ()
    number = next(_numbers)
    ticket = torch.tensor(number, device="cpu")
    if call.tracked:
        _kept[number] = _Kept(edges, {name: leaves[name] for name in call.tracked})
        weakref.finalize(ticket.untyped_storage(), _kept.pop, number, None)
    final = output.new_empty(0) if final is None else final
    return output.detach().contiguous(), final.detach().contiguous(), ticket


@_op.register_fake
def _(inputs: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor, Tensor]:
    output, final = _Call.of(inputs, text).likes
    (shape, dtype), (final_shape, final_dtype) = output, final or ((0,), output[1])
    like = inputs[0]
    return (
        like.new_empty(shape, dtype=dtype),
        like.new_empty(final_shape, dtype=final_dtype),
        torch.empty((), dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op(
    "cptransport::op_backward",
    mutates_args=(),
    schema="(Tensor ticket, Tensor[] inputs, Tensor output, Tensor? final, str text) -> Tensor[]",
)
def _op_backward(
    ticket: Tensor, inputs: Sequence[Tensor], output: Tensor, final: Tensor | None, text: str
) -> list[Tensor]:
    call, kept = _Call.of(inputs, text), _kept.get(int(ticket))
    if kept is None:
        raise OpInputError(
            "the forward of this op kept nothing for a backward; hooks on saved tensors that copy "
            "CPU tensors are not served with compiled ops"
        )
    with _with_autograd():
        grads = torch.autograd.grad(
            kept.edges,
            list(kept.leaves.values()),
            [output, final][: len(kept.edges)],
            retain_graph=True,  # whoever holds the ticket may come again
            allow_unused=True,
        )
    found = dict(zip(kept.leaves, grads, strict=True))
    made = ((x, found.get(name)) for name, x in call.given.items())
    return [torch.zeros_like(x) if grad is None else grad.contiguous() for x, grad in made]


@_op_backward.register_fake
def _(
    ticket: Tensor, inputs: Sequence[Tensor], output: Tensor, final: Tensor | None, text: str
) -> list[Tensor]:
    return [torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.text = inputs
    ctx.save_for_backward(output[2], *tensors)


def _backward(
    ctx: Any, output: Tensor | None, final: Tensor | None, ticket: None
) -> tuple[list[Tensor | None], None]:
    number, *tensors = ctx.saved_tensors
    call = _Call.of(tensors, ctx.text)
    like, like_final = call.likes
    if output is None:
        output = tensors[0].new_zeros(like[0], dtype=like[1])
    if like_final is None:
        final = None
    elif final is None:
        final = tensors[0].new_zeros(like_final[0], dtype=like_final[1])
    grads = torch.ops.cptransport.op_backward(number, tensors, output, final, ctx.text)
    names = zip(call.given, grads, strict=True)
    return [grad if name in call.tracked else None for name, grad in names], None


_op.register_autograd(_backward, setup_context=_save)
_op_backward.register_autograd(refuse)


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Let autograd work inside an operator, where torch switches it off."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - keys
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield
