# SPDX-License-Identifier: Apache-2.0
"""What is applied to KDA's inputs outside of cuDNN, in differentiable code.

cuDNN's plain contract is the recurrence alone: q and k as they are, natural-log g and beta in the
state dtype. Which options it takes inside depends on the GPU (``contract``); the others are applied
here, in the state dtype, and their gradients pulled back by autograd from the same code. Where
nothing is applied, tensors and gradients are handed through.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from cptransport.engines import KDAOptions
from cptransport.engines.torch.kda import log_decay

__all__ = ["Activated", "Outside", "Tokens", "activate"]


#: Inputs, in the order of ``Tokens``.
_NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


class Tokens(NamedTuple):
    """Packed inputs of the op.

    Attributes:
        q, k: ``[t, H, K]`` in the io dtype, H = HV where heads are copied outside.
        v: ``[t, HV, V]``. g: ``[t, HV, K]``. beta: ``[t, HV]``; both in the state dtype.
        a_log: ``[HV]``. dt_bias: ``[HV, K]``. None where the gate is not applied inside.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    a_log: Tensor | None = None
    dt_bias: Tensor | None = None


@dataclass(frozen=True)
class Outside:
    """What is applied outside.

    Attributes:
        l2norm, gate, sigmoid: these options, where they are set.
        heads: copy query heads for the value heads that read them.
        factor: of q.
    """

    l2norm: bool
    gate: bool
    sigmoid: bool
    heads: bool
    factor: float

    @classmethod
    def everything(cls, options: KDAOptions, factor: float) -> Outside:
        """Apply everything that the options ask for."""
        return cls(
            options.use_qk_l2norm_in_kernel,
            options.use_gate_in_kernel,
            options.use_beta_sigmoid_in_kernel,
            heads=True,
            factor=factor,
        )

    def changes(self, dtypes: Iterable[torch.dtype], dtype: torch.dtype, copies: int) -> bool:
        """Whether ``activate`` makes anything of inputs, or hands them all through.

        Args:
            dtypes: of g, beta and parameters. dtype: of states.
            copies: HV / H.
        """
        return (
            self.l2norm
            or self.gate
            or self.sigmoid
            or self.factor != 1.0
            or (self.heads and copies > 1)
            or any(each != dtype for each in dtypes)
        )


def activate(
    x: Mapping[str, Tensor], options: KDAOptions, outside: Outside, dtype: torch.dtype
) -> Tokens:
    """Apply what is outside.

    Args:
        x: packed ``q, k, v, g, beta``, and ``A_log``, ``dt_bias`` where given.
        options: of the op.
        outside: what to apply.
        dtype: of states.
    """
    q, k, v = x["q"], x["k"], x["v"]
    g, beta = x["g"].to(dtype), x["beta"].to(dtype)
    a_log, bias = (None if name not in x else x[name].to(dtype) for name in ("A_log", "dt_bias"))
    if outside.l2norm:
        q, k = (_normalised(each.to(dtype)) for each in (q, k))
    if outside.factor != 1.0:
        q = q.to(dtype) * outside.factor
    if outside.gate:
        g, a_log, bias = log_decay(g, a_log, bias, options.lower_bound), None, None
    if outside.sigmoid:
        beta = beta.sigmoid() * (2.0 if options.allow_neg_eigval else 1.0)
    copies = v.shape[1] // q.shape[1]
    if outside.heads and copies > 1:
        q, k = (each.repeat_interleave(copies, 1, output_size=v.shape[1]) for each in (q, k))
    return Tokens(q.to(v.dtype), k.to(v.dtype), v, g, beta, a_log, bias)


def _normalised(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


class Activated(NamedTuple):
    """Inputs of one call as cuDNN takes them, and the way back for their gradients.

    Attributes:
        tokens: without a graph.
        leaves: what they were made of. ends: what was made of these.
    """

    tokens: Tokens
    leaves: Mapping[str, Tensor]
    ends: Tokens

    @classmethod
    def unchanged(cls, x: Mapping[str, Tensor]) -> Activated:
        """Hand inputs through."""
        tokens = Tokens(*(x.get(name) for name in _NAMES))  # type: ignore[arg-type]
        return cls(tokens, x, tokens)

    @classmethod
    def of(
        cls,
        x: Mapping[str, Tensor],
        options: KDAOptions,
        outside: Outside,
        dtype: torch.dtype,
        *,
        differentiable: bool,
    ) -> Activated:
        """Activate; arguments as ``activate``, and whether there is a way back."""
        if not differentiable:
            tokens = activate(x, options, outside, dtype)
            return cls(tokens, x, tokens)
        leaves = {name: each.detach().requires_grad_() for name, each in x.items()}
        with torch.enable_grad():
            ends = activate(leaves, options, outside, dtype)
        tokens = Tokens(*(None if end is None else end.detach() for end in ends))  # type: ignore[arg-type]
        return cls(tokens, leaves, ends)

    def pull_back(self, grads: Tokens) -> dict[str, Tensor]:
        """Return the gradients of the inputs, each in its dtype, from those of the tokens."""
        found: dict[str, Tensor] = {}
        pairs = []
        for name, end, grad in zip(_NAMES, self.ends, grads, strict=True):
            if end is not None and grad is not None:
                if end is self.leaves[name]:
                    found[name] = grad
                else:
                    pairs.append((end, grad))
        if pairs:
            others = [name for name in self.leaves if name not in found]
            ends, given = zip(*pairs, strict=True)
            pulled = torch.autograd.grad(
                ends, [self.leaves[name] for name in others], given, materialize_grads=True
            )
            found.update(zip(others, pulled, strict=True))
        return found
