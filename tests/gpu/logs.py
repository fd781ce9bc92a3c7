# SPDX-License-Identifier: Apache-2.0
"""What the log of a step tells: how its tests ended, and why some failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

_ENDED = "(?P<outcome>PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)"
#: Lines of ``pytest -v``: how a test ended, the same from a worker of xdist, and that one began.
OUTCOME = re.compile(rf"^(?P<test>\S+::.+?) {_ENDED}\b")
WORKERS = re.compile(rf"^\[gw\d+\] \[ *\d+%\] {_ENDED} (?P<test>\S+::.*\S)")
BEGUN = re.compile(r"^\S+\.py::\S")
#: The heading of a failed test's part of a pytest log.
HEADING = re.compile(r"^_{3,} (.+) _{3,}$")
#: What says why, among the tracebacks of other processes.
TELLING = re.compile(r"[\w.]*(Error|Warning|Exception|Interrupt)\b|assert\b|--- rank \d+: FAILED")
#: What libraries say at exit.
NOISE = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")
#: What torch adds to every error of CUDA.
ADVICE = (
    "Search for `cuda",
    "CUDA kernel errors might",
    "For debugging consider",
    "Compile with `TORCH",
)
#: How many lines a failed test, and how many tests a failed step, may have in the summary.
LINES, TESTS = 6, 8


def outcomes(log: str) -> tuple[dict[str, str], str]:
    """Return how the tests of a pytest log ended, by test, and of those that did not end the last."""
    found: dict[str, str] = {}
    running: list[str] = []
    for line in map(str.strip, log.splitlines()):
        if ended := OUTCOME.match(line) or WORKERS.match(line):
            found[ended["test"]] = ended["outcome"]
            running = [test for test in running if test != ended["test"]]
        elif BEGUN.match(line):
            running.append(line)
    return found, running[-1] if running else ""


def reasons(log: str) -> list[str]:
    """Return the failed tests and why, or the end of a log that tells of none."""
    lines = [line for line in log.splitlines() if not line.startswith(NOISE)]
    why: dict[str, list[str]] = {}
    test = ""
    for line in lines:
        if found := HEADING.match(line):
            test = found[1]
        elif test and re.match(r"E\s", line):
            why.setdefault(test, []).append(line[1:].strip())
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, said in why.items():
        alike.setdefault(tuple(gist(said)), []).append(name)
    told = []
    for few, names in list(alike.items())[:TESTS]:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        told += [names[0] + more, *(f"    {line}" for line in few)]
    if len(alike) > TESTS:
        told.append(f"and {sum(map(len, list(alike.values())[TESTS:]))} tests of other reasons")
    if not told:
        told = [line for line in lines if line.strip()][-3:]
    return [line[:170] for line in told]


def gist(said: Sequence[str]) -> list[str]:
    """Return the few lines that tell why, of what a failed test said."""
    said = [line for line in said if line and not line.startswith(ADVICE)]
    if any(line.startswith("--- rank") or "Traceback (most" in line for line in said):
        before = ["", *said[:-1]]
        said = [line for last, line in zip(before, said, strict=True) if _tells(last, line)]
    lines = list(dict.fromkeys(said))
    half = LINES // 2
    return lines if len(lines) <= LINES else [*lines[:half], *lines[-half:]]


def _tells(last: str, line: str) -> bool:
    new = last.endswith(": FAILED") and not line.startswith("Traceback")
    return new or TELLING.match(line) is not None
