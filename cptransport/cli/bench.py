# SPDX-License-Identifier: Apache-2.0
"""``cptransport bench CASE``: measure, and write a document of schema ``cptransport.bench/1``."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from cptransport.bench.cases import CASES, Progress, add_arguments, load_case, run_case
from cptransport.bench.launch import close_ranks, torchrun_world
from cptransport.bench.schema import problems, write

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "bench",
        help="measure the boundary of any backend, or a whole op with and without its boundary",
        description="Measures a case. Every configuration is checked in the same run first; what fails "
        "stays in the result as a row with its reason. Exit code 1: some row failed.",
    )
    cases = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    for name in CASES:
        case = load_case(name)
        options = cases.add_parser(name, help=case.summary, description=case.summary)
        add_arguments(options, case)


def run(args: argparse.Namespace) -> int:
    """Measure, then print tables or JSON."""
    first = (torchrun_world() or (0, 1))[0] == 0
    try:
        progress = _progress() if first else _quiet
        document = run_case(load_case(args.case), args, progress)
        progress("done", 1.0)
    finally:
        close_ranks()
    failed = any(row["status"] == "error" for row in document["rows"])
    if not first:
        return int(failed)
    _clear()
    to_file = args.json is not None and str(args.json) != "-"
    # What is not of the schema goes to a file whatever was asked for: ``write`` keeps it and raises.
    if to_file or problems(document):
        write(document, args.json if to_file else Path(f"bench-{args.case}.json"))
    if str(args.json) == "-":
        print(json.dumps(document, indent=1, allow_nan=False))
        return int(failed)
    if to_file:
        print(f"wrote {args.json}", file=sys.stderr)
    from cptransport.bench.render import markdown
    from cptransport.bench.report import blocks

    print(markdown(blocks(document)))
    return int(failed)


def _progress() -> Progress:
    """Return what shows progress on stderr: a bar, or where nobody looks a line per step, with its time."""
    started = time.monotonic()

    def bar(text: str, done: float) -> None:
        width = shutil.get_terminal_size().columns - 1
        shown = f"[{'#' * round(20 * done):<20}] {text}"[:width]
        sys.stderr.write(f"\r\x1b[K{shown}")
        sys.stderr.flush()

    def line(text: str, done: float) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {text}", file=sys.stderr, flush=True)

    return bar if sys.stderr.isatty() else line


def _quiet(text: str, done: float) -> None:
    pass


def _clear() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K")
