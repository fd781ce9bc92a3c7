# SPDX-License-Identifier: Apache-2.0
"""A hybrid language model over bytes: a KDA block, a Mamba2 block and an MLP, tied embedding.

Nothing here knows how many ranks there are: ``cp_context`` goes into the ops, everything else works
token by token.
"""

from __future__ import annotations

import threading
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cptransport.context import CPContext
from cptransport.ops import causal_conv1d, chunk_kda, mamba_split_conv1d_scan_combined

__all__ = ["HybridModel", "KDABlock", "Mamba2Block"]

_CONV_WIDTH = 4

#: Initial weights come from torch's default generator, which the ranks of one process share.
_building = threading.Lock()


class KDABlock(nn.Module):
    """Causal convolution over q, k, v, then Kimi Delta Attention with its gate inside."""

    def __init__(
        self, dim: int, heads: int, value_heads: int, key_dim: int, value_dim: int
    ) -> None:
        super().__init__()
        self.query_shape, self.value_shape = (heads, key_dim), (value_heads, value_dim)
        self.gate_shape = (value_heads, key_dim)
        self.sizes = [heads * key_dim, heads * key_dim, value_heads * value_dim]
        channels = sum(self.sizes)
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.qkv = nn.Linear(dim, channels, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(channels, _CONV_WIDTH) * _CONV_WIDTH**-0.5)
        self.gate = nn.Linear(dim, value_heads * key_dim, bias=False)
        self.beta = nn.Linear(dim, value_heads, bias=False)
        self.A_log = nn.Parameter(torch.linspace(1.0, 8.0, value_heads).log())
        self.dt_bias = nn.Parameter(
            _inverse_softplus(torch.logspace(-3, -1, value_heads * key_dim))
        )
        self.out_norm = nn.RMSNorm(value_dim, eps=1e-6)
        self.out = nn.Linear(value_heads * value_dim, dim, bias=False)

    def forward(self, x: Tensor, cp: CPContext) -> Tensor:
        """Map ``[1, T, dim]`` to the same shape, T the local length."""
        x = self.norm(x)
        qkv, _ = causal_conv1d(self.qkv(x), self.conv_weight, cp_context=cp, activation="silu")
        q, k, v = torch.split(qkv, self.sizes, dim=-1)
        rows = x.shape[:2]
        o, _ = chunk_kda(
            q.reshape(*rows, *self.query_shape),
            k.reshape(*rows, *self.query_shape),
            v.reshape(*rows, *self.value_shape),
            self.gate(x).reshape(*rows, *self.gate_shape),
            self.beta(x),
            cp_context=cp,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        return cast("Tensor", self.out(self.out_norm(o).flatten(-2)))


class Mamba2Block(nn.Module):
    """Mamba2's mixer: one projection in, convolution, scan and gate, one projection out."""

    def __init__(self, dim: int, nheads: int, headdim: int, ngroups: int, dstate: int) -> None:
        super().__init__()
        self.headdim, self.ngroups = headdim, ngroups
        inner = nheads * headdim
        channels = inner + 2 * ngroups * dstate
        self.norm = nn.RMSNorm(dim, eps=1e-6)
        self.zxbcdt = nn.Linear(dim, inner + channels + nheads, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(channels, _CONV_WIDTH) * _CONV_WIDTH**-0.5)
        self.conv_bias = nn.Parameter(torch.zeros(channels))
        self.dt_bias = nn.Parameter(_inverse_softplus(torch.logspace(-3, -1, nheads)))
        self.A_log = nn.Parameter(torch.linspace(1.0, 8.0, nheads).log())
        self.D = nn.Parameter(torch.ones(nheads))
        self.out_norm = nn.RMSNorm(inner, eps=1e-6)
        self.out = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor, cp: CPContext) -> Tensor:
        """Map ``[1, T, dim]`` to the same shape, T the local length."""
        y = mamba_split_conv1d_scan_combined(
            self.zxbcdt(self.norm(x)),
            self.conv_weight,
            self.conv_bias,
            self.dt_bias,
            -self.A_log.exp(),
            self.D,
            chunk_size=64,
            cp_context=cp,
            headdim=self.headdim,
            ngroups=self.ngroups,
        )
        assert isinstance(y, Tensor)  # a pair only with return_final_states
        return cast("Tensor", self.out(self.out_norm(y)))


class HybridModel(nn.Module):
    """Next-byte prediction; logits come from the embedding's own rows.

    Args:
        seed: same seed, same weights, on every rank.
    """

    def __init__(self, seed: int, dim: int = 64) -> None:
        super().__init__()
        with _building, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(256, dim)
            nn.init.normal_(self.embedding.weight, std=dim**-0.5)
            self.kda = KDABlock(dim, heads=2, value_heads=4, key_dim=16, value_dim=24)
            self.mamba = Mamba2Block(dim, nheads=4, headdim=32, ngroups=2, dstate=16)
            self.mlp = nn.Sequential(
                nn.RMSNorm(dim, eps=1e-6),
                nn.Linear(dim, 3 * dim, bias=False),
                nn.SiLU(),
                nn.Linear(3 * dim, dim, bias=False),
            )
            self.norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, tokens: Tensor, targets: Tensor, cp: CPContext) -> Tensor:
        """Return the sum over local tokens of the cross entropy, in nats.

        Args:
            tokens, targets: (int64, ``[T]``), T the local length, 0 too.
            cp: who holds the other tokens.

        Collective: yes, over the context's transport; so is its backward.
        """
        x = self.embedding(tokens)[None]
        x = x + self.kda(x, cp)
        x = x + self.mamba(x, cp)
        x = x + self.mlp(x)
        logits = F.linear(self.norm(x[0]), self.embedding.weight)
        return F.cross_entropy(logits, targets, reduction="sum")


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))
