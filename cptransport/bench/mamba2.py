# SPDX-License-Identifier: Apache-2.0
"""``bench mamba2``: the SSD core of an interior rank with its boundary, without it, and peers."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cptransport.bench.cases import Case, Measured, Progress, positive
from cptransport.bench.layer import add_layer_arguments, measure_layer
from cptransport.bench.layer_stage import LayerOp, Tensors
from cptransport.context import CPContext
from cptransport.ops import mamba_chunk_scan_combined, ssd_backward, ssd_forward

__all__ = ["CASE"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser, "ssd")
    parser.add_argument("--heads", type=positive, default=8, help="nheads (default 8)")
    parser.add_argument("--groups", type=positive, default=1, help="ngroups (default 1)")
    parser.add_argument("--headdim", type=positive, default=64, help="default 64")
    parser.add_argument("--dstate", type=positive, default=128, help="default 128")
    parser.add_argument("--chunk-size", type=positive, default=128, help="default 128")


def _measure(args: argparse.Namespace, progress: Progress) -> Measured:
    heads, groups, chunk_size = args.heads, args.groups, args.chunk_size

    def inputs(tokens: int, generator: torch.Generator) -> Tensors:
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        # As the layer is initialised: A in [-16, -1], steps between 1e-3 and 1e-1.
        steps = torch.empty(heads, dtype=torch.float64)
        steps = steps.uniform_(-6.9, -2.3, generator=generator).exp()
        decay = torch.empty(heads, dtype=torch.float64).uniform_(1, 16, generator=generator)
        return {
            "x": normal(1, tokens, heads, args.headdim),
            "dt": normal(1, tokens, heads),
            "A": -decay,
            "B": normal(1, tokens, groups, args.dstate),
            "C": normal(1, tokens, groups, args.dstate),
            "D": normal(heads),
            "dt_bias": steps.expm1().log(),
        }

    def call(x: Mapping[str, Any], cp: CPContext, engine: str | None) -> Tensor:
        y = mamba_chunk_scan_combined(
            **x, chunk_size=chunk_size, cp_context=cp, dt_softplus=True, engine=engine
        )
        assert isinstance(y, Tensor)
        return y

    def explicit(x: Mapping[str, Any], cp: CPContext, engine: str | None, grad: Tensor) -> Tensors:
        result = ssd_forward(
            **x, chunk_size=chunk_size, cp_context=cp, dt_softplus=True, engine=engine
        )
        grads = ssd_backward(result.saved, grad)
        return {"o": result.y, **{name: getattr(grads, f"d{name}") for name in x}}

    layer = LayerOp(
        case="mamba2",
        op="ssd",
        inputs=inputs,
        narrow=frozenset(("x", "B", "C")),
        sharded=frozenset(("x", "dt", "B", "C")),
        output_like="x",
        call=call,
        explicit=explicit,
        shape={
            "H": groups,
            "HV": heads,
            "K": args.dstate,
            "V": args.headdim,
            "chunk_size": chunk_size,
        },
        options={"chunk_size": chunk_size},
        distribution="x, dt, B, C, D and the gradient of y N(0, 1); A uniform in [-16, -1]; "
        "dt_bias for steps between 1e-3 and 1e-1",
    )
    return measure_layer(layer, args, progress)


CASE = Case(
    name="mamba2",
    summary="the SSD core of an interior rank with its boundary, without it, and peers without CP",
    add_arguments=_add_arguments,
    measure=_measure,
    slow_on_cpu=True,
)
