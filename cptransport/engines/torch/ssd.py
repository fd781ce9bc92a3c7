# SPDX-License-Identifier: Apache-2.0
"""Mamba2's state-space recurrence (SSD) in chunks, differentiable.

Inside a chunk, with a_t = A d_t, D(i, j) = exp(sum of a_m, j < m <= i), D(i, 0) from before the
chunk, D(c, j) to its end, and S the state that enters::

    y_i   = D(i, 0) S C_i + sum_{j <= i} (C_i . B_j) D(i, j) d_j x_j
    S_out = D(c, 0) S + sum_j D(c, j) d_j x_j B_j^T

Scores C_i . B_j are computed once per group, not per head.

Source: ``docs/algebra.md``; Mamba2 paper, section 6.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cptransport.engines import OpFacts, SSDInputs, SSDOptions
from cptransport.engines.torch.chunks import (
    BLOCK_ELEMENTS,
    FORGET,
    between,
    from_chunks,
    from_start,
    to_chunks,
    to_end,
)
from cptransport.engines.torch.segments import Block, SegmentEngine

__all__ = ["TorchSSD"]

#: Larger chunks cost memory and time here, and nothing depends on their size.
_MAX_CHUNK = 64


class _Prepared(NamedTuple):
    """What no state enters; R counts (batch, head), Q (batch, group)."""

    local: Tensor  # [B, L, nheads, headdim], outputs from a zero state, before the gate
    gate: Tensor | None  # like local
    read: Tensor  # [C, Q, dstate, c]
    start: Tensor  # [C, R, c, 1], decay from the chunk's start
    write: Tensor  # [C, B, nheads, headdim, dstate], final states from a zero state
    decay: Tensor  # [C, B, nheads, 1, 1], over the chunk
    log_decay: Tensor  # [B, nheads], over all chunks


class TorchSSD(SegmentEngine[_Prepared]):
    """The reference engine of SSD: plain torch, any float dtype, any device."""

    op = "ssd"
    token_names = ("x", "dt", "B", "C", "z")
    parameter_names = ("A", "D", "dt_bias")

    def slot_shapes(self, facts: OpFacts) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """State ``[nheads, headdim, dstate]``, transition ``[nheads]``, a natural-log decay."""
        return (facts.value_heads, facts.value_dim, facts.key_dim), (facts.value_heads,)

    def state_shape(self, inputs: SSDInputs) -> tuple[int, ...]:
        """State ``[nheads, headdim, dstate]``."""
        return (*inputs.x.shape[2:], inputs.B.shape[3])

    def block_tokens(self, inputs: SSDInputs) -> int:
        """Bound the largest temporaries: weights between a chunk's tokens, a state per chunk."""
        chunk = _chunk(inputs.options)
        per_head = max(chunk * chunk, math.prod(self.state_shape(inputs)[1:]))
        per_chunk = inputs.x.shape[0] * inputs.x.shape[2] * per_head
        return chunk * max(1, BLOCK_ELEMENTS // max(1, per_chunk))

    def prepare(self, block: Block) -> _Prepared:
        """Compute the outputs inside the chunks and what each chunk adds to the state."""
        x, B, C = block.token("x"), block.token("B"), block.token("C")
        batch, length, heads, headdim = x.shape
        groups, dstate = B.shape[2:]
        chunk = _chunk(block.options)
        d, a = _discretise(block)

        D = block.parameters["D"]
        skip = 0.0 if D is None else D.reshape(heads, -1) * x
        x, B, C = to_chunks(d[..., None] * x, chunk), to_chunks(B, chunk), to_chunks(C, chunk)
        a = to_chunks(a[:, :, None], chunk)  # [C, B, c, nheads]
        chunks = len(a)

        # [C, Q, heads of a group, c, c]
        weights = (
            between(a)
            .permute(0, 1, 4, 2, 3)
            .reshape(chunks, batch * groups, heads // groups, chunk, chunk)
        )
        weights = ((C @ B.mT)[:, :, None] * weights).tril()
        local = weights.view(chunks, batch * heads, chunk, chunk) @ x

        start = from_start(a).mT.reshape(chunks, batch * heads, chunk, 1)
        to_write = to_end(a).mT.reshape(chunks, batch * heads, 1, chunk) * x.mT
        write = to_write.reshape(chunks, batch * groups, -1, chunk) @ B
        z = block.tokens["z"]
        return _Prepared(
            local=from_chunks(local, batch, length) + skip,
            gate=None if z is None else functional.silu(z.to(block.dtype)),
            read=C.mT,
            start=start,
            write=write.view(chunks, batch, heads, headdim, dstate),
            decay=start[:, :, -1].view(chunks, batch, heads, 1, 1),
            log_decay=a.sum((0, 2)),
        )

    def run(self, prepared: _Prepared, state: Tensor) -> tuple[Tensor, Tensor]:
        """Chain the states over the chunks, then read all of them at once."""
        entering = []
        last = state
        for write, decay in zip(prepared.write.unbind(), prepared.decay.unbind(), strict=True):
            entering.append(last)
            last = torch.addcmul(write, decay, last)
        chunks, rows, chunk, _ = prepared.start.shape
        groups = prepared.read.shape[1]
        states = torch.stack(entering).view(chunks, groups, -1, state.shape[-1])
        carried = (states @ prepared.read).view(chunks, rows, -1, chunk).mT * prepared.start
        batch, length = prepared.local.shape[:2]
        y = prepared.local + from_chunks(carried, batch, length)
        return (y if prepared.gate is None else y * prepared.gate), last

    def advance(self, prepared: _Prepared, state: Tensor) -> Tensor:
        """Chain the states over the chunks."""
        for write, decay in zip(prepared.write.unbind(), prepared.decay.unbind(), strict=True):
            state = torch.addcmul(write, decay, state)
        return state

    def transition(self, prepared: Iterable[_Prepared], state: Tensor) -> Tensor:
        """Add up the log decays."""
        total = state.new_zeros(state.shape[:2])
        for block in prepared:
            total = total + block.log_decay
        return total


def _chunk(options: SSDOptions) -> int:
    return min(options.chunk_size, _MAX_CHUNK)


def _discretise(block: Block) -> tuple[Tensor, Tensor]:
    """Return the steps and the log decays, ``[B, L, nheads]`` both."""
    options: SSDOptions = block.options
    d, bias, A = block.token("dt"), block.parameters["dt_bias"], block.parameters["A"]
    assert A is not None
    if bias is not None:
        d = d + bias
    if options.dt_softplus:
        d = functional.softplus(d)
    d = d.clamp(options.dt_min, options.dt_max)
    # A finite stand-in for A = -inf, that may meet a step of 0 and multiply a gradient.
    A = A.clamp(min=-math.sqrt(torch.finfo(A.dtype).max))
    return d, (A * d).clamp(min=FORGET)
