# SPDX-License-Identifier: Apache-2.0
"""``bench mamba2``: the SSD core of one rank with its boundary, without it, and peers; the mixer core in all modes."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cptransport.bench.baselines import BASELINES
from cptransport.bench.cases import Case, Measured, Progress, positive
from cptransport.bench.layer import measure_layers
from cptransport.bench.layer_options import add_layer_arguments, add_rank_arguments, shapes
from cptransport.bench.layer_stage import LayerOp, Tensors
from cptransport.bench.mixer import add_mixer_arguments, measure_mixer
from cptransport.context import CPContext
from cptransport.ops import mamba_chunk_scan_combined, ssd_backward, ssd_forward

__all__ = ["CASE"]


@dataclass(frozen=True)
class Shape:
    """A configuration; JSON values.

    Attributes:
        tokens: of each rank. heads, groups, headdim, dstate, chunk_size: of the core.
    """

    tokens: int
    heads: int
    groups: int
    headdim: int
    dstate: int
    chunk_size: int


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser, [*BASELINES["ssd"], "all_to_all"], heads=8)
    add_rank_arguments(
        parser, "measure the mixer core on all ranks of this backend (all_to_all needs that)"
    )
    add_mixer_arguments(parser)
    parser.add_argument("--groups", type=positive, default=1, help="ngroups (default 1)")
    parser.add_argument("--headdim", type=positive, default=64, help="default 64")
    parser.add_argument("--dstate", type=positive, default=128, help="default 128")
    parser.add_argument("--chunk-size", type=positive, default=128, help="default 128")


def _measure(args: argparse.Namespace, progress: Progress) -> Measured:
    if args.backend or args.load_balancing or "all_to_all" in (args.baseline or []):
        return measure_mixer(args, progress)
    layers = [
        layer(Shape(tokens, heads, args.groups, args.headdim, args.dstate, args.chunk_size))
        for tokens, heads in shapes(args)
    ]
    return measure_layers(layers, args, progress)


def layer(shape: Shape) -> LayerOp:
    """Return the SSD core in a configuration."""
    heads, groups, chunk_size = shape.heads, shape.groups, shape.chunk_size

    def inputs(tokens: int, generator: torch.Generator) -> Tensors:
        made: dict[str, Any] = {"dtype": torch.float64, "device": generator.device}

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, **made)

        # As the layer is initialised: A in [-16, -1], steps between 1e-3 and 1e-1.
        steps = torch.empty(heads, **made).uniform_(-6.9, -2.3, generator=generator).exp()
        decay = torch.empty(heads, **made).uniform_(1, 16, generator=generator)
        return {
            "x": normal(1, tokens, heads, shape.headdim),
            "dt": normal(1, tokens, heads),
            "A": -decay,
            "B": normal(1, tokens, groups, shape.dstate),
            "C": normal(1, tokens, groups, shape.dstate),
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

    return LayerOp(
        case="mamba2",
        op="ssd",
        tokens=shape.tokens,
        inputs=inputs,
        narrow=frozenset(("x", "B", "C")),
        sharded=frozenset(("x", "dt", "B", "C")),
        output_like="x",
        call=call,
        explicit=explicit,
        shape={
            "H": groups,
            "HV": heads,
            "K": shape.dstate,
            "V": shape.headdim,
            "chunk_size": chunk_size,
        },
        options={"chunk_size": chunk_size},
        distribution="x, dt, B, C, D and the gradient of y N(0, 1); A uniform in [-16, -1]; "
        "dt_bias for steps between 1e-3 and 1e-1",
    )


CASE = Case(
    name="mamba2",
    summary="the SSD core of one rank with its boundary, without it, and peers; the mixer core in all modes",
    add_arguments=_add_arguments,
    measure=_measure,
    slow_on_cpu=True,
)
