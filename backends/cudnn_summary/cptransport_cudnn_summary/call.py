# SPDX-License-Identifier: Apache-2.0
"""One engine call on one rank: its inputs, how cuDNN is called for it, and what a backward needs of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from cptransport.engines import KDAInputs, KDAOptions, LocalSegment, Same, Saved
from cptransport_cudnn_summary.activation import Activated, Tokens
from cptransport_cudnn_summary.concat import Stack, stack
from cptransport_cudnn_summary.contract import Contract, Kind
from cptransport_cudnn_summary.interior import SAVED, Delegated, Share
from cptransport_cudnn_summary.packing import Layout, Pack, flat, layout
from cptransport_cudnn_summary.resolve import resolve

__all__ = [
    "INPUTS",
    "PARAMETERS",
    "TOKENS",
    "Call",
    "Frame",
    "Kept",
    "contract_of",
    "keep",
    "reopen",
    "spread",
]

TOKENS = ("q", "k", "v", "g", "beta")
PARAMETERS = ("A_log", "dt_bias")
INPUTS = (*TOKENS, *PARAMETERS)


def contract_of(kind: Kind) -> Contract:
    """Return how calls of a kind that is served are made."""
    resolved = resolve(kind)
    assert isinstance(resolved, Contract), resolved  # it was eligible
    return resolved


@dataclass(frozen=True, eq=False)
class Frame:
    """What no tensor changes.

    Attributes:
        contract, layout, options, dtype: how; of which segments; of the op; of states.
        state_shape: HV, V, K.
        changes: whether anything is applied outside of cuDNN.
    """

    contract: Contract
    layout: Layout
    options: KDAOptions
    dtype: torch.dtype
    state_shape: tuple[int, int, int]
    changes: bool


@lru_cache(maxsize=256)
def _frame(
    query: tuple[int, ...],
    value: tuple[int, ...],
    io: torch.dtype,
    dtypes: tuple[torch.dtype | None, ...],
    options: Same,
    segments: Same,
    device: torch.device,
) -> Frame:
    """Return the frame of shapes of q and v, dtypes of v and of g, beta, A_log and dt_bias, and of all else.

    A caller's options and segments are objects that it keeps for calls of one signature, to which
    what this backend's variables say belongs; so these are looked at once.
    """
    dtype = torch.float64 if io == torch.float64 else torch.float32
    batch, tokens, heads, keys = query
    value_heads, values = value[2:]
    sizes = (heads, value_heads, keys, values)
    a_log, dt_bias = (each is not None for each in dtypes[2:])
    contract = contract_of(Kind(device, io, dtype, *sizes, options.it, a_log, dt_bias))
    return Frame(
        contract,
        layout(tuple(segments.it), batch, tokens, device),
        options.it,
        dtype,
        (value_heads, values, keys),
        contract.outside.changes(filter(None, dtypes), dtype, value_heads // heads),
    )


@dataclass
class Call:
    """What a pass knows of its inputs.

    Attributes:
        frame: of it.
        inputs: as given, ``[B, T, ...]`` and parameters; those that are there.
        seed: rows of a state table that nothing of other segments enters; None: zeros.
        differentiable: whether gradients are pulled back to the inputs.
    """

    frame: Frame
    inputs: dict[str, Tensor]
    seed: Tensor | None
    differentiable: bool = False

    @classmethod
    def of(cls, inputs: KDAInputs, segments: Sequence[LocalSegment]) -> Call:
        """Open a forward."""
        x = inputs
        named = zip(INPUTS, (x.q, x.k, x.v, x.g, x.beta, x.A_log, x.dt_bias), strict=True)
        frame = _frame(
            x.q.shape,
            x.v.shape,
            x.v.dtype,
            (
                x.g.dtype,
                x.beta.dtype,
                None if x.A_log is None else x.A_log.dtype,
                None if x.dt_bias is None else x.dt_bias.dtype,
            ),
            Same(x.options),
            Same(segments),
            x.v.device,
        )
        return cls(frame, {name: x for name, x in named if x is not None}, x.seed)

    def packed(self, pack: Pack) -> dict[str, Tensor]:
        """Return raw inputs of a pack of flat rows, and the parameters."""
        return {
            name: x if name in PARAMETERS else pack.rows.take(flat(x))
            for name, x in self.inputs.items()
        }

    @cached_property
    def activated(self) -> Activated:
        """The inputs of ``layout.long``, activated when first asked for."""
        frame = self.frame
        x = self.packed(frame.layout.long)
        if not frame.changes:
            return Activated.unchanged(x)
        return Activated.of(
            x,
            frame.options,
            frame.contract.outside,
            frame.dtype,
            differentiable=self.differentiable,
        )

    def tokens(self, group: Pack) -> Tokens:
        """Return the activated inputs of a group of ``layout.long``."""
        t = self.activated.tokens
        if group.rows.whole:
            return t
        q, k, v, g, beta = (group.rows.take(x) for x in t[:5])
        return Tokens(q, k, v, g, beta, t.a_log, t.dt_bias)

    def start(self, group: Pack | None = None) -> Tensor:
        """Return a group's rows of the seed; without a group all of them."""
        whole = group is None or group.states.whole
        if self.seed is None and whole:
            self.seed = self._zeros(self.frame.layout.states)
        if self.seed is None:
            return self._zeros(len(group.sequences))  # type: ignore[union-attr]
        return self.seed if whole else group.states.take(self.seed)  # type: ignore[union-attr]

    def _zeros(self, count: int) -> Tensor:
        shape = (count, *self.frame.state_shape)
        return self.inputs["v"].new_zeros(shape, dtype=self.frame.dtype)

    def stacked(self, group: Pack, table: Any, *, reverse: bool) -> Stack | None:
        """Return what enters a group for cuDNN to compose, where it does and the summaries are at hand.

        Args:
            group: which. table: a ``StateTable``.
            reverse: of a backward.
        """
        if self.frame.contract.binding is None:
            return None
        summaries = getattr(table, "summaries", lambda: None)()
        if summaries is None:
            return None
        sources = [summaries.sources(each.state) for each in group.sequences]
        keys = self.frame.state_shape[2]
        return stack(sources, summaries.gathered, self.start(group), keys, reverse=reverse)


