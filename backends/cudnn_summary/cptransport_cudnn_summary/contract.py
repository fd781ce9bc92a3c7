# SPDX-License-Identifier: Apache-2.0
"""One way of calling cuDNN's KDA, and the calls; ``resolve`` finds which way serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from cptransport.engines import KDAOptions, OpFacts
from cptransport_cudnn_summary.activation import Outside, Tokens
from cptransport_cudnn_summary.concat import Binding, Stack
from cptransport_cudnn_summary.library import Library

__all__ = ["Contract", "Kind"]


@dataclass(frozen=True)
class Kind:
    """What a way of calling depends on; alike on every rank.

    Attributes:
        device: where; its index too, since each GPU has its own kernels.
        io, state: dtype of q, k, v; of states.
        heads, value_heads, key_dim, value_dim: H, HV, K, V.
        options: of the op. a_log, dt_bias: whether these are given.
    """

    device: torch.device
    io: torch.dtype
    state: torch.dtype
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    options: KDAOptions
    a_log: bool
    dt_bias: bool

    @classmethod
    def of_facts(cls, facts: OpFacts) -> Kind:
        """Return the kind of an op call."""
        assert isinstance(facts.options, KDAOptions)
        return cls(
            _device(facts.device_type),
            facts.dtypes["v"],
            facts.state_dtype,
            facts.heads,
            facts.value_heads,
            facts.key_dim,
            facts.value_dim,
            facts.options,
            "A_log" in facts.dtypes,
            "dt_bias" in facts.dtypes,
        )


def _device(kind: str) -> torch.device:
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


@dataclass(frozen=True, eq=False)
class Contract:
    """A way of calling, and the calls.

    Attributes:
        library: the ops.
        outside: what is applied outside.
        flags: keyword arguments of every op. scale: of those that take q.
        interior: ``summary``, ``triton`` or ``identity``.
        binding: of the concatenated-summary API where it is used.
        notes: how it is computed, for ``last_run()``.
    """

    library: Library
    outside: Outside
    flags: dict[str, Any]
    scale: float
    interior: str = ""
    binding: Binding | None = None
    notes: tuple[str, ...] = ()

    def forward(
        self, t: Tokens, cu_seqlens: Tensor, initial: Tensor, stack: Stack | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return o ``[t, HV, V]`` and final states ``[N, HV, V, K]``."""
        with _ready(t.q):
            o, final, _ = self.library.forward(
                *t[:5],
                cu_seqlens,
                self.scale,
                initial,
                True,  # output_final_state
                **self._gate(t),
                **self._stacked("forward", stack),
            )
        return o, final

    def identity(self, t: Tokens, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return effective queries ``[t, HV, K]`` and transitions ``[N, HV, K, K]``."""
        tokens, heads, keys = t.g.shape
        eye = t.g.new_zeros(len(cu_seqlens) - 1, heads, keys, keys)
        eye.diagonal(dim1=-2, dim2=-1).fill_(1)
        return self.forward(t._replace(v=t.v.new_zeros(tokens, heads, keys)), cu_seqlens, eye)

    def backward(
        self,
        do: Tensor,
        t: Tokens,
        cu_seqlens: Tensor,
        initial: Tensor,
        d_final: Tensor,
        stack: Stack | None = None,
    ) -> tuple[Tokens, Tensor]:
        """Return gradients of the tokens and of the initial states."""
        with _ready(t.q):
            *grads, d_initial, d_a_log, d_dt_bias = self.library.backward(
                do,
                *t[:5],
                cu_seqlens,
                self.scale,
                initial,
                d_final,
                **self._gate(t),
                **self._stacked("backward", stack),
            )
        # Gradients of what was not given are empty.
        gates = (
            None if given is None else grad
            for given, grad in ((t.a_log, d_a_log), (t.dt_bias, d_dt_bias))
        )
        return Tokens(*grads, *gates), d_initial

    def summary(self, t: Tokens, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
        """Return E ``[N, HV, V, K]`` and M ``[N, HV, K, K]``."""
        with _ready(t.k):
            state, transition = self.library.summary(
                t.k, t.v, t.g, t.beta, cu_seqlens, output_transition=True, **self._gate(t)
            )
        return state, transition

    def summary_backward(self, do: Tensor, t: Tokens, cu_seqlens: Tensor) -> Tensor:
        """Return dE ``[N, HV, V, K]``."""
        with _ready(t.k):
            state, _ = self.library.summary_backward(
                do, t.q, t.k, t.g, t.beta, cu_seqlens, self.scale, **self._gate(t)
            )
        return cast("Tensor", state)

    def _gate(self, t: Tokens) -> dict[str, Any]:
        if t.a_log is None and t.dt_bias is None:
            return self.flags
        return {**self.flags, "a_log": t.a_log, "dt_bias": t.dt_bias}

    def _stacked(self, direction: str, stack: Stack | None) -> dict[str, Tensor]:
        if stack is None or not len(stack.state):
            return {}
        assert self.binding is not None
        state, transition = getattr(self.binding, direction)
        return {state: stack.state, transition: stack.transition}


class _ready:  # noqa: N801  # a guard
    """Make the device of a tensor current, whose plans cuDNN takes; go past autograd.

    Ops like cuDNN's have Python code for autograd that every call runs, to find without grad mode that
    there is nothing to do; it costs the host up to half of what reaches the op.
    """

    __slots__ = ("_below", "_device")

    def __init__(self, x: Tensor) -> None:
        self._device = torch.cuda.device(x.device) if x.is_cuda else None

    def __enter__(self) -> None:
        if self._device is not None:
            self._device.__enter__()
        self._below = torch._C._AutoDispatchBelowAutograd()  # begins when it is made

    def __exit__(self, *error: object) -> None:
        self._below.__exit__(*error)
        if self._device is not None:
            self._device.__exit__(*error)
