# SPDX-License-Identifier: Apache-2.0
"""Op calls as data: what is called, on which plan, with which inputs.

An ``OpSpec`` is a few JSON values, so it travels to any rank and names a failure; ``OpCase.of``
draws the whole, unsharded inputs from its seed, the same on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from cptransport.errors import OpInputError
from cptransport.plan import Plan, build_plan

__all__ = ["INITIAL", "OPS", "OPTIONAL", "OpCase", "OpSpec", "owned_states"]

OPS = ("kda", "ssd", "conv1d", "mixer")

#: Name of each op's initial state.
INITIAL = {
    "kda": "initial_state",
    "ssd": "initial_states",
    "conv1d": "initial_state",
    "mixer": "initial_states",
}

#: Inputs that a call may leave out, initial states among them.
OPTIONAL = {
    "kda": ("A_log", "dt_bias", "initial_state"),
    "ssd": ("D", "z", "dt_bias", "initial_states"),
    "conv1d": ("bias", "residual", "initial_state"),
    "mixer": ("conv1d_bias", "initial_states"),
}


@dataclass(frozen=True)
class OpSpec:
    """One op call on all ranks.

    Attributes:
        op: one of ``OPS``.
        cu_seqlens, world_size, layout, boundaries, padded_cu_seqlens: of the plan.
        batch: B; above 1 only with one sequence.
        heads, value_heads, key_dim, value_dim: H, HV, K, V; for SSD ngroups, nheads, dstate,
            headdim; a convolution has ``value_heads * value_dim`` channels.
        width: W of a convolution.
        dtype: of the stream. gate_dtype: of g and beta, or dt; empty: like the stream.
        parameter_dtype: of what is replicated, initial states too; empty: the state dtype.
        optional: names of the optional inputs that are given.
        options: the op's further keyword arguments.
        composition, overlap, engine: what the call asks for; composition ``auto`` too.
        loss: the outputs that the loss depends on, ``"output"`` and ``"final"``.
        loss_ranks: only these ranks have a loss, the others call ``join_backward``; None: all.
        gate: every log decay (KDA, gate not inside) is this number; None: random.
        padding: what rows of no sequence hold, inputs and gradients alike.
        strided: inputs and gradients of the stream are views with gaps.
        alternate: give dt_bias (KDA) as ``[HV * K]`` and D as ``[nheads, headdim]``.
        explicit: use the explicit forward and backward in place of autograd.
        seed: of all inputs.
    """

    op: str
    cu_seqlens: Sequence[int]
    world_size: int = 2
    layout: str = "contiguous"
    boundaries: Sequence[Any] | None = None
    padded_cu_seqlens: Sequence[int] | None = None
    batch: int = 1
    heads: int = 3
    value_heads: int = 3
    key_dim: int = 8
    value_dim: int = 12
    width: int = 4
    dtype: str = "float32"
    gate_dtype: str = ""
    parameter_dtype: str = ""
    optional: Sequence[str] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    composition: str = "gather"
    overlap: bool = False
    engine: str | None = None
    loss: Sequence[str] = ("output", "final")
    loss_ranks: Sequence[int] | None = None
    gate: float | None = None
    padding: float = math.nan
    strided: bool = False
    alternate: bool = False
    explicit: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.op not in OPS:
            raise OpInputError(f"unknown op {self.op!r}; choose one of {', '.join(OPS)}")
        if unknown := set(self.optional) - set(OPTIONAL[self.op]):
            raise OpInputError(f"{self.op} has no optional inputs {sorted(unknown)}")
        for name in ("batch", "heads", "value_heads", "key_dim", "value_dim", "width"):
            if getattr(self, name) < 1:
                raise OpInputError(f"{name} must be at least 1, got {getattr(self, name)}")

    def with_(self, **changes: Any) -> OpSpec:
        """Return a copy with some attributes changed."""
        return replace(self, **changes)

    def to_json(self) -> dict[str, Any]:
        """Return the attributes that are not the default, as JSON values."""
        changed = ((f.name, getattr(self, f.name), f.default) for f in fields(self))
        return {n: x for n, x, default in changed if x != default and x is not default and x != {}}

    def plan(self) -> Plan:
        """Return the plan of the call."""
        boundaries = self.boundaries
        if self.layout == "custom" and boundaries is not None:
            boundaries = [tuple(piece) for piece in boundaries]
        return build_plan(
            list(self.cu_seqlens),
            world_size=self.world_size,
            layout=self.layout,
            boundaries=boundaries,
            padded_cu_seqlens=self.padded_cu_seqlens,
        )

    @property
    def state_dtype(self) -> torch.dtype:
        """The dtype that states are computed in."""
        return torch.float64 if self.dtype == "float64" else torch.float32


@dataclass(frozen=True)
class OpCase:
    """The whole, unsharded call.

    Attributes:
        spec, plan: where it comes from.
        tokens: inputs of the stream, ``[B, T, ...]``.
        parameters: replicated inputs, without the initial state.
        initial: initial states, or None.
        grad_output, grad_final: gradients that enter the backward; zeros where the loss is not.
    """

    spec: OpSpec
    plan: Plan
    tokens: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor]
    initial: Tensor | None
    grad_output: Tensor
    grad_final: Tensor

    @classmethod
    def of(cls, spec: OpSpec) -> OpCase:
        """Draw the inputs of a spec, on the CPU."""
        plan = spec.plan()
        draw = _Draw(spec, plan)
        tokens, parameters, output, state = getattr(draw, spec.op)()
        stream = getattr(torch, spec.dtype)
        gates = getattr(torch, spec.gate_dtype or spec.dtype)
        replicated = getattr(torch, spec.parameter_dtype or str(spec.state_dtype)[6:])
        padded = _padding_rows(plan)
        rounded = {
            name: x.to(gates if name in ("g", "beta", "dt") else stream)
            for name, x in tokens.items()
        }
        for x in rounded.values():
            x[:, padded] = spec.padding
        initial = draw.normal(*state)
        grad_output, grad_final = draw.normal(*output), draw.normal(*state)
        for rank in range(plan.world_size):
            if spec.loss_ranks is not None and rank not in spec.loss_ranks:
                grad_output[:, plan.for_rank(rank).index] = 0
                grad_final[owned_states(plan, rank, spec.batch)] = 0
        grad_output[:, padded] = 0
        return cls(
            spec,
            plan,
            rounded,
            {name: x.to(replicated) for name, x in parameters.items()},
            initial.to(replicated) if INITIAL[spec.op] in spec.optional else None,
            grad_output.to(stream) * ("output" in spec.loss),
            grad_final.to(stream if spec.op == "conv1d" else spec.state_dtype)
            * ("final" in spec.loss),
        )

    @property
    def padding_rows(self) -> Tensor:
        """Rows of the stream that belong to no sequence."""
        return _padding_rows(self.plan)


def owned_states(plan: Plan, rank: int, batch: int, *, first: bool = False) -> list[int]:
    """Return the rows of ``[N, ...]`` states whose sequence ends (or starts) on a rank."""
    end = 0 if first else -1
    return [
        sequence * batch + b
        for sequence in range(plan.num_sequences)
        if plan.segments[plan.chain(sequence)[end]].rank == rank
        for b in range(batch)
    ]


def _padding_rows(plan: Plan) -> Tensor:
    real = torch.zeros(plan.total_rows, dtype=torch.bool)
    for segment in plan.segments:
        real[segment.start : segment.stop] = True
    return (~real).nonzero().flatten()


_Drawn = tuple[dict[str, Tensor], dict[str, Tensor], tuple[int, ...], tuple[int, ...]]


class _Draw:
    """Random inputs in fp64; each op's method returns tokens, parameters, output and state shape."""

    def __init__(self, spec: OpSpec, plan: Plan) -> None:
        self._spec = spec
        self._stream = (spec.batch, plan.total_rows)
        self._states = spec.batch if plan.num_sequences == 1 else plan.num_sequences
        self._generator = torch.Generator().manual_seed(spec.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64)

    def kda(self) -> _Drawn:
        s = self._spec
        h, hv, k, v = s.heads, s.value_heads, s.key_dim, s.value_dim
        g = self.normal(*self._stream, hv, k)
        if not s.options.get("use_gate_in_kernel"):
            g = -g.abs() * self.normal(hv, k).exp() / 4
            if s.gate is not None:
                g = torch.full_like(g, s.gate)
        beta = self.normal(*self._stream, hv)
        inside = s.options.get("use_beta_sigmoid_in_kernel")
        tokens = {
            "q": self.normal(*self._stream, h, k),
            "k": self.normal(*self._stream, h, k) / k**0.5,
            "v": self.normal(*self._stream, hv, v),
            "g": g,
            "beta": beta if inside else beta.sigmoid(),
        }
        given = {"A_log": self.normal(hv) / 2, "dt_bias": self.normal(hv, k)}
        if s.alternate:
            given["dt_bias"] = given["dt_bias"].flatten()
        state = (v, k) if s.options.get("state_v_first") else (k, v)
        return tokens, self._given(given), (*self._stream, hv, v), (self._states, hv, *state)

    def ssd(self) -> _Drawn:
        s = self._spec
        groups, heads, n, p = s.heads, s.value_heads, s.key_dim, s.value_dim
        dt = self.normal(*self._stream, heads)
        tokens = {
            "x": self.normal(*self._stream, heads, p),
            "dt": dt if s.options.get("dt_softplus") else dt.exp() / 4,
            "B": self.normal(*self._stream, groups, n),
            "C": self.normal(*self._stream, groups, n) / n**0.5,
        }
        tokens.update(self._given({"z": self.normal(*self._stream, heads, p)}))
        parameters = {"A": -self.normal(heads).exp() / 2}
        parameters.update(self._given({"D": self._skip(), "dt_bias": self.normal(heads)}))
        return tokens, parameters, (*self._stream, heads, p), (self._states, heads, p, n)

    def conv1d(self) -> _Drawn:
        s = self._spec
        channels = s.value_heads * s.value_dim
        tokens = {"x": self.normal(*self._stream, channels)}
        tokens.update(self._given({"residual": self.normal(*self._stream, channels)}))
        parameters = {"weight": self.normal(channels, s.width)}
        parameters.update(self._given({"bias": self.normal(channels)}))
        return tokens, parameters, (*self._stream, channels), (self._states, channels, s.width - 1)

    def mixer(self) -> _Drawn:
        s = self._spec
        groups, heads, n, p = s.heads, s.value_heads, s.key_dim, s.value_dim
        inner, channels = heads * p, heads * p + 2 * groups * n
        tokens = {"zxbcdt": self.normal(*self._stream, inner + channels + heads)}
        parameters = {"conv1d_weight": self.normal(channels, s.width) / s.width**0.5}
        parameters.update(self._given({"conv1d_bias": self.normal(channels) / 4}))
        parameters["dt_bias"] = self.normal(heads)
        parameters["A"] = -self.normal(heads).exp() / 2
        parameters["D"] = self._skip()
        return tokens, parameters, (*self._stream, inner), (self._states, heads, p, n)

    def _skip(self) -> Tensor:
        """Draw D."""
        s = self._spec
        return self.normal(s.value_heads, *([s.value_dim] if s.alternate else []))

    def _given(self, optional: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: x for name, x in optional.items() if name in self._spec.optional}
