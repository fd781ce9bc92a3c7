# SPDX-License-Identifier: Apache-2.0
"""Cutting a run of tokens into chunks, and decays inside a chunk.

A decay is never a quotient (the exponential of a difference of cumulative sums): every sum of gates
is formed directly, as the product of a 0/1 matrix with the gates. So a token that forgets
everything leaves the decays between other tokens alone, gradients have no cancelling terms, and
nothing overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

__all__ = [
    "BLOCK_ELEMENTS",
    "FORGET",
    "between",
    "from_chunks",
    "from_start",
    "to_chunks",
    "to_end",
]

#: Elements of the largest temporaries of a block: 32 MiB each in fp32.
BLOCK_ELEMENTS = 1 << 23

#: Log decay that stands for all smaller ones, -inf included: its exponential is 0, in fp64 too, and
#: unlike -inf it may meet a zero.
FORGET = -1000.0


def to_chunks(x: Tensor, size: int) -> Tensor:
    """Cut ``[B, L, H, F]`` into ``[C, B * H, size, F]``, the last chunk filled with zeros."""
    batch, length, heads, features = x.shape
    chunks = -(-length // size)
    x = functional.pad(x, (0, 0, 0, 0, 0, chunks * size - length))
    x = x.view(batch, chunks, size, heads, features).permute(1, 0, 3, 2, 4)
    return x.reshape(chunks, batch * heads, size, features)


def from_chunks(x: Tensor, batch: int, length: int) -> Tensor:
    """Join ``[C, B * H, size, F]`` to ``[B, L, H, F]``, dropping what ``to_chunks`` filled."""
    chunks, rows, size, features = x.shape
    x = x.view(chunks, batch, rows // batch, size, features).permute(1, 0, 3, 2, 4)
    return x.reshape(batch, chunks * size, rows // batch, features)[:, :length]


def from_start(log_decay: Tensor) -> Tensor:
    """Return the decay from before the chunk to after token i.

    Args:
        log_decay: ``[..., c, F]``, finite.

    Returns:
        ``[..., c, F]``, at i ``exp(sum of log_decay[m], m <= i)``.
    """
    i, m = _pairs(log_decay)
    return ((m <= i).to(log_decay) @ log_decay).exp()


def to_end(log_decay: Tensor) -> Tensor:
    """Return the decay from after token j to the chunk's end, shaped like ``from_start``'s."""
    j, m = _pairs(log_decay)
    return ((m > j).to(log_decay) @ log_decay).exp()


def between(log_decay: Tensor) -> Tensor:
    """Return the decay from after token j to after token i, for all pairs.

    Args:
        log_decay: ``[..., c, F]``, finite.

    Returns:
        ``[..., c, c, F]``, at (i, j) ``exp(sum of log_decay[m], j < m <= i)``; 1 for j > i.
    """
    size, features = log_decay.shape[-2:]
    i, m = _pairs(log_decay)
    inside = (m > i)[None] & (m <= i)[:, None]
    sums = inside.to(log_decay).view(size * size, size) @ log_decay
    return sums.exp().view(*log_decay.shape[:-2], size, size, features)


def _pairs(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.arange(log_decay.shape[-2], device=log_decay.device)
    return index[:, None], index[None, :]
