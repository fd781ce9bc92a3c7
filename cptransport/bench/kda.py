# SPDX-License-Identifier: Apache-2.0
"""``bench kda``: ``chunk_kda`` of one rank with its boundary, without it, and peers; alone or among real ranks."""

from __future__ import annotations

import argparse

from cptransport.bench.baselines import BASELINES
from cptransport.bench.cases import Case, Measured, Progress, positive
from cptransport.bench.kda_op import KDAShape, kda_layer
from cptransport.bench.layer import measure_layers
from cptransport.bench.layer_options import add_layer_arguments, add_rank_arguments, shapes
from cptransport.bench.layer_ranks import measure_on_ranks

__all__ = ["CASE"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_layer_arguments(parser, list(BASELINES["kda"]), heads=4)
    add_rank_arguments(parser, "measure on all ranks of this backend, FLA over torch.distributed")
    parser.add_argument(
        "--group-size", type=positive, default=1, help="value heads per query head (default 1)"
    )
    parser.add_argument("--key-dim", type=positive, default=64, help="K (default 64)")
    parser.add_argument("--value-dim", type=positive, default=64, help="V (default 64)")
    parser.add_argument(
        "--gate-mean",
        action="append",
        type=float,
        help="mean of the log decay g (default -1); several times: all of them",
    )


def _measure(args: argparse.Namespace, progress: Progress) -> Measured:
    made = []
    for gate_mean in dict.fromkeys(args.gate_mean or [-1.0]):
        if gate_mean > 0:
            raise ValueError(f"--gate-mean must not be positive, got {gate_mean}")
        for tokens, heads in shapes(args):
            if heads % args.group_size:
                raise ValueError(f"{heads} heads do not divide by --group-size {args.group_size}")
            queries = heads // args.group_size
            made.append(KDAShape(tokens, queries, heads, args.key_dim, args.value_dim, gate_mean))
    if args.backend:
        return measure_on_ranks(made, args, progress)
    return measure_layers([kda_layer(shape) for shape in made], args, progress)


CASE = Case(
    name="kda",
    summary="chunk_kda of one rank with its boundary, without it, and peers; alone or among real ranks",
    add_arguments=_add_arguments,
    measure=_measure,
    slow_on_cpu=True,
)
