# SPDX-License-Identifier: Apache-2.0
"""``cptransport demo``: a hybrid KDA + Mamba2 language model, sharded, against itself unsharded."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cptransport.demo import Outcome, Settings, Step

__all__ = ["add_parser", "run"]

_BAR = 30


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "demo",
        help="train a small hybrid model, sharded, and compare every step with the unsharded run",
        description="Trains a small hybrid KDA + Mamba2 language model on a book, sequence-sharded "
        "over ranks. Every step's loss and gradients are compared with the unsharded ones at the same "
        "weights. Exit code 1: some difference is above 1e-5 relative in fp32.",
    )
    parser.add_argument("--ranks", type=_positive, default=4, help="number of ranks (default 4)")
    parser.add_argument("--steps", type=_positive, default=80, help="optimizer steps (default 80)")
    parser.add_argument(
        "--backend",
        help="a backend's name; 'threads' runs the ranks in this process "
        "(default: CULA_CP_COMM_BACKEND, else auto)",
    )
    parser.add_argument(
        "--layout",
        default="zigzag",
        choices=("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence"),
        help="who owns which tokens (default zigzag)",
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--tokens",
        type=_positive,
        default=1021,
        help="bytes of a step's packed documents (default 1021)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data (default 0)")
    parser.add_argument(
        "--plot",
        type=Path,
        default=Path("cptransport-demo.png"),
        metavar="FILE",
        help="where the picture goes (default ./cptransport-demo.png)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo; 0: everything equal, 1: some difference is above the limit."""
    from cptransport.demo import Settings, run_demo, table

    settings = Settings(
        ranks=args.ranks,
        steps=args.steps,
        backend=args.backend,
        layout=args.layout,
        device=args.device,
        tokens=args.tokens,
        seed=args.seed,
    )
    progress = _Progress(settings)
    try:
        outcome = run_demo(settings, progress.step)
    finally:
        progress.end()
    print(table(outcome))
    print(f"seconds      {time.monotonic() - progress.start:.1f}, process start included")
    print(f"picture      {_plot(outcome, args.plot)}")
    return 0 if outcome.equal else 1


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _plot(outcome: Outcome, path: Path) -> str:
    try:
        from cptransport.demo.plot import plot

        plot(outcome, path)
    except ModuleNotFoundError:
        return "none: pip install 'cptransport[bench]' brings matplotlib"
    except (OSError, ValueError) as error:
        return f"none: {error}"
    return str(path)


class _Progress:
    """A bar on a terminal; a line now and then elsewhere."""

    def __init__(self, settings: Settings) -> None:
        self.start = time.monotonic()
        self._steps = settings.steps
        self._terminal = sys.stdout.isatty()
        self._open = False
        print(
            f"{settings.ranks} rank{'s' * (settings.ranks != 1)}, layout {settings.layout}, "
            f"{settings.tokens} bytes of packed documents per step; "
            "each step runs sharded and unsharded",
            flush=True,
        )

    def step(self, step: Step) -> None:
        """Show one step."""
        numbers = (
            f"step {step.number}/{self._steps}  loss {step.sharded:.4f} sharded, "
            f"{step.unsharded:.4f} unsharded  worst difference {step.worst:.1e}"
        )
        if self._terminal:
            done = _BAR * step.number // self._steps
            bar = f"[{'#' * done}{'.' * (_BAR - done)}] {numbers}"
            width = shutil.get_terminal_size().columns - 1  # a wrapped line could not be redrawn
            print(f"\r{bar[:width]}\x1b[K", end="", flush=True)
            self._open = True
        elif step.number == 1 or step.number % max(1, self._steps // 12) == 0:
            print(numbers, flush=True)

    def end(self) -> None:
        """Leave the line of the bar."""
        if self._open:
            print(flush=True)
        self._open = False
