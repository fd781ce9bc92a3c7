# SPDX-License-Identifier: Apache-2.0
"""The registry of bench cases, the options that they share, and the document that a run makes.

A new case is a module with a ``CASE`` and a line in ``CASES``.
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch

from cptransport.bench.machine import git_state, machine, sm_mhz, software
from cptransport.bench.rows import gate_of
from cptransport.bench.schema import SCHEMA_ID, SchemaError
from cptransport.bench.timing import launch_guard

__all__ = [
    "CASES",
    "Case",
    "Measured",
    "Progress",
    "add_arguments",
    "load_case",
    "one_by_one",
    "positive",
    "run_case",
]

#: Name -> ``module:ATTR`` of its ``Case``.
CASES = {
    "boundary": "cptransport.bench.boundary:CASE",
    "kda": "cptransport.bench.kda:CASE",
    "mamba2": "cptransport.bench.mamba2:CASE",
}

#: Called with what is going on and how far it is, 0 to 1.
Progress = Callable[[str, float], None]

T = TypeVar("T")


@dataclass(frozen=True)
class Measured:
    """What a case gives.

    Attributes:
        rows: of the document.
        world_size: the largest number of ranks that ran on this machine at once.
        gpus_used: by them.
        interleaving, input_distribution, verification: one sentence each, for the method block.
        bound: what ``bound_us`` is; None without one.
        peak_memory: what ``peak_mem_bytes`` is; None where it was not measured.
    """

    rows: list[dict[str, Any]]
    world_size: int
    gpus_used: int
    interleaving: str
    input_distribution: str
    verification: str
    bound: str | None = None
    peak_memory: str | None = None


@dataclass(frozen=True)
class Case:
    """A bench case.

    Attributes:
        name: as on the command line. summary: one line.
        add_arguments: adds the case's own options.
        measure: measures everything; takes the arguments and a ``Progress``.
        slow_on_cpu: measure less by default where there is no GPU.
    """

    name: str
    summary: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Progress], Measured]
    slow_on_cpu: bool = False


def load_case(name: str) -> Case:
    """Import a case of ``CASES``."""
    module, _, attribute = CASES[name].partition(":")
    case = getattr(import_module(module), attribute)
    assert isinstance(case, Case)
    return case


def one_by_one(
    what: str,
    configurations: Sequence[T],
    measure: Callable[[T, Progress], list[dict[str, Any]]],
    progress: Progress,
) -> tuple[list[dict[str, Any]], str]:
    """Measure configurations one after the other; an interrupt keeps those before it.

    Args:
        what: names them to ``progress``.
        configurations: at least one.
        measure: returns the rows of one.
        progress: told how far all of them are.

    Returns:
        All rows, and what to add to ``Measured.interleaving`` after an interrupt.

    Raises:
        KeyboardInterrupt: nothing was measured before it.
    """
    rows: list[dict[str, Any]] = []
    count = len(configurations)
    for number, one in enumerate(configurations):

        def step(text: str, done: float, number: int = number) -> None:
            progress(f"{what} {number + 1} of {count}: {text}", (number + done) / count)

        try:
            rows += measure(one, step)
        except KeyboardInterrupt:
            if not rows:
                raise
            step("interrupted; what came before it is kept", 0.0)
            return rows, f"; interrupted after {number} of {count} configurations"
    return rows, ""


def positive(text: str) -> int:
    """Parse an option that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be positive, got {value}")
    return value


def add_arguments(parser: argparse.ArgumentParser, case: Case) -> None:
    """Add the options of a case and those that all cases have."""
    case.add_arguments(parser)
    on_cuda = torch.cuda.is_available()
    few = case.slow_on_cpu and not on_cuda
    warmup, iterations, repeats = (1, 5, 2) if few else (5, 20, 5)
    measured = parser.add_argument_group("measurement")
    measured.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if on_cuda else "cpu")
    for name, default, what in (
        ("--warmup", warmup, "iterations thrown away in every repeat"),
        ("--iterations", iterations, "samples in every repeat"),
        ("--repeats", repeats, "repeats"),
    ):
        measured.add_argument(
            name, type=positive, default=default, help=f"{what} (default {default})"
        )
    measured.add_argument(
        "--l2", choices=("warm", "cold"), default="warm", help="cold: emptied before every sample"
    )
    measured.add_argument("--seed", type=int, default=0, help="of the random inputs (default 0)")
    measured.add_argument(
        "--timeout-s", type=float, default=300.0, help="of one repeat on all ranks (default 300)"
    )
    measured.add_argument(
        "--bandwidth-gbytes-s", type=float, help="adds the bound of moving the bytes at this rate"
    )
    written = parser.add_argument_group("result")
    written.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write the document there; - prints it, and nothing else, on stdout",
    )
    written.add_argument(
        "--commit", help="of a copy of the tree that has no git to tell it; dirty is then unknown"
    )
    written.add_argument(
        "--gate",
        type=Path,
        metavar="FILE",
        help="JSON of a test run with `passed` and `failed` (or `counts` of them) to count in the gate",
    )


def run_case(
    case: Case, args: argparse.Namespace, progress: Progress, command: Sequence[str] | None = None
) -> dict[str, Any]:
    """Measure a case and return its document, which nobody has checked against the schema yet.

    Args:
        case: what to measure.
        args: its options and the common ones.
        progress: see ``Progress``.
        command: argv; None: of this process.

    Raises:
        SchemaError: ``--gate`` names no test run.
    """
    started = datetime.now(timezone.utc)
    outside = None if args.gate is None else _read_gate(args.gate)
    before = sm_mhz()
    measured = case.measure(args, progress)
    where = machine(
        device=args.device, world_size=measured.world_size, gpus_used=measured.gpus_used
    )
    where["clocks"] = {"sm_mhz_before": before, "sm_mhz_after": sm_mhz()}
    return {
        "schema": SCHEMA_ID,
        "run_id": uuid.uuid4().hex,
        "started_utc": started.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": list(sys.argv if command is None else command),
        "git": {"commit": args.commit, "dirty": None} if args.commit else git_state(),
        "gate": _joined(gate_of(measured.rows, case.name), outside),
        "machine": where,
        "software": software(),
        "method": {
            "warmup": args.warmup,
            "iterations": args.iterations,
            "repeats": args.repeats,
            "interleaving": measured.interleaving,
            "l2": args.l2 if args.device == "cuda" else "warm",
            "launch_guard": launch_guard(args.device, measured.world_size),
            "statistic_across_ranks": "max",
            "input_distribution": measured.input_distribution,
            "verification": measured.verification,
            "peak_memory": measured.peak_memory,
            "bound": measured.bound,
        },
        "rows": measured.rows,
    }


def _read_gate(path: Path) -> dict[str, Any]:
    """Read counts of a test run, such as the conformance suite's ``conformance.json``."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        counts = found.get("counts", found)  # the suite's counts leave out what did not happen
        return {
            "suite": " ".join(str(found[key]) for key in ("schema", "backend") if key in found)
            or path.name,
            "passed": int(counts["passed"]),
            "failed": int(counts.get("failed", 0)),
            "report_path": str(path),
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(
            [f"no counts of passed and failed tests: {error!r}"], str(path)
        ) from error


def _joined(own: dict[str, Any], outside: dict[str, Any] | None) -> dict[str, Any]:
    if outside is None:
        return own
    return {
        "suite": f"{own['suite']}; {outside['suite']}",
        "passed": own["passed"] + outside["passed"],
        "failed": own["failed"] + outside["failed"],
        "report_path": outside["report_path"],
    }
