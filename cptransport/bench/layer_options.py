# SPDX-License-Identifier: Apache-2.0
"""The options that whole-op benches share."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

from cptransport.bench.cases import positive
from cptransport.composition import COMPOSITIONS

__all__ = ["add_layer_arguments", "add_rank_arguments", "shapes"]


def add_layer_arguments(
    parser: argparse.ArgumentParser, baselines: Sequence[str], *, heads: int
) -> None:
    """Add what to measure.

    Args:
        parser: of the case.
        baselines: names of peers.
        heads: default of ``--heads``.
    """
    parser.add_argument("--tokens", type=positive, default=4096, help="local (default 4096)")
    parser.add_argument(
        "--heads", type=positive, default=heads, help=f"value heads, nheads (default {heads})"
    )
    parser.add_argument(
        "--shape",
        action="append",
        type=_shape,
        metavar="TxH",
        help="local tokens and heads, in place of --tokens and --heads; several times: all of them",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        default=4,
        help="ranks; one recorded rank needs at least 3 (default 4)",
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32"
    )
    parser.add_argument(
        "--engine",
        action="append",
        help="several times: all of them, side by side (default: CULA_CP_ENGINE, else auto)",
    )
    parser.add_argument(
        "--set",
        action="append",
        type=_setting,
        metavar="NAME=VALUE",
        help="a variable of an engine's own: measure that engine once more with it",
    )
    parser.add_argument(
        "--overlap", action="store_true", help="measure with CULA_CP_OVERLAP=1 beside 0"
    )
    parser.add_argument(
        "--baseline", action="append", choices=baselines, help="a peer; may be given several times"
    )
    parser.add_argument(
        "--baseline-shape",
        action="append",
        metavar="TxH",
        help="peers at these shapes only (default: all); their kernels are tuned anew for each",
    )
    parser.add_argument(
        "--baseline-limit-s",
        type=float,
        default=300.0,
        help="for preparing a peer at a shape, tuning included (default 300)",
    )


def add_rank_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Add where real ranks run, in place of the one recorded rank."""
    parser.add_argument(
        "--backend",
        action="append",
        help=f"{what}; several times: all of them, interleaved by repeat",
    )
    parser.add_argument(
        "--ranks-per-device", type=positive, help="with CUDA (default: as few as there must be)"
    )
    parser.add_argument(
        "--composition",
        action="append",
        choices=COMPOSITIONS,
        help="of real ranks; several times: all of them (default: what CULA_CP_COMPOSITION says)",
    )


def shapes(args: argparse.Namespace) -> list[tuple[int, int]]:
    """Return (local tokens, heads) of every configuration."""
    return list(dict.fromkeys(args.shape or [(args.tokens, args.heads)]))


def _setting(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _shape(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"must be TOKENSxHEADS, such as 2048x16, got {text!r}")
    return int(found[1]), int(found[2])
