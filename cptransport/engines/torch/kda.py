# SPDX-License-Identifier: Apache-2.0
"""KDA in chunks of 16 tokens, differentiable.

Inside a chunk, with D(i, j) the decay per channel from after token j to after token i, D(i, 0) from
before the chunk, D(c, j) to its end, and S the state that enters::

    A_ij  = beta_i sum_k k_ik D(i, j)_k k_jk                    j < i
    (1 + A) u = beta (v - (k D(., 0)) S)                        u: what each token writes
    o_i   = (q_i D(i, 0)) S + sum_{j <= i} (q_i D(i, j) k_j) u_j
    S_out = D(c, 0) S + sum_j (D(c, j) k_j) u_j^T

u is affine in S: ``u = drive - erase S``. All but the chain of states is computed for all chunks of
a block at once.

Source: ``docs/algebra.md``; Kimi Linear report, section 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from cptransport.engines import KDAInputs, KDAOptions, OpFacts
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

__all__ = ["TorchKDA", "log_decay"]

_CHUNK = 16


class _Prepared(NamedTuple):
    """What no state enters, per chunk; R counts (batch, value head)."""

    query: Tensor  # [C, R, c, K], scaled, decayed from the chunk's start
    attention: Tensor  # [C, R, c, c]
    erase: Tensor  # [C, R, c, K]
    drive: Tensor  # [C, R, c, V]
    write: Tensor  # [C, R, K, c], keys decayed to the chunk's end
    decay: Tensor  # [C, R, K, 1], over the chunk
    length: int  # tokens, without those that fill the last chunk


class TorchKDA(SegmentEngine[_Prepared]):
    """The reference engine of KDA: plain torch, any float dtype, any device."""

    op = "kda"
    token_names = ("v", "q", "k", "g", "beta")
    parameter_names = ("A_log", "dt_bias")

    def slot_shapes(self, facts: OpFacts) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """State ``[HV, K, V]``, transition ``[HV, K, K]``."""
        heads, keys = facts.value_heads, facts.key_dim
        return (heads, keys, facts.value_dim), (heads, keys, keys)

    def state_shape(self, inputs: KDAInputs) -> tuple[int, ...]:
        """State ``[HV, K, V]``."""
        return (inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3])

    def block_tokens(self, inputs: KDAInputs) -> int:
        """Bound the largest temporaries: decays between a chunk's tokens, a state per chunk."""
        batch, _, heads, values = inputs.v.shape
        per_chunk = batch * heads * inputs.k.shape[3] * max(_CHUNK * _CHUNK, values)
        return _CHUNK * max(1, BLOCK_ELEMENTS // max(1, per_chunk))

    def prepare(self, block: Block) -> _Prepared:
        """Compute all matrices of the chunks."""
        q, k, v, g, beta = _activate(block)
        scores = (between(g) * k[:, :, None]) @ torch.stack((q, k), -1)
        start = from_start(g)
        solved = torch.linalg.solve_triangular(
            beta * scores[..., 1].tril(-1),
            beta * torch.cat((v, k * start), -1),
            upper=False,
            unitriangular=True,
        )
        drive, erase = solved.split((v.shape[-1], k.shape[-1]), -1)
        return _Prepared(
            query=q * start,
            attention=scores[..., 0].tril(),
            erase=erase,
            drive=drive,
            write=(k * to_end(g)).mT,
            decay=start[:, :, -1, :, None],
            length=block.length,
        )

    def run(self, prepared: _Prepared, state: Tensor) -> tuple[Tensor, Tensor]:
        """Chain the states over the chunks, then compute all outputs at once."""
        entering, written = [], []
        last = state.flatten(0, 1)
        for erase, drive, write, decay in _steps(prepared, prepared.drive):
            entering.append(last)
            written.append(torch.baddbmm(drive, erase, last, alpha=-1))
            last = torch.baddbmm(decay * last, write, written[-1])
        out = prepared.query @ torch.stack(entering) + prepared.attention @ torch.stack(written)
        return from_chunks(out, state.shape[0], prepared.length), last.view_as(state)

    def advance(self, prepared: _Prepared, state: Tensor) -> Tensor:
        """Chain the states over the chunks."""
        return _chain(prepared, prepared.drive, state)

    def transition(self, prepared: Iterable[_Prepared], state: Tensor) -> Tensor:
        """Run the recurrence without values from the identity."""
        batch, heads, keys, _ = state.shape
        matrix = torch.eye(keys, dtype=state.dtype, device=state.device)
        matrix = matrix.expand(batch, heads, keys, keys)
        for block in prepared:
            matrix = _chain(block, torch.zeros_like(block.erase), matrix)
        return matrix


def _steps(prepared: _Prepared, drive: Tensor) -> Iterator[tuple[Tensor, ...]]:
    # Not indexed chunk by chunk: the backward of an index fills a tensor of all chunks each time.
    columns = (prepared.erase, drive, prepared.write, prepared.decay)
    return zip(*(x.unbind() for x in columns), strict=True)


def _chain(prepared: _Prepared, drive: Tensor, state: Tensor) -> Tensor:
    last = state.flatten(0, 1)
    for erase, values, write, decay in _steps(prepared, drive):
        written = torch.baddbmm(values, erase, last, alpha=-1)
        last = torch.baddbmm(decay * last, write, written)
    return last.view_as(state)


def _activate(block: Block) -> tuple[Tensor, ...]:
    """Apply the options to the inputs and cut them into chunks.

    Returns:
        q (scaled), k ``[C, R, c, K]``; v ``[C, R, c, V]``; g (not below FORGET) ``[C, R, c, K]``;
        beta ``[C, R, c, 1]``.
    """
    options: KDAOptions = block.options
    q, k, v = block.token("q"), block.token("k"), block.token("v")
    g, beta = block.token("g"), block.token("beta")
    if options.use_qk_l2norm_in_kernel:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    if options.use_gate_in_kernel:
        g = log_decay(
            g, block.parameters["A_log"], block.parameters["dt_bias"], options.lower_bound
        )
    if options.use_beta_sigmoid_in_kernel:
        beta = beta.sigmoid() * (2.0 if options.allow_neg_eigval else 1.0)
    copies = v.shape[2] // q.shape[2]
    q, k = (x[:, :, :, None].expand(-1, -1, -1, copies, -1).flatten(2, 3) for x in (q, k))
    cut = (q * options.scale, k, v, g.clamp(min=FORGET), beta[..., None])
    return tuple(to_chunks(x, _CHUNK) for x in cut)


def log_decay(
    x: Tensor, a_log: Tensor | None, bias: Tensor | None, lower_bound: float | None
) -> Tensor:
    """Return the log decay of the gate's input ``[..., HV, K]``; finite, gradients too."""
    if bias is not None:
        x = x + bias
    a_log = (x.new_zeros(x.shape[-2]) if a_log is None else a_log)[:, None]
    if lower_bound is not None:
        # Half of the exponent's range: the sigmoid saturates long before, and what its gradient is
        # multiplied with stays finite.
        rate = a_log.clamp(max=math.log(torch.finfo(x.dtype).max) / 2).exp()
        return lower_bound * (rate * x).sigmoid()
    # In logs, where a huge rate and a tiny softplus neither overflow nor vanish before they meet.
    log_softplus = torch.where(x < -30, x, functional.softplus(x.clamp(min=-30)).log())
    return -(a_log + log_softplus).clamp(max=math.log(-FORGET)).exp()
