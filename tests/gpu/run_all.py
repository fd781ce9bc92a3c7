# SPDX-License-Identifier: Apache-2.0
"""The GPU programme, in one command: most important first, every step with its own time limit.

::

    python tests/gpu/run_all.py --group A --out results --pack results-A.tar.gz
    python tests/gpu/run_all.py --group D --gpus 2 --out results      # one rank per GPU
    python tests/gpu/run_all.py --rehearse --only 'bench*'            # on a CPU, tiny

``steps.py`` lists the steps. Below ``--out``: ``results.json`` (machine, versions, every step), a
``step-*.json`` per step, the documents of benches, ``conformance-*.json``, ``junit.xml``, ``log.txt``.
Steps run side by side (``--jobs``), those whose times count alone. One MPS daemon serves all that
want no other; a rank that is killed while its kernel runs takes the other clients of its daemon along,
so steps that may have to kill one have a daemon each, and one that broke is replaced. A step that
failed beside others is tried once more by itself if time is left; both outcomes are kept. Exit code 1:
something failed, did not end, or ran nothing. On a machine of several GPUs start it once for each, with
``CUDA_VISIBLE_DEVICES``, ``--group`` or ``--only``, and ``--out`` of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from aims import markdown  # noqa: E402
from daemons import BROKEN, SharedDaemon, daemon  # noqa: E402
from logs import outcomes, reasons  # noqa: E402
from steps import NO_DAEMON, SHARED_DAEMON, Step, steps  # noqa: E402

REHEARSE = "CPTRANSPORT_REHEARSE"
RESULTS = "CPTRANSPORT_RESULTS"
COMMIT = "CPTRANSPORT_COMMIT"
NO_MPS = "CPTRANSPORT_NO_MPS"
CACHE = "TRITON_CACHE_DIR"
#: Characters of all failures in the summary.
SUMMARY = 6000
#: Less than this is no time for a step.
SHORTEST_S = 15.0
_ENDS = ((signal.SIGINT, 12.0), (signal.SIGKILL, 5.0))

_MACHINE = """
import json, sys
from cptransport.bench.machine import git_state, machine, software
device = sys.argv[1]
gpus = int(sys.argv[2])
print(json.dumps({"git": git_state(), "software": software(),
                  "machine": machine(device=device, world_size=max(1, gpus), gpus_used=gpus)}))
"""


@dataclass
class Result:
    """How a step went; ``outcomes`` by test, also of a step that was cut short."""

    step: str
    group: str
    command: list[str]
    seconds: float
    code: int | str
    outcomes: dict[str, str] = field(default_factory=dict)
    running: str = ""
    beside: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ended well and did something."""
        did = not self.outcomes or "PASSED" in self.outcomes.values()
        return self.code == 0 and did

    def count(self, *words: str) -> int:
        """How many tests had one of these outcomes."""
        return sum(outcome in words for outcome in self.outcomes.values())


