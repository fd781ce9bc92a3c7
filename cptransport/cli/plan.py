# SPDX-License-Identifier: Apache-2.0
"""``cptransport plan``: who owns which tokens, what moves, and what it is predicted to take."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cptransport import registry
from cptransport.composition import COMPOSITIONS
from cptransport.cost import choose, costs_of, predict
from cptransport.layouts import LAYOUTS
from cptransport.plan import Plan, build_plan
from cptransport.transport import PartSpec, Slot

__all__ = ["add_parser", "boundaries", "draw", "offsets", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "plan",
        help="who owns which tokens, and what moves",
        description="Prints the plan of a packed stream: every rank's segments, every sequence's "
        "chain of ranks, how many summaries each rank receives in each composition, what that is "
        "predicted to take, and which composition `auto` takes.",
    )
    parser.add_argument(
        "--cu-seqlens",
        type=offsets,
        required=True,
        metavar="0,5,13",
        help="offsets of the sequences in the packed stream",
    )
    parser.add_argument(
        "--world-size", type=int, required=True, metavar="N", help="number of ranks"
    )
    parser.add_argument(
        "--layout",
        default="contiguous",
        metavar="NAME",
        help=f"{', '.join(LAYOUTS)} (default contiguous)",
    )
    parser.add_argument(
        "--boundaries",
        type=boundaries,
        metavar="0,4,13",
        help="where ranks start, for contiguous; for custom the pieces as RANK:START:STOP,...",
    )
    parser.add_argument(
        "--padded-cu-seqlens",
        type=offsets,
        metavar="0,8,16",
        help="rows where the sequences start in the padded buffer",
    )
    parser.add_argument(
        "--op", choices=("kda", "ssd"), default="kda", help="whose summaries move (default kda)"
    )
    for name, default, what in (
        ("--heads", 32, "HV or nheads"),
        ("--key-dim", 128, "K or dstate"),
        ("--value-dim", 128, "V or headdim"),
        ("--batch", 1, "B"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{what} (default {default})"
        )
    parser.add_argument(
        "--backend", default="gloo", metavar="NAME", help="what moves them (default gloo)"
    )
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="also draw it (needs 'cptransport[bench]')"
    )


def run(args: argparse.Namespace) -> int:
    """Print the plan and what it costs, and draw it when asked to."""
    plan = build_plan(
        args.cu_seqlens,
        world_size=args.world_size,
        layout=args.layout,
        boundaries=args.boundaries,
        padded_cu_seqlens=args.padded_cu_seqlens,
    )
    backend = registry.load_backend(args.backend).spec
    lines = list(_costs(plan, args, backend.name, backend.capabilities.pairwise))
    print("\n".join([plan.describe(), *lines]))
    if args.plot is not None:
        draw(plan, args.plot)
        print(f"drawn in {args.plot}")
    return 0


def _costs(plan: Plan, args: argparse.Namespace, backend: str, pairwise: bool) -> Iterator[str]:
    parts = _parts(plan, args)
    choice = choose(plan, parts, backend, pairwise)
    yield (
        f"{args.op}, {args.heads} heads, K {args.key_dim}, V {args.value_dim}, batch {args.batch}, "
        f"float32, on {backend}, forward and backward: auto takes {choice.composition}"
    )
    for composition in COMPOSITIONS:
        if composition == "handoff" and not pairwise:
            yield f"  handoff: not served, {backend} is not pairwise"
            continue
        volume = plan.volume(Slot("plan", parts), composition)
        received = max(map(sum, zip(volume.forward, volume.backward, strict=True)))
        seconds = predict(plan, parts, composition, costs_of(backend))
        yield f"  {composition}: predicted {seconds * 1e6:.0f} us, a rank receives up to {received} bytes"


def _parts(plan: Plan, args: argparse.Namespace) -> tuple[PartSpec, PartSpec]:
    rows = plan.max_segments * args.batch
    state = (rows, args.heads, args.key_dim, args.value_dim)
    transition: tuple[int, ...] = (rows, args.heads, args.key_dim, args.key_dim)
    if args.op == "ssd":
        state, transition = (rows, args.heads, args.value_dim, args.key_dim), (rows, args.heads)
    return (
        PartSpec("state", state, torch.float32),
        PartSpec("transition", transition, torch.float32),
    )


def draw(plan: Plan, path: Path) -> None:
    """Draw the stream, one lane per rank, coloured by sequence, with an arrow wherever state crosses ranks.

    Args:
        plan: what to draw.
        path: the file; its ending says the format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written in that place or format.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--plot needs {error.name}: pip install 'cptransport[bench]'", name=error.name
        ) from error

    figure = Figure(figsize=(10, 1.2 + 0.5 * plan.world_size), layout="constrained")
    axes = figure.subplots()
    for run in plan.runs:  # the outline shows padding as an empty box
        axes.broken_barh(
            [(run.start, run.stop - run.start)],
            (run.rank - 0.4, 0.8),
            facecolors="none",
            edgecolors="0.6",
        )
    for segment in plan.segments:
        axes.broken_barh(
            [(segment.start, segment.length)],
            (segment.rank - 0.4, 0.8),
            facecolors=f"C{segment.sequence % 10}",
            edgecolors="black",
        )
        if segment.length:
            middle = (segment.start + segment.stop) / 2
            axes.text(middle, segment.rank, str(segment.sequence), ha="center", va="center")
    for before, after in zip(plan.segments, plan.segments[1:], strict=False):
        if before.sequence == after.sequence and before.rank != after.rank:
            axes.annotate(
                "",
                xy=(after.start, after.rank),
                xytext=(before.stop, before.rank),
                arrowprops={"arrowstyle": "->", "color": "0.3"},
            )
    axes.set_xlim(0, max(plan.total_rows, 1))
    axes.set_ylim(plan.world_size - 0.5, -0.5)
    axes.set_yticks(range(plan.world_size), [f"rank {rank}" for rank in range(plan.world_size)])
    axes.set_xlabel("row of the packed stream; the numbers are sequences, the arrows carry state")
    axes.set_title(f"{plan.layout}, {plan.num_sequences} sequences on {plan.world_size} ranks")
    figure.savefig(path, dpi=120)


def offsets(text: str) -> list[int]:
    """Parse ``0,5,13``."""
    return [_integer(word) for word in text.split(",")]


def boundaries(text: str) -> list[int] | list[tuple[int, ...]]:
    """Parse ``0,4,13``, or pieces ``RANK:START:STOP,...``."""
    if ":" not in text:
        return offsets(text)
    return [tuple(_integer(word) for word in piece.split(":")) for piece in text.split(",")]


def _integer(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not an integer") from None
