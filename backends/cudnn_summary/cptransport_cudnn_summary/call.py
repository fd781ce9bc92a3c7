# SPDX-License-Identifier: Apache-2.0
"""One engine call on one rank: its inputs, how cuDNN is called for it, and what a backward needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cptransport.engines import KDAInputs, KDAOptions, LocalSegment, Saved
from cptransport_cudnn_summary.activation import Tokens, activate
from cptransport_cudnn_summary.concat import Stack, stack
from cptransport_cudnn_summary.contract import Contract, Kind
from cptransport_cudnn_summary.interior import SAVED, Delegated
from cptransport_cudnn_summary.packing import Layout, Pack, flat, layout
from cptransport_cudnn_summary.resolve import resolve

__all__ = ["PARAMETERS", "TOKENS", "Call", "Kept", "contract_of", "keep", "reopen", "spread"]

TOKENS = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias")


def contract_of(kind: Kind) -> Contract:
    """Return how calls of a kind that is served are made."""
    resolved = resolve(kind)
    assert isinstance(resolved, Contract), resolved  # it was eligible
    return resolved


@dataclass
class Call:
    """What a pass knows of its inputs.

    Attributes:
        contract, layout, options, dtype: how; of which segments; of the op; of states.
        inputs: as given, ``[B, T, ...]`` and parameters; those that are there.
    """

    contract: Contract
    layout: Layout
    options: KDAOptions
    dtype: torch.dtype
    inputs: dict[str, Tensor]
    _tokens: Tokens | None = None

    @classmethod
    def of(cls, inputs: KDAInputs, segments: Sequence[LocalSegment]) -> Call:
        """Open a forward."""
        v, q = inputs.v, inputs.q
        dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
        kind = Kind(
            v.device,
            v.dtype,
            dtype,
            q.shape[2],
            v.shape[2],
            q.shape[3],
            v.shape[3],
            inputs.options,
            inputs.A_log is not None,
            inputs.dt_bias is not None,
        )
        named = {name: getattr(inputs, name) for name in (*TOKENS, *PARAMETERS)}
        return cls(
            contract_of(kind),
            layout(tuple(segments), v.shape[0], v.shape[1], v.device),
            inputs.options,
            dtype,
            {name: x.detach() for name, x in named.items() if x is not None},
        )

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """HV, V, K."""
        *_, heads, values = self.inputs["v"].shape
        return heads, values, self.inputs["k"].shape[3]

    def packed(self, pack: Pack) -> dict[str, Tensor]:
        """Return raw inputs of a pack of flat rows, and the parameters."""
        return {
            name: pack.take(flat(x)) if name in TOKENS else x for name, x in self.inputs.items()
        }

    def tokens(self, group: Pack) -> Tokens:
        """Return the activated inputs of a group of ``layout.long``; activated when first asked for."""
        if self._tokens is None:
            x = self.packed(self.layout.long)
            self._tokens = activate(x, self.options, self.contract.outside, self.dtype)
        t = self._tokens
        q, k, v, g, beta = (group.take(x) for x in t[:5])
        return Tokens(q, k, v, g, beta, t.a_log, t.dt_bias)

    def states(self, table: Tensor | None, group: Pack) -> Tensor:
        """Return a group's rows of a state table, zeros without one; fresh memory."""
        if table is not None:
            return group.take_states(table)
        shape = (len(group.sequences), *self.state_shape)
        return self.inputs["v"].new_zeros(shape, dtype=self.dtype)

    def stacked(
        self, segments: frozenset[int], table: Any, seed: Tensor | None, *, reverse: bool
    ) -> Stack | None:
        """Return what enters segments for cuDNN to compose, where it does and the summaries are at hand.

        Args:
            segments: which. table: a ``StateTable``.
            seed: states of segments that nothing enters.
            reverse: of a backward.
        """
        if self.contract.binding is None or not segments:
            return None
        summaries = getattr(table, "summaries", lambda: None)()
        if summaries is None:
            return None
        group = self.layout.group(segments)
        sources = [summaries.sources(each.state) for each in group.sequences]
        seeds, keys = self.states(seed, group), self.state_shape[2]
        return stack(sources, summaries.gathered, seeds, keys, reverse=reverse)

    def bare(self) -> Call:
        """Return the call without tensors."""
        return replace(self, inputs={}, _tokens=None)


def spread(like: Tensor, lay: Layout, values: Tensor | None) -> Tensor:
    """Return ``[B, T, ...]`` with the rows of ``lay.long``; zeros where no segment is."""
    if values is not None and lay.long.rows is None:
        return values.view(like.shape)
    make = torch.empty_like if lay.covered else torch.zeros_like
    made = make(like, memory_format=torch.contiguous_format)
    if values is not None:
        lay.long.put(values, flat(made))
    return made


@dataclass
class Kept:
    """What a forward leaves for its backward.

    Attributes:
        enter: states that entered, ``[R, HV, V, K]``.
        r: effective queries ``[t, HV, K]`` of interior segments, by ``identity``.
        m: transitions of interior segments, by ``identity`` or ``summary``.
        interior: which these are.
        delegated: the same by ``triton``.
    """

    enter: Tensor
    r: Tensor | None
    m: Tensor | None
    interior: frozenset[int]
    delegated: Delegated | None


@dataclass(frozen=True)
class _Meta:
    call: Call
    names: tuple[str, ...]
    interior: frozenset[int]
    delegated: Delegated | None
    count: int
    meta: Any


def keep(call: Call, kept: Kept) -> Saved:
    """Pack what is kept; equally many tensors on every rank."""
    delegated, meta = kept.delegated, None
    inner: tuple[Tensor | None, ...] = ()
    if delegated is not None:
        assert delegated.saved is not None
        inner, meta = delegated.saved.tensors, delegated.saved.meta
        delegated = replace(delegated, saved=None)
    filling = (None,) * (SAVED - len(inner)) if call.contract.interior == "triton" else ()
    return Saved(
        (*call.inputs.values(), kept.enter, kept.r, kept.m, *inner, *filling),
        _Meta(call.bare(), tuple(call.inputs), kept.interior, delegated, len(inner), meta),
    )


def reopen(saved: Saved) -> tuple[Call, Kept]:
    """Undo ``keep``."""
    meta: _Meta = saved.meta
    count = len(meta.names)
    inputs: Any = saved.tensors[:count]
    enter, r, m, *rest = saved.tensors[count:]
    assert enter is not None
    delegated = meta.delegated
    if delegated is not None:
        delegated = replace(delegated, saved=Saved(tuple(rest[: meta.count]), meta.meta))
    call = replace(meta.call, inputs=dict(zip(meta.names, inputs, strict=True)))
    return call, Kept(enter, r, m, meta.interior, delegated)
