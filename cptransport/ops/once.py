# SPDX-License-Identifier: Apache-2.0
"""``once_differentiable``: a backward that refuses to be differentiated, always.

torch's decorator of that name lets a gradient leave without a graph when no incoming gradient
requires one, as under ``o.sum()``; second-order terms are then silently missing. Here a gradient
leaves with a path to every input, kept or not: through an output without elements that the forward
saves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from cptransport.errors import OpInputError

__all__ = ["history_of", "once_differentiable", "refuse"]

_Backward = Callable[..., tuple[Tensor | None, ...]]


def refuse(ctx: Any, *gradients: Tensor | None) -> NoReturn:
    """Be the backward of a backward.

    Raises:
        OpInputError: always.
    """
    raise OpInputError("double backward through a sequence-sharded op is not supported")


class _Refuse(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, grads: tuple[Tensor | None, ...], *origins: Tensor
    ) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in grads)

    backward = staticmethod(refuse)


def history_of(output: Tensor) -> Tensor:
    """Return what the ``forward`` of a decorated ``backward`` saves, and returns as its last output.

    Args:
        output: of the forward, of a dtype that has gradients.
    """
    return torch.empty(0, dtype=output.dtype, device=output.device)


def once_differentiable(backward: _Backward) -> _Backward:
    """Decorate the ``backward`` of an autograd function; its ``forward`` saves ``history_of`` an output.

    Raises:
        OpInputError: in a backward through the gradients that it gave under ``create_graph``.
    """

    @wraps(backward)
    def wrapper(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not torch.is_grad_enabled():  # no create_graph
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        # A path to whatever the second backward asks for; without one it would not come here.
        origins = [x for x in (*ctx.saved_tensors, *grads) if x is not None and x.requires_grad]
        return _Refuse.apply(found, *origins)  # type: ignore[no-untyped-call, no-any-return]

    return wrapper
