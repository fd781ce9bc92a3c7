# SPDX-License-Identifier: Apache-2.0
"""Activations from one layout to another, under autograd: ``convert_layout``, and what it stands on.

An ``Exchange`` moves several tensors in one autograd node, so that its backward moves all their
gradients whichever of its results a rank's loss has used. Moves are linear: the backward is an
exchange of the reversed moves.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cptransport.activations import METHODS, Carrier, Move, carry
from cptransport.context import CPContext, carrier_of
from cptransport.errors import OpInputError, PlanError
from cptransport.ops.scope import agree, op_step, reporting
from cptransport.plan import Plan
from cptransport.relayout import check_same_stream, relayout

__all__ = ["Exchange", "convert_layout", "exchange", "send_back"]


@dataclass(frozen=True)
class Exchange:
    """One redistribution of tensors over the ranks of a carrier.

    Attributes:
        title: what it is part of, for errors.
        carrier: who carries.
        moves: one per tensor.
        method: ``"p2p"`` or ``"a2a"``.
        text: what must be the same on every rank.
    """

    title: str
    carrier: Carrier
    moves: tuple[Move, ...]
    method: str
    text: str = ""

    @property
    def reverse(self) -> Exchange:
        """The exchange of gradients."""
        moves = tuple(move.reverse for move in self.moves)
        return replace(self, title=f"{self.title} backward", moves=moves)


def convert_layout(
    x: Tensor,
    plan_from: Plan,
    plan_to: Plan,
    cp_or_group: CPContext | Any,
    *,
    method: str = "p2p",
    dim: int = 1,
) -> Tensor:
    """Move activations from one plan to another plan of the same stream, differentiably.

    Args:
        x: any dtype; this rank's rows under ``plan_from`` in dimension ``dim``, none included.
        plan_from, plan_to: of the same offsets, padding and world size.
        cp_or_group: a ``CPContext`` or a ``torch.distributed`` group of the plans' ranks. None: as
            in ``create_transport``.
        method: ``"p2p"``, messages between the pairs of ranks that exchange rows, or ``"a2a"``, one
            collective. The result is the same bit for bit.
        dim: the dimension of the stream.

    Returns:
        This rank's rows under ``plan_to``; ``x`` itself where the plans give every rank the same
        rows. Padding rows move like all others.

    Raises:
        OpInputError (a ValueError): not this rank's rows, an unknown method, no context or group.
        PlanError: the plans are not of one stream, or not for as many ranks as there are.
        CapabilityError: nothing can carry tensors of that device.
        PeerFailedError, TransportTimeoutError: another rank failed or did not come.

    Collective: yes, forward and backward; not where the plans give every rank the same rows. A rank
        receives ``relayout.received_rows(plan_from, plan_to)`` rows. Nothing goes through slots.
    Stream: ordered on the current stream; blocks the host where the group does not carry that device.
    """
    carrier = carrier_of(cp_or_group)
    with op_step(carrier):
        call = agree(
            carrier,
            "convert_layout",
            lambda: _prepare(x, plan_from, plan_to, carrier, method, dim),
        )
    if plan_from.runs == plan_to.runs:
        return x
    return _apply(call, x)[0]


def _prepare(
    x: Tensor, plan_from: Plan, plan_to: Plan, carrier: Carrier, method: str, dim: int
) -> tuple[Exchange, str]:
    if method not in METHODS:
        near = difflib.get_close_matches(str(method), METHODS, 1, 0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise OpInputError(f"method {method!r} is not valid; choose one of p2p, a2a{hint}")
    for name, plan in (("plan_from", plan_from), ("plan_to", plan_to)):
        if not isinstance(plan, Plan):
            raise OpInputError(f"{name} must be a Plan, got {type(plan).__name__}")
    check_same_stream(plan_from, plan_to)
    if plan_from.world_size != carrier.world_size:
        raise PlanError(
            f"the plans are for {plan_from.world_size} ranks, there are {carrier.world_size}"
        )
    if not isinstance(x, Tensor):
        raise OpInputError(f"x must be a tensor, got {type(x).__name__}")
    rows = plan_from.for_rank(carrier.rank).num_tokens
    if isinstance(dim, bool) or not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise OpInputError(f"x of shape {list(x.shape)} has no dimension {dim!r}")
    dim %= x.dim()
    if x.size(dim) != rows:
        raise OpInputError(
            f"x: rank {carrier.rank} has {x.size(dim)} rows in dimension {dim}, plan_from says {rows}"
        )
    rest = [size for i, size in enumerate(x.shape) if i != dim]
    text = (
        f"plan_from {plan_from.digest()}; plan_to {plan_to.digest()}; method {method}; dim {dim}; "
        f"rest {rest}; dtype {x.dtype}; requires_grad {x.requires_grad and torch.is_grad_enabled()}"
    )
    move = relayout(plan_from, plan_to, carrier.rank).along(dim)
    return Exchange("convert_layout", carrier, (move,), method, text), text


def exchange(call: Exchange, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Redistribute tensors, each by its move.

    Raises:
        PeerFailedError, TransportTimeoutError: another rank failed or did not come.

    Collective: yes, forward and backward, over the carrier's ranks.
    """
    _open(call, tensors)
    return _apply(call, *tensors)


def send_back(call: Exchange, x: Tensor, taken: slice) -> Tensor:
    """Return ``x[:, taken]``, and redistribute its gradient to that of x by the exchange.

    What is replicated needs nothing in the forward; this is for its gradient.

    Collective: in the backward only.
    """
    return _SendBack.apply(call, x, taken)  # type: ignore[no-untyped-call, no-any-return]


def _open(call: Exchange, tensors: Sequence[Tensor | None]) -> None:
    """Begin a step, and compare what ranks move under the check."""
    with op_step(call.carrier):
        dtypes = [None if x is None else str(x.dtype) for x in tensors]
        agree(call.carrier, call.title, lambda: (None, f"{call.text}; dtypes {dtypes}"))


def _apply(call: Exchange, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    return _Exchange.apply(call, *tensors)  # type: ignore[no-untyped-call, no-any-return]


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Exchange, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        with reporting(call.carrier):
            moved = tuple(
                None if x is None else carry(call.carrier, move, x, call.method)
                for move, x in zip(call.moves, tensors, strict=True)
            )
        ctx.call = call
        ctx.like = [None if x is None else (x.shape, x.dtype, x.device) for x in moved]
        ctx.set_materialize_grads(False)
        return moved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Move gradients back; None counts as zeros, so that all ranks move the same."""
        given = []
        for grad, like, needed in zip(grads, ctx.like, ctx.needs_input_grad[1:], strict=True):
            if grad is None and like is not None and needed:
                shape, dtype, device = like
                grad = torch.zeros(shape, dtype=dtype, device=device)
            given.append(grad if needed else None)
        back = ctx.call.reverse
        _open(back, given)
        return (None, *_apply(back, *given))


class _SendBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Exchange, x: Tensor, taken: slice) -> Tensor:
        ctx.call = call
        return x[:, taken]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, exchange(ctx.call, grad)[0], None
