# SPDX-License-Identifier: Apache-2.0
"""Ops inside ``torch.compile``: one operator that it does not look into, and that one's backward.

What an op does between its inputs and its output (plans, transports, kernels) is no graph. While
``torch.compile`` traces, the op therefore calls ``torch.ops.cptransport.op``, and the compiled
program calls that with tensors alone: what else the op was given travels as text, the context by
its key. So every check, and the choice of engine and composition, is made when the program runs,
as without ``torch.compile``.

What the backward needs does not pass through the graph either, since only the engine knows what
that is. The operator returns a *ticket*, a number in a CPU tensor; what it stands for lives as long
as the memory of that tensor, which autograd keeps as it would keep the rest. Hooks on saved tensors
(offloading, say) therefore see the ticket and the inputs.

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

from cptransport.context import CPContext, context_of
from cptransport.errors import OpInputError

__all__ = ["Like", "Ran", "Traceable", "register", "trace"]

#: Shape and dtype of an output.
Like = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True)
class Ran:
    """What a forward gives.

    Attributes:
        output: of the op.
        final: final states, None unless asked for.
        backward: from the gradients of both (the second may be None) to those of the inputs by name.
    """

    output: Tensor
    final: Tensor | None
    backward: Callable[[Tensor, Tensor | None], Mapping[str, Tensor | None]]


@dataclass(frozen=True)
class Traceable:
    """An op as the operator runs it.

    Attributes:
        run: from context, inputs by name, and settings (as ``trace`` got them) to the result.
        like: from the same to what output and final states (None unless asked for) are like.
    """

    run: Callable[[CPContext, Mapping[str, Tensor], Mapping[str, Any]], Ran]
    like: Callable[[CPContext, Mapping[str, Tensor], Mapping[str, Any]], tuple[Like, Like | None]]


_traceable: dict[str, Traceable] = {}
_numbers = itertools.count(1)
_kept: dict[int, Ran] = {}


def register(title: str, op: Traceable) -> None:
    """Let ``trace`` know an op by its public name."""
    _traceable[title] = op


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _text(title: str, context: str, names: str, tracked: str, settings: str, *values: Any) -> str:
    named = dict(zip(settings.split(), values, strict=True))
    return json.dumps([title, context, names.split(), tracked.split(), named])


def trace(
    title: str,
    context: CPContext,
    tensors: Mapping[str, Tensor | None],
    settings: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """Put an op into the graph that is being traced.

    Args:
        title: registered.
        context: of the op.
        tensors: inputs by name.
        settings: what else the op was given; numbers, texts, None.

    Returns:
        Output and final states; without those the second has no elements.
    """
    given = {name: x for name, x in tensors.items() if x is not None}
    tracked = [n for n, x in given.items() if x.requires_grad] if torch.is_grad_enabled() else []
    text = _text(
        title,
        context.key,
        " ".join(given),
        " ".join(tracked),
        " ".join(settings),
        *settings.values(),
    )
    output, final, _ = torch.ops.cptransport.op(list(given.values()), text)
    return output, final


def _parse(
    inputs: Sequence[Tensor], text: str
) -> tuple[Traceable, str, dict[str, Tensor], Any, Any]:
    title, context, names, tracked, settings = json.loads(text)
    return _traceable[title], context, dict(zip(names, inputs, strict=True)), tracked, settings


@torch.library.custom_op(
    "cptransport::op",
    mutates_args=(),
    schema="(Tensor[] inputs, str text) -> (Tensor, Tensor, Tensor)",
)
def _op(inputs: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor, Tensor]:
    op, key, given, tracked, settings = _parse(inputs, text)
    with _above_autograd():
        # As the caller's were: what an op call is like depends on it.
        given = {n: x.detach().requires_grad_(n in tracked) for n, x in given.items()}
        with torch.set_grad_enabled(bool(tracked)):
            ran = op.run(context_of(key), given, settings)
    number = next(_numbers)
    ticket = torch.tensor(number, device="cpu")
    if tracked:
        _kept[number] = ran
        weakref.finalize(ticket.untyped_storage(), _kept.pop, number, None)
    final = ran.output.new_empty(0) if ran.final is None else ran.final
    return ran.output, final, ticket


@_op.register_fake
def _(inputs: Sequence[Tensor], text: str) -> tuple[Tensor, Tensor, Tensor]:
    op, key, given, _, settings = _parse(inputs, text)
    output, final = op.like(context_of(key), given, settings)
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
    _, _, given, _, _ = _parse(inputs, text)
    ran = _kept.get(int(ticket))
    if ran is None:
        raise OpInputError("the forward of this op kept nothing for a backward")
    with _above_autograd(), torch.no_grad():
        grads = ran.backward(output, final)
    found = ((x, grads.get(name)) for name, x in given.items())
    return [torch.zeros_like(x) if grad is None else grad for x, grad in found]


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
    op, key, given, tracked, settings = _parse(tensors, ctx.text)
    like, like_final = op.like(context_of(key), given, settings)
    if output is None:
        output = tensors[0].new_zeros(like[0], dtype=like[1])
    if like_final is None:
        final = None
    grads = torch.ops.cptransport.op_backward(number, tensors, output, final, ctx.text)
    return [
        grad if name in tracked else None for name, grad in zip(given, grads, strict=True)
    ], None


_op.register_autograd(_backward, setup_context=_save)


@contextmanager
def _above_autograd() -> Iterator[None]:
    """Let autograd work inside an operator, where it is switched off: some engines differentiate."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradFunctionality)
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set() - keys
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield
