# SPDX-License-Identifier: Apache-2.0
"""``chunk_kda`` as the whole-op benches see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cptransport.bench.layer_stage import LayerOp, Tensors
from cptransport.context import CPContext
from cptransport.ops import chunk_kda, kda_backward, kda_forward

__all__ = ["KDAShape", "kda_layer"]


@dataclass(frozen=True)
class KDAShape:
    """A configuration; JSON values.

    Attributes:
        tokens: of each rank. heads, value_heads, key_dim, value_dim: H, HV, K, V.
        gate_mean: of the log decays.
    """

    tokens: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    gate_mean: float


def kda_layer(shape: KDAShape) -> LayerOp:
    """Return the op in a configuration."""
    heads, value_heads = shape.heads, shape.value_heads
    key_dim, value_dim = shape.key_dim, shape.value_dim

    def inputs(tokens: int, generator: torch.Generator) -> Tensors:
        made: dict[str, Any] = {"generator": generator, "device": generator.device}
        made["dtype"] = torch.float64

        def normal(*sizes: int) -> Tensor:
            return torch.randn(1, tokens, *sizes, **made)

        return {
            "q": functional.normalize(normal(heads, key_dim), dim=-1),
            "k": functional.normalize(normal(heads, key_dim), dim=-1),
            "v": normal(value_heads, value_dim),
            "g": 2 * shape.gate_mean * torch.rand(1, tokens, value_heads, key_dim, **made),
            "beta": normal(value_heads).sigmoid(),
        }

    def call(x: Mapping[str, Any], cp: CPContext, engine: str | None) -> Tensor:
        return chunk_kda(**x, cp_context=cp, engine=engine)[0]

    def explicit(x: Mapping[str, Any], cp: CPContext, engine: str | None, grad: Tensor) -> Tensors:
        result = kda_forward(**x, cp_context=cp, engine=engine)
        grads = kda_backward(result.saved, grad)
        return {"o": result.o, **{name: getattr(grads, f"d{name}") for name in x}}

    return LayerOp(
        case="kda",
        op="kda",
        tokens=shape.tokens,
        inputs=inputs,
        narrow=frozenset(("q", "k", "v")),
        sharded=frozenset(("q", "k", "v", "g", "beta")),
        output_like="v",
        call=call,
        explicit=explicit,
        shape={"H": heads, "HV": value_heads, "K": key_dim, "V": value_dim, "chunk_size": None},
        options={"gate_mean": shape.gate_mean},
        distribution="q, k normalised N(0, 1); v N(0, 1); g uniform between 0 and twice its mean; "
        "beta sigmoid of N(0, 1); gradient of o N(0, 1)",
    )
