# SPDX-License-Identifier: Apache-2.0
"""``once_differentiable``: a backward that refuses to be differentiated, always.

torch's decorator of that name lets a gradient leave without a graph when no incoming gradient
requires one, as under ``o.sum()``; second-order terms are then silently missing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from cptransport.errors import OpInputError

__all__ = ["once_differentiable"]

_Backward = Callable[..., tuple[Tensor | None, ...]]


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grads: tuple[Tensor | None, ...], *origins: Tensor
    ) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise OpInputError("double backward through a sequence-sharded op is not supported")


def once_differentiable(backward: _Backward) -> _Backward:
    """Decorate the ``backward`` of an autograd function that saves all inputs it is not linear in.

    Raises:
        OpInputError: in a backward through the gradients that it gave under ``create_graph``.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # no create_graph
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        # What the gradients depend on makes a path to what the second backward asks for.
        origins = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
        return _Refuse.apply(found, *origins)  # type: ignore[no-untyped-call, no-any-return]

    return wrapper