def spread(like: Tensor, lay: Layout, values: Tensor | None) -> Tensor:
    """Return ``[B, T, ...]`` with the rows of ``lay.long``; zeros where no segment is.

    One batch row of nothing else is ``values`` itself, which gets that shape: an op has to copy a
    view before it returns it.
    """
    if values is not None and lay.long.rows.whole:
        return values.unsqueeze_(0) if like.shape[0] == 1 else values.view(like.shape)
    make = torch.empty_like if lay.covered else torch.zeros_like
    made = make(like, memory_format=torch.contiguous_format)
    if values is not None:
        lay.long.rows.put(values, flat(made))
    return made


@dataclass
class Kept:
    """What a forward leaves for its backward.

    Attributes:
        enter: states that entered, ``[R, HV, V, K]``.
        r: effective queries ``[t, HV, K]`` of interior segments, by ``identity``.
        m: transitions of interior segments, by ``identity`` or ``summary``.
        interior: these, where they are not delegated.
        delegated: the same by ``triton``.
    """

    enter: Tensor
    r: Tensor | None
    m: Tensor | None
    interior: Pack | None
    delegated: Delegated | None


@dataclass(frozen=True)
class _Meta:
    frame: Frame
    names: tuple[str, ...]
    interior: Pack | None
    share: Share | None
    count: int
    meta: Any


def keep(call: Call, kept: Kept) -> Saved:
    """Pack what is kept; equally many tensors on every rank."""
    share, m, count, meta = None, kept.m, 0, None
    inner: tuple[Tensor | None, ...] = ()
    if kept.delegated is not None:
        assert kept.delegated.saved is not None
        share, inner = kept.delegated.share, kept.delegated.saved.tensors
        m = kept.delegated.m
        count, meta = len(inner), kept.delegated.saved.meta
    if call.frame.contract.interior == "triton":
        inner += (None,) * (SAVED - count)
    return Saved(
        (*call.inputs.values(), kept.enter, kept.r, m, *inner),
        _Meta(call.frame, tuple(call.inputs), kept.interior, share, count, meta),
    )


def reopen(saved: Saved, seed: Tensor | None) -> tuple[Call, Kept]:
    """Undo ``keep``, for a backward from ``seed``."""
    meta: _Meta = saved.meta
    count = len(meta.names)
    inputs: Any = saved.tensors[:count]
    enter, r, m, *rest = saved.tensors[count:]
    assert enter is not None
    delegated = None
    if meta.share is not None:
        inner = Saved(tuple(rest[: meta.count]), meta.meta)
        delegated = Delegated(meta.share, m=m, saved=inner)
    call = Call(meta.frame, dict(zip(meta.names, inputs, strict=True)), seed, differentiable=True)
    return call, Kept(enter, r, m, meta.interior, delegated)
