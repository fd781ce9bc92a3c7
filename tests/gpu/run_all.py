# SPDX-License-Identifier: Apache-2.0
"""All that one GPU can show, in one command, most important first, every step with its own time limit.

::

    PYTHONPATH=.:kernels:backends/nccl:backends/cupy_ipc python tests/gpu/run_all.py --out results

writes ``results.json``, ``junit.xml``, ``log.txt`` and a ``conformance-*.json`` per transport
there, and prints a table last. Steps are pytest runs; ``--jobs`` runs several at once under one MPS
daemon, which is faster and proves the same except for time. Exit code 1: something failed, did not
end or ran nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

#: A line of ``pytest -v``, and one of its summary of failures.
OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")


@dataclass(frozen=True)
class Step:
    """One pytest run: what to run, and its limit in seconds."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float


@dataclass
class Result:
    """How a step went; ``outcomes`` by test, also of a step that was cut short."""

    step: str
    seconds: float
    code: int | str
    outcomes: dict[str, str] = field(default_factory=dict)
    running: str = ""

    @property
    def ok(self) -> bool:
        return self.code == 0 and "PASSED" in self.outcomes.values()

    def count(self, *words: str) -> int:
        return sum(outcome in words for outcome in self.outcomes.values())


def _steps(out: Path) -> list[Step]:
    transports = "tests/gpu/test_transports_gpu.py"

    def contract(name: str) -> Step:
        report = ("-p", "cptransport.testing.plugin", f"--cpt-report={out}/conformance-{name}.json")
        return Step(f"contract {name}", (f"{transports}::Test{name}", *report), 150)

    def ops(backend: str, ranks: int) -> Step:
        return Step(
            f"ops {backend} {ranks}", (f"{transports}::TestOps", "-k", f"{backend}-{ranks}-"), 120
        )

    return [
        contract("Nccl2"),
        contract("CupyIpc2"),
        ops("nccl", 2),
        ops("cupy_ipc", 2),
        contract("CupyIpc4"),
        contract("Nccl4"),
        ops("cupy_ipc", 4),
        ops("nccl", 4),
        Step("launch", ("tests/gpu/test_launch_gpu.py",), 120),
        Step("choice", (transports, "-k", "without_help"), 60),
        Step("fla", ("tests/integrations",), 150),
        contract("Gloo2"),
    ]


def _run(step: Step, folder: Path, deadline: float, pytest_arguments: Sequence[str]) -> Result:
    """Run a step; at its limit interrupt it, then kill it."""
    log, junit = folder / f"{step.name}.log", folder / f"{step.name}.xml"
    command = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
    command += ["-m", "gpu and not slow", f"--junitxml={junit}", "--color=no", *pytest_arguments]
    limit = min(step.limit_s, deadline - time.monotonic())
    start = time.monotonic()
    if limit < 15:
        return Result(step.name, 0.0, "no time left")
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, *step.arguments],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        code: int | str = "time limit"
        for number, seconds in ((0, limit), (signal.SIGINT, 12), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                if number:
                    os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended = process.wait(seconds)
                code = ended if number == 0 else code
                break
    text = log.read_text(errors="replace")
    lines = text.splitlines()
    outcomes = {found[1]: found[2] for line in lines if (found := OUTCOME.match(line))}
    started = [line for line in lines if re.match(r"^\S+::\S+ *$", line)]
    result = Result(step.name, time.monotonic() - start, code, outcomes)
    if code == "time limit":
        result.running = started[-1].strip() if started else ""
    return result


def _environment() -> str:
    """Return what the machine is, as text."""
    parts = []
    for command in (
        ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"],
        [sys.executable, "-m", "cptransport", "doctor"],
    ):
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
            parts.append(done.stdout + done.stderr)
        except (OSError, subprocess.TimeoutExpired) as error:
            parts.append(f"{command[0]}: {error}\n")
    return "".join(parts)


def _write(out: Path, folder: Path, environment: str, results: Sequence[Result]) -> None:
    document = {"environment": environment, "steps": [asdict(result) for result in results]}
    (out / "results.json").write_text(json.dumps(document, indent=1))
    suites = ET.Element("testsuites")
    with (out / "log.txt").open("w") as stream:
        for result in results:
            log, junit = folder / f"{result.step}.log", folder / f"{result.step}.xml"
            if log.exists():
                stream.write(f"==== {result.step}\n{log.read_text(errors='replace')}\n")
            if junit.exists():
                with contextlib.suppress(ET.ParseError):
                    suites.extend(ET.parse(junit).getroot())
    ET.ElementTree(suites).write(out / "junit.xml")


def _failures(folder: Path, result: Result) -> list[str]:
    """Return one line per failure: the test and the start of why."""
    log = folder / f"{result.step}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    found = re.findall(r"^(?:FAILED|ERROR) .*$", text, re.MULTILINE)
    return [line.replace("tests/gpu/test_transports_gpu.py::", "")[:170] for line in found]


def main() -> int:
    """Run the steps and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    parser.add_argument(
        "--only", default="", help="steps whose name has one of these words, by comma"
    )
    parser.add_argument("--jobs", type=int, default=1, help="steps at once (default 1)")
    parser.add_argument("--limit-s", type=float, default=540.0, help="of everything together")
    parser.add_argument("--pytest", default="", help="further arguments of pytest, by blanks")
    args = parser.parse_args()
    deadline = time.monotonic() + args.limit_s
    words = [word for word in args.only.split(",") if word]
    steps = [
        s for s in _steps(args.out.resolve()) if not words or any(word in s.name for word in words)
    ]

    args.out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))
    from cptransport.launch import MpsDaemon, MpsUnavailableError, banner, daemon_environment

    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        environment = ""
        try:
            daemon = stack.enter_context(MpsDaemon(daemon_environment()))
            os.environ.update(daemon.environment)
            environment = "MPS: a private daemon\n"
        except MpsUnavailableError as error:
            environment = f"MPS: none: {error}\n"
        results: list[Result] = []
        with ThreadPoolExecutor(args.jobs + 1) as executor:
            machine = executor.submit(_environment)
            ran = executor.map(lambda s: _run(s, folder, deadline, args.pytest.split()), steps)
            for result in ran:
                results.append(result)
                _write(args.out, folder, environment, results)
        environment += machine.result()
        _write(args.out, folder, environment, results)
        print(environment)
        for result in results:
            for line in _failures(folder, result):
                print(f"{result.step}: {line}")
        print(f"\n{banner(2)}\n".replace("2 ranks share", "All ranks share"))
        print(f"{'step':22}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}  ended")
        for result in results:
            print(
                f"{result.step:22}{result.count('PASSED'):8}{result.count('FAILED', 'ERROR'):8}"
                f"{result.count('SKIPPED'):9}{result.seconds:9.1f}  {result.code} {result.running}"
            )
        skipped = Counter(r.step for r in results if not r.ok)
        print(f"{len(results) - len(skipped)} of {len(results)} steps passed")
    return 1 if skipped else 0


if __name__ == "__main__":
    sys.exit(main())
