# SPDX-License-Identifier: Apache-2.0
"""``bench kda``: ``chunk_kda`` of an interior rank with its boundary, without it, and peers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cptransport.bench.cases import Case, Measured, Progress, positive
from cptransport.bench.layer import add_layer_arguments, measure_layer
from cptransport.bench.layer_stage import LayerOp, Tensors
from cptransport.context import CPContext
from cptransport.ops import chunk_kda, kda_backward, kda_forward

__all__ = ["CASE"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser, "kda")
    parser.add_argument("--heads", type=positive, default=4, help="H (default 4)")
    parser.add_argument("--value-heads", type=positive, help="HV, a multiple of H (default H)")
    parser.add_argument("--key-dim", type=positive, default=64, help="K (default 64)")
    parser.add_argument("--value-dim", type=positive, default=64, help="V (default 64)")
    parser.add_argument(
        "--gate-mean", type=float, default=-1.0, help="mean of the log decay g (default -1)"
    )


def _measure(args: argparse.Namespace, progress: Progress) -> Measured:
    heads, key_dim, value_dim = args.heads, args.key_dim, args.value_dim
    value_heads = args.value_heads or heads
    if args.gate_mean > 0:
        raise ValueError(f"--gate-mean must not be positive, got {args.gate_mean}")

    def inputs(tokens: int, generator: torch.Generator) -> Tensors:
        def normal(*shape: int) -> Tensor:
            return torch.randn(1, tokens, *shape, generator=generator, dtype=torch.float64)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(1, tokens, *shape, generator=generator, dtype=torch.float64)

        return {
            "q": functional.normalize(normal(heads, key_dim), dim=-1),
            "k": functional.normalize(normal(heads, key_dim), dim=-1),
            "v": normal(value_heads, value_dim),
            "g": 2 * args.gate_mean * uniform(value_heads, key_dim),
            "beta": normal(value_heads).sigmoid(),
        }

    def call(x: Mapping[str, Any], cp: CPContext, engine: str | None) -> Tensor:
        return chunk_kda(**x, cp_context=cp, engine=engine)[0]

    def explicit(x: Mapping[str, Any], cp: CPContext, engine: str | None, grad: Tensor) -> Tensors:
        result = kda_forward(**x, cp_context=cp, engine=engine)
        grads = kda_backward(result.saved, grad)
        return {"o": result.o, **{name: getattr(grads, f"d{name}") for name in x}}

    layer = LayerOp(
        case="kda",
        op="kda",
        inputs=inputs,
        narrow=frozenset(("q", "k", "v")),
        sharded=frozenset(("q", "k", "v", "g", "beta")),
        output_like="v",
        call=call,
        explicit=explicit,
        shape={"H": heads, "HV": value_heads, "K": key_dim, "V": value_dim, "chunk_size": None},
        options={"gate_mean": args.gate_mean},
        distribution=f"q, k normalised N(0, 1); v N(0, 1); g uniform with mean {args.gate_mean:g}; "
        "beta sigmoid of N(0, 1); gradient of o N(0, 1)",
    )
    return measure_layer(layer, args, progress)


CASE = Case(
    name="kda",
    summary="chunk_kda of an interior rank with its boundary, without it, and peers without CP",
    add_arguments=_add_arguments,
    measure=_measure,
    slow_on_cpu=True,
)
