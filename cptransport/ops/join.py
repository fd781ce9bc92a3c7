# SPDX-License-Identifier: Apache-2.0
"""``join_backward``: let a rank whose loss does not use an op's output take part in its backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["join_backward"]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, *outputs: Tensor) -> Tensor:
        ctx.shapes = [(output.shape, output.dtype, output.device) for output in outputs]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes
        )
        return (grad, *zeros)


def join_backward(loss: Tensor, *outputs: Tensor) -> Tensor:
    """Return the loss with a zero-weight edge to the outputs of ops.

    The backward of a sequence-sharded op is collective: every rank must reach it. A rank whose loss
    does not depend on the op's output calls this, so that its ``backward()`` does. Values, NaN
    included, do not matter; gradients are exact zeros.

    Args:
        loss: any tensor, a constant too.
        outputs: outputs of ops (``o``, ``y``, final states), or anything computed from them.

    Returns:
        Tensor: equal to ``loss``.

    Collective: no; the backward that follows is.
    """
    return _Join.apply(loss, *outputs)  # type: ignore[no-untyped-call, no-any-return]
