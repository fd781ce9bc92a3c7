# SPDX-License-Identifier: Apache-2.0
"""``cptransport report FILES --out DIR``: benchmark documents as Markdown, plots and one HTML page."""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cptransport.bench.schema import read
from cptransport.errors import UnsupportedOptionError

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "report",
        help="render results of bench",
        description="Checks documents of schema cptransport.bench/1 and renders them: report.md, plots as "
        "PNG, and report.html, which needs no other file.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILES", help="from bench --json")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="made if missing")


def run(args: argparse.Namespace) -> int:
    """Render."""
    documents = [read(path) for path in args.files]
    if find_spec("matplotlib") is None:
        raise UnsupportedOptionError("plots need matplotlib: pip install 'cptransport[bench]'")
    from cptransport.bench.render import write_report

    for path in write_report(documents, args.out):
        print(path)
    return 0
