# SPDX-License-Identifier: Apache-2.0
"""Segments of one token, all at once, in plain torch; cuDNN's kernels never see them.

V-major: ``S' = S D + beta (v - S D k) k^T`` with D the token's decay, ``o = scale S' q``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cptransport.engines import KDAOptions
from cptransport_cudnn_summary.activation import Outside, Tokens, activate

__all__ = ["entering_grad", "grads", "run", "transition"]


def _tokens(x: Mapping[str, Tensor], options: KDAOptions, dtype: torch.dtype) -> Tokens:
    wide = {name: each.to(dtype) for name, each in x.items()}
    return activate(wide, options, Outside.everything(options, options.scale), dtype)


def _step(t: Tokens, v: Tensor, state: Tensor) -> Tensor:
    decayed = state * t.g.exp()[..., None, :]
    missing = v - (decayed @ t.k[..., None])[..., 0]
    return decayed + (t.beta[..., None] * missing)[..., None] * t.k[..., None, :]


def run(x: Mapping[str, Tensor], options: KDAOptions, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return o ``[n, HV, V]`` in v's dtype and the states ``[n, HV, V, K]`` that leave."""
    t = _tokens(x, options, state.dtype)
    after = _step(t, t.v, state)
    return (after @ t.q[..., None])[..., 0].to(x["v"].dtype), after


def transition(x: Mapping[str, Tensor], options: KDAOptions, dtype: torch.dtype) -> Tensor:
    """Return ``[n, HV, K, K]``: what the identity becomes without values."""
    t = _tokens(x, options, dtype)
    keys = t.k.shape[-1]
    eye = torch.eye(keys, dtype=dtype, device=t.k.device).expand(*t.k.shape[:2], keys, keys)
    return _step(t, torch.zeros_like(t.k), eye)


def entering_grad(
    x: Mapping[str, Tensor], options: KDAOptions, do: Tensor, leaving: Tensor
) -> Tensor:
    """Return the gradient of the states that enter; it does not depend on them."""
    return grads(x, options, torch.zeros_like(leaving), do, leaving)[1]


def grads(
    x: Mapping[str, Tensor], options: KDAOptions, state: Tensor, do: Tensor, leaving: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of the inputs, each in its dtype, and of the states that enter.

    Args:
        x: the inputs. options: of the op. state: that entered.
        do: gradient of o, ``[n, HV, V]``. leaving: of the states that leave.
    """
    leaves = {name: each.detach().requires_grad_() for name, each in x.items()}
    entering = state.detach().requires_grad_()
    with torch.enable_grad():
        ends = run(leaves, options, entering)
    *found, grad = torch.autograd.grad(
        ends, (*leaves.values(), entering), (do.to(ends[0].dtype), leaving), materialize_grads=True
    )
    return dict(zip(leaves, found, strict=True)), grad