class Run:
    """Where results go, and how long there is.

    Args:
        args: of the command line.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.out = args.out.resolve()
        self.folder = folder
        self.rehearse = args.rehearse
        self.pack = args.pack
        self.pytest = args.pytest.split()
        self.commit = args.commit
        self.deadline = time.monotonic() + args.budget_s
        self.machine: dict[str, Any] = {}
        self.results: list[Result] = []
        self.live: set[int] = set()
        self.environment = environment(args)

    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def command(self, step: Step) -> list[str]:
        """Return what a step runs."""
        python = sys.executable
        if step.bench:
            arguments = step.rehearsal if self.rehearse else step.arguments
            document = self.out / "bench" / f"{slug(step.name)}.json"
            return [
                python,
                "-m",
                "cptransport",
                "bench",
                *(arguments or ()),
                "--json",
                str(document),
                *(("--commit", self.commit) if self.commit else ()),
            ]
        if step.command:
            words = [python if word == "python" else word for word in step.command]
            if self.rehearse and step.rehearsal:  # without the tool around it
                words = [python, *words[words.index(python) + 1 :]]
            return words
        command = [python, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider"]
        command += ["--color=no", f"--junitxml={self.folder / slug(step.name)}.xml"]
        if step.workers > 1 and importlib.util.find_spec("xdist"):
            # pytest-benchmark warns beside xdist, and warnings are errors.
            command += ["-n", str(step.workers), "--maxschedchunk=1", "-p", "no:benchmark"]
        marks = "not slow" if self.rehearse else "(gpu or multigpu) and not slow"
        return [*command, "-m", marks, *step.arguments, *self.pytest]

    def start(self, step: Step, variables: Mapping[str, str], beside: str) -> Result:
        """Run a step; at its limit interrupt it, then kill it."""
        command = self.command(step)
        limit = min(step.limit_s, self.left_s())
        log = self.folder / f"{slug(step.name)}.log"
        began = time.monotonic()
        if limit < SHORTEST_S:
            return self._add(Result(step.name, step.group, command, 0.0, "no time left"))
        if shutil.which(command[0]) is None:
            return self._add(Result(step.name, step.group, command, 0.0, f"no {command[0]} here"))
        environment = {**self.environment, **variables}
        if step.bench:
            environment[CACHE] = bench_cache(Path(environment[CACHE]))
        with log.open("ab") as stream:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self.live.add(process.pid)
            code: int | str = "time limit"
            for number, seconds in ((0, limit), *_ENDS):
                with contextlib.suppress(ProcessLookupError):
                    if number:
                        os.killpg(process.pid, number)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    ended = process.wait(seconds)
                    code = ended if number == 0 else code
                    break
            self.live.discard(process.pid)
            with contextlib.suppress(ProcessLookupError):  # what the step left behind
                os.killpg(process.pid, signal.SIGKILL)
        found, last = outcomes(self.log(step.name))
        seconds = time.monotonic() - began
        result = Result(step.name, step.group, command, seconds, code, found, beside=beside)
        result.running = last if code == "time limit" else ""
        return self._add(result)

    def log(self, step: str) -> str:
        """Return what a step said."""
        path = self.folder / f"{slug(step)}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def stop(self, number: int, frame: object) -> None:
        """End all steps now, and begin no other; a signal handler."""
        self.deadline = time.monotonic()
        for process in list(self.live):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)

    def _add(self, result: Result) -> Result:
        self.results.append(result)
        self.write(result)
        return result

    def write(self, latest: Result | None = None) -> None:
        """Write everything that is known so far."""
        about = {"rehearsal": self.rehearse, **self.machine}
        if latest is not None:
            path = self.out / f"step-{latest.group}-{slug(latest.step)}.json"
            path.write_text(json.dumps({**about, **asdict(latest)}, indent=1))
        document = {**about, "steps": [asdict(result) for result in self.results]}
        (self.out / "results.json").write_text(json.dumps(document, indent=1))
        suites = ET.Element("testsuites")
        with (self.out / "log.txt").open("w") as stream:
            for name in dict.fromkeys(result.step for result in self.results):
                log, junit = (self.folder / f"{slug(name)}.{kind}" for kind in ("log", "xml"))
                if log.exists():
                    stream.write(f"==== {name}\n{log.read_text(errors='replace')}\n")
                with contextlib.suppress(ET.ParseError, OSError):
                    suites.extend(ET.parse(junit).getroot())
        ET.ElementTree(suites).write(self.out / "junit.xml")
        if self.pack is not None:
            with tarfile.open(self.pack, "w:gz") as archive:
                archive.add(self.out, arcname=self.out.name)


def slug(name: str) -> str:
    """Return a name for files."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name)


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the steps: where modules are, one Triton cache for all, tunings included."""
    places = [ROOT, ROOT / "kernels", *sorted((ROOT / "backends").iterdir()), *args.peers]
    given = os.environ.get("PYTHONPATH", "")
    paths = [str(place) for place in places] + ([given] if given else [])
    cache = Path(tempfile.gettempdir()) / "cptransport-triton"
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), RESULTS: str(args.out.resolve())}
    made.setdefault(CACHE, str(cache))
    made.setdefault("TRITON_CACHE_AUTOTUNING", "1")
    made.setdefault("OMP_NUM_THREADS", "1")
    made["PYTHONUNBUFFERED"] = "1"
    if args.commit:
        made[COMMIT] = args.commit
    if args.rehearse:
        made |= {REHEARSE: "1", "CUDA_VISIBLE_DEVICES": ""}
    elif not many_gpus(args):
        made["CUDA_VISIBLE_DEVICES"] = made.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return made


def bench_cache(tests: Path) -> str:
    """Return the Triton cache of benches: at first what tests compiled, without what they tuned.

    Peers are tuned while nothing runs beside them.
    """
    cache = tests.with_name(f"{tests.name}-bench")
    if tests.exists() and not cache.exists():
        made = Path(tempfile.mkdtemp(dir=tests.parent))
        with contextlib.suppress(OSError):  # steps of another GPU's programme may be writing
            tuned = shutil.ignore_patterns("*.autotune.json")
            shutil.copytree(tests, made, ignore=tuned, dirs_exist_ok=True)
        with contextlib.suppress(OSError):  # the other programme was first
            made.rename(cache)
        shutil.rmtree(made, ignore_errors=True)
    return str(cache)


def many_gpus(args: argparse.Namespace) -> bool:
    """Whether ranks have a GPU each, so that none is shared."""
    return "D" in args.group.upper().split(",")


def chosen(args: argparse.Namespace) -> list[Step]:
    """Return the steps that the command line asks for, in order."""
    groups = args.group.upper().split(",") if args.group else ["A", "B", "C"]
    patterns = args.only.split(",") if args.only else ["*"]
    return [
        step
        for step in steps(args.out.resolve(), args.gpus)
        if (step.group in groups or (args.only and not args.group))
        and any(fnmatch.fnmatch(step.name, pattern) for pattern in patterns)
        and not (args.rehearse and step.rehearsal is None)
    ]


def run_beside(run: Run, step: Step, shared: SharedDaemon, shares: bool, beside: str) -> Result:
    """Run a step with the daemon that it wants."""
    if step.mps != SHARED_DAEMON:
        return run_apart(run, step, shares, beside)
    variables = shared.variables()
    result = run.start(step, variables, f"{beside}, shared daemon" if variables else beside)
    if not result.ok and (result.code == "time limit" or BROKEN.search(run.log(step.name))):
        shared.broken(variables)
    return result


def run_apart(run: Run, step: Step, shares: bool, beside: str) -> Result:
    """Run a step with a daemon of its own, if it wants any."""
    if step.mps == NO_DAEMON:
        return run.start(step, {NO_MPS: "1"}, beside)
    with contextlib.ExitStack() as stack:
        variables, _ = daemon(stack, shares and run.left_s() > SHORTEST_S)
        return run.start(step, variables, f"{beside}, own daemon" if variables else beside)


def run_all(run: Run, todo: Sequence[Step], jobs: int, shares: bool, retry: bool = True) -> None:
    """Run the steps: what can be beside others, in order, then what is timed."""
    beside = [step for step in todo if not step.alone]
    shared = SharedDaemon(lambda stack: daemon(stack, shares and run.left_s() > SHORTEST_S))
    where = f"beside {jobs - 1}"
    with contextlib.closing(shared), ThreadPoolExecutor(jobs) as executor:
        list(executor.map(lambda s: run_beside(run, s, shared, shares, where), beside))
    run.machine["mps"] = ", then ".join(shared.said) or "none wanted"
    failed = {
        result.step for result in run.results if not result.ok and result.seconds and jobs > 1
    }
    for step in todo:
        if step.alone:
            run.start(step, {}, "")
    again = [step for step in todo if step.name in failed and run.left_s() > SHORTEST_S and retry]
    with ThreadPoolExecutor(2) as executor:
        list(executor.map(lambda s: run_apart(run, s, shares, "again"), again))


def describe(run: Run, args: argparse.Namespace) -> None:
    """Find out what the machine is, in a process of its own: this one makes no CUDA context."""
    sys.path.insert(0, str(ROOT / "kernels"))
    from cptransport.launch import banner

    device = "cpu" if args.rehearse else "cuda"
    gpus = 0 if args.rehearse else args.gpus
    command = [sys.executable, "-c", _MACHINE, device, str(gpus)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=run.environment, capture_output=True, text=True, timeout=90
        )
        run.machine.update(json.loads(done.stdout))
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        run.machine["machine"] = f"unknown: {error}"
    if args.commit:
        run.machine["git"] = {"commit": args.commit, "dirty": None}
    shared = None if args.rehearse or many_gpus(args) else banner(2)
    run.machine["banner"] = shared and shared.replace("2 ranks share", "All ranks share")


def show(run: Run) -> int:
    """Print the table; return the exit code."""
    last = {result.step: result for result in run.results}
    blocks = {r.step: "\n".join(reasons(run.log(r.step))) for r in run.results if not r.ok}
    for step, block in blocks.items():  # one that cannot be shown whole has its fair share
        print(f"== {step}\n{block[: max(400, SUMMARY // len(blocks))]}")
    if run.machine.get("banner"):
        print(f"\n{run.machine['banner']}")
    print(f"\n{'step':34}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}  ended")
    for result in run.results:
        print(
            f"{result.step:34}{result.count('PASSED'):8}{result.count('FAILED', 'ERROR'):8}"
            f"{result.count('SKIPPED'):9}{result.seconds:9.1f}  {result.code} {result.beside} "
            f"{result.running[-60:]}"
        )
    documents = []
    for path in sorted((run.out / "bench").glob("*.json")):
        with contextlib.suppress(OSError, ValueError):
            documents.append(json.loads(path.read_text()))
    if documents:
        print(f"\n{markdown(documents)}\n")
    bad = [result for result in last.values() if not result.ok]
    twice = [r.step for r in run.results if not r.ok and last[r.step].ok]
    if twice:
        print(f"failed beside others, passed alone: {', '.join(twice)}")
    print(f"{len(last) - len(bad)} of {len(last)} steps passed")
    return 1 if bad or not last else 0


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--pack", type=Path, help="an archive of --out, kept up to date")
    parser.add_argument(
        "--group", default="", help="A, B, C or D, several by comma (default A,B,C)"
    )
    parser.add_argument("--only", default="", help="names of steps, as globs by comma")
    parser.add_argument("--jobs", type=int, default=6, help="steps at once (default 6)")
    parser.add_argument("--budget-s", type=float, default=540.0, help="for all (default 540)")
    parser.add_argument("--once", action="store_true", help="try no failed step again")
    parser.add_argument("--gpus", type=int, default=1, help="ranks of group D, one per GPU")
    parser.add_argument("--peers", type=Path, action="append", default=[], help="paths of peers")
    parser.add_argument(
        "--commit", default="", help="of a copy of the tree that has no git to tell it"
    )
    parser.add_argument("--pytest", default="", help="further arguments of pytest, by blanks")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, over gloo, tiny")
    parser.add_argument("--list", action="store_true", help="print the steps and what they take")
    args = parser.parse_args(arguments)
    args.peers = [path.resolve() for path in args.peers]
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps and print the table."""
    args = parse(arguments)
    todo = chosen(args)
    if args.list:
        for step in todo:
            how = "alone" if step.alone else f"{step.mps} daemon"
            print(
                f"{step.group} {step.name:34}{step.estimate_s:6.0f} s, at most {step.limit_s:.0f}  {how}"
            )
        beside = sum(step.estimate_s for step in todo if not step.alone)
        alone = sum(step.estimate_s for step in todo if step.alone)
        print(f"about {beside / args.jobs + alone:.0f} s with {args.jobs} jobs")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(args, Path(folder))
        before = {n: signal.signal(n, run.stop) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            describe(run, args)
            shares = not args.rehearse and not many_gpus(args)
            run_all(run, todo, args.jobs, shares, not args.once)
            run.write()
            return show(run)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


if __name__ == "__main__":
    sys.exit(main())
