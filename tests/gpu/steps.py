# SPDX-License-Identifier: Apache-2.0
"""What the GPU programme consists of: steps, in groups, in order of importance.

========  ==========================================================================================
group     what it shows
========  ==========================================================================================
``A``     the transports: contract, oracle, capture, delays and growth, deaths, FLA, compositions
``B``     the kernels and the ``cudnn`` engine: their own tests, oracle, sanitizers, cold start
``C``     times on one GPU: boundary, KDA and Mamba2 of one rank beside peers, all mixer modes
``D``     one rank per GPU: the above where it says more there, and times over NVLink
========  ==========================================================================================

Everything but times runs side by side. ``estimate_s`` says how long a step took beside ten others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ONE_SIDED = ("cupy_ipc", "nvshmem_signal", "nvshmem_barrier")
CUDNN = "cudnn_summary"
BACKENDS = ("nccl", *ONE_SIDED, CUDNN)
#: Which MPS daemon a step has, see ``Step.mps``.
NO_DAEMON, SHARED_DAEMON, OWN_DAEMON = "no", "shared", "own"
#: Transports that run kernels which no timeout ends: a rank that hangs there is killed.
OVER_NCCL = ("nccl", CUDNN)
#: NVSHMEM asks the daemon at every start, and ends the process where a busy one does not answer.
OVER_NVSHMEM = ("nvshmem_signal", "nvshmem_barrier")
#: A test of the contract suite that ends rank processes.
DEATH = "death_ends"
#: Measurement of the published boundary results.
PUBLISHED = ("--warmup", "20", "--iterations", "60", "--repeats", "5")
SHORT = ("--warmup", "2", "--iterations", "8", "--repeats", "3")
BOTH_WAYS = ("--direction", "forward", "--direction", "backward")
#: Appended to benches in a rehearsal: the last value of an option counts.
TINY = (
    "--device",
    "cpu",
    "--warmup",
    "1",
    "--iterations",
    "2",
    "--repeats",
    "1",
    "--dtype",
    "float32",
)


ROOT = Path(__file__).resolve().parents[2]
#: Marks a test that needs a GPU.
MARKED = re.compile(r"^(pytestmark = .*|    |@)(pytest\.)?mark\.(gpu|multigpu)", re.MULTILINE)


@dataclass(frozen=True)
class Step:
    """One process: a pytest run, or a command.

    Attributes:
        name, group: of the step.
        arguments: of pytest, or of the ``cptransport`` command.
        estimate_s, limit_s: at its limit it is ended.
        bench: ``cptransport bench`` with these arguments; its document is ``NAME.json``.
        command: a program and its arguments, in place of both.
        alone: its times count, so nothing runs beside it.
        mps: a rank that is killed while its kernel runs takes all clients of its MPS daemon along. So a
            step that ends ranks, or may have to, has its own daemon, and so has one over NVSHMEM, which
            asks it often; one whose processes need none, or start it themselves, has none; the others
            share one.
        workers: processes that share its tests where pytest-xdist is installed, since what most tests
            of kernels do is to compile.
        rehearsal: arguments of a bench in a rehearsal; None: it cannot be rehearsed.
    """

    name: str
    group: str
    arguments: tuple[str, ...] = ()
    estimate_s: float = 60.0
    limit_s: float = 150.0
    bench: bool = False
    command: tuple[str, ...] = ()
    alone: bool = False
    mps: str = SHARED_DAEMON
    workers: int = 1
    rehearsal: tuple[str, ...] | None = field(default=())


def camel(name: str) -> str:
    """Return how a suite of ``test_contract_gpu.py`` is named."""
    return "".join(map(str.capitalize, name.split("_")))


def steps(out: Path, gpus: int) -> list[Step]:
    """Return all steps.

    Args:
        out: where documents go.
        gpus: how many there are; group ``D`` has that many ranks.
    """
    made = [*_transports(out), *_kernels(out), *_times(), *_many_gpus(out, gpus)]
    return [*made, _one_process("other tests", _others(made), 20, 150)]


def _found(folder: str, pattern: str) -> tuple[str, ...]:
    """Return the test files of a folder; the pattern where there are none, so that the step fails."""
    files = sorted((ROOT / folder).glob(pattern))
    return tuple(path.relative_to(ROOT).as_posix() for path in files) or (f"{folder}/{pattern}",)


def marked() -> tuple[str, ...]:
    """Return all test files in which something needs a GPU."""
    files = [
        path for top in ("tests", "backends") for path in sorted((ROOT / top).rglob("test_*.py"))
    ]
    found = (path for path in files if MARKED.search(path.read_text(encoding="utf-8")))
    return tuple(path.relative_to(ROOT).as_posix() for path in found)


def _others(taken: Sequence[Step]) -> tuple[str, ...]:
    """Return those that no step takes: a CUDA part among tests of other subjects."""
    asked = {word.partition("::")[0] for step in taken for word in step.arguments}
    return tuple(path for path in marked() if path not in asked)


# ------------------------------------------------------------------------------------------- A and B


def _daemon(backend: str) -> str:
    return OWN_DAEMON if backend in (*OVER_NCCL, *OVER_NVSHMEM) else SHARED_DAEMON


def _suite(backend: str, ranks: int) -> str:
    return f"tests/gpu/test_contract_gpu.py::Test{camel(backend)}{ranks}"


def _contract(group: str, out: Path, backend: str, ranks: int) -> Step:
    report = f"--cpt-report={out}/conformance-{group}-{backend}-{ranks}.json"
    where = (_suite(backend, ranks), "-p", "cptransport.testing.plugin", report)
    estimate_s = 50 + 35 * ranks
    if backend in OVER_NCCL:  # every transport starts communicators
        estimate_s = 120 + 70 * ranks
    elif backend in OVER_NVSHMEM and group == "D":
        estimate_s = 230
    return Step(
        f"contract {backend} {ranks}",
        group,
        (*where, "-k", f"not {DEATH}"),
        estimate_s=estimate_s,
        limit_s=450,
        mps=_daemon(backend),
    )


def _deaths(group: str, backend: str, ranks: int) -> Step:
    where = (_suite(backend, ranks), "-k", DEATH)
    return Step(f"deaths {backend} {ranks}", group, where, 65, 130, mps=OWN_DAEMON)


def _ops(group: str, backend: str, ranks: int) -> Step:
    where = ("tests/gpu/test_ops_gpu.py", "-k", f"{backend}-{ranks}-")
    estimate_s = 115 if backend == CUDNN else 90 if group == "D" else 55
    return Step(f"ops {backend} {ranks}", group, where, estimate_s, 240, mps=_daemon(backend))


def _capture(group: str, backend: str, ranks: int) -> Step:
    where = ("tests/gpu/test_capture_gpu.py", "-k", f"{backend}-{ranks}-")
    return Step(f"capture {backend} {ranks}", group, where, 45, 150, mps=_daemon(backend))


def _endurance(group: str, backend: str, ranks: int) -> Step:
    where = ("tests/gpu/test_endurance_gpu.py", "-k", f"{backend}-{ranks}]")
    # Daemons of their own would take turns on the GPU, and thousands of exchanges as many turns.
    return Step(f"endurance {backend} {ranks}", group, where, 300, 540, mps=SHARED_DAEMON)


def _warm(group: str) -> Step:
    """First, beside what needs none of these kernels; on disk already, it takes seconds."""
    command = ("python", "tests/gpu/warm.py")
    return Step(f"warm {group}", group, command=command, estimate_s=50, mps=NO_DAEMON)


def _fla(group: str, name: str, chosen: str, estimate_s: float, limit_s: float) -> Step:
    """FLA's own exchanges are over NCCL, whatever the transport is."""
    where = ("tests/integrations/test_fla_gpu.py", "-k", chosen)
    return Step(name, group, where, estimate_s, limit_s, mps=OWN_DAEMON)


def _one_process(name: str, files: tuple[str, ...], estimate_s: float, limit_s: float) -> Step:
    """Tests that need a GPU and no other rank."""
    group = "A" if name.startswith("signal") else "B"
    return Step(name, group, files, estimate_s, limit_s, mps=NO_DAEMON, rehearsal=None)


def _compiling(op: str, estimate_s: float) -> Step:
    """Return the step of an op's kernels."""
    files = _found("tests/kernels", f"test_{op}*_gpu.py")
    return replace(_one_process(f"{op} kernels", files, estimate_s, 240), workers=6)


def _file(name: str, group: str, estimate_s: float, limit_s: float, mps: str, **more: Any) -> Step:
    """Return the step of a file of this folder."""
    file = f"tests/gpu/test_{name.partition(' ')[0]}_gpu.py"
    return Step(name, group, (file,), estimate_s, limit_s, mps=mps, **more)


def _transports(out: Path) -> list[Step]:
    own = [(backend, ranks) for ranks in (2, 4) for backend in ("nccl", *ONE_SIDED)]
    return [
        _warm("A"),
        _one_process("signal kernels", ("tests/kernels/test_signals.py",), 20, 100),
        *(_contract("A", out, *pair) for pair in own),
        *(_capture("A", *pair) for pair in own),
        *(_ops("A", *pair) for pair in own),
        _fla("A", "fla bits", "same_bits", 200, 280),
        _file("compositions", "A", 120, 220, OWN_DAEMON),
        *(_deaths("A", *pair) for pair in own),
        # These start daemons themselves.
        _file("strict", "A", 120, 240, NO_DAEMON),
        _file("launch", "A", 130, 240, NO_DAEMON, rehearsal=None),
        _file("faults", "A", 65, 150, OWN_DAEMON, rehearsal=None),
        *(_endurance("A", *pair) for pair in own),
        _fla("A", "fla published", "published", 230, 300),
        _contract("A", out, "gloo", 2),
    ]


def _kernels(out: Path) -> list[Step]:
    pairs = [(CUDNN, ranks) for ranks in (2, 4)]
    sanitizers = [
        Step(
            f"{tool} {op}",
            "B",
            command=(
                "compute-sanitizer",
                "--tool",
                tool,
                "--error-exitcode",
                "9",
                "python",
                "tests/gpu/sanitized.py",
                op,
            ),
            estimate_s=40,
            limit_s=200,
            mps=NO_DAEMON,
            rehearsal=(op,),
        )
        for tool in ("memcheck", "racecheck")
        for op in ("kda", "ssd", "conv1d")
    ]
    return [
        _compiling("kda", 130),
        _compiling("ssd", 100),
        _compiling("conv1d", 40),
        Step(
            "cudnn engine",
            "B",
            _found("backends/cudnn_summary/tests", "test_*gpu*.py"),
            170,
            280,
            mps=OWN_DAEMON,
            rehearsal=None,
        ),
        *(_contract("B", out, *pair) for pair in pairs),
        *(_capture("B", *pair) for pair in pairs),
        *(_ops("B", *pair) for pair in pairs),
        _file("long sequences", "B", 85, 200, SHARED_DAEMON),
        _file("sharded", "B", 40, 150, NO_DAEMON),
        _file("large", "B", 30, 150, OWN_DAEMON),
        _file("cold start", "B", 75, 180, NO_DAEMON),
        *sanitizers,
        *(_deaths("B", *pair) for pair in pairs),
        *(_endurance("B", *pair) for pair in pairs),
        Step(
            "doctor",
            "B",
            command=("python", "-m", "cptransport", "doctor", "--json"),
            estimate_s=10,
            mps=NO_DAEMON,
        ),
    ]


# ------------------------------------------------------------------------------------------------- C


def _boundary(group: str, ranks: int, *more: str) -> list[Step]:
    """Return a step per backend: what one of them does loses nothing of the others."""
    return [
        Step(
            f"bench boundary {ranks} {backend}",
            group,
            (
                *("boundary", "--backend", backend, "--world-size", str(ranks), "--heads", "8"),
                *(*more, *PUBLISHED, "--timeout-s", "80"),
            ),
            estimate_s=45,
            limit_s=120,
            bench=True,
            alone=True,
            rehearsal=(
                *("boundary", "--backend", "gloo", "--world-size", "2", *BOTH_WAYS),
                *("--heads", "2", "--key-dim", "4", "--value-dim", "4", *TINY),
            ),
        )
        for backend in (*ONE_SIDED, "nccl", CUDNN)
    ]


GATES = ("-0.01", "-0.25", "-1", "-2.5")
KDA = ("kda", "--key-dim", "128", "--value-dim", "128", "--dtype", "bfloat16")
TINY_KDA = (
    *("kda", "--shape", "40x2", "--shape", "24x1", "--key-dim", "8", "--value-dim", "8"),
    *("--gate-mean", "-0.01", "--gate-mean", "-1", "--engine", "torch", "--engine", "triton"),
    *("--baseline", "fla", "--baseline", "cudnn", "--overlap", *TINY),
)
MIXER = (
    "mamba2",
    "--headdim",
    "64",
    "--dstate",
    "128",
    "--chunk-size",
    "128",
    "--dtype",
    "bfloat16",
)
#: p50 of the maxima over ranks, of so many iterations after 5.
MEDIAN = ("--warmup", "5", "--repeats", "1", "--iterations")
TINY_MIXER = (
    *("mamba2", "--backend", "gloo", "--world-size", "2", "--shape", "32x4", "--shape", "16x2"),
    *("--groups", "2", "--batch", "3"),
    *("--headdim", "4", "--dstate", "8", "--chunk-size", "16", "--baseline", "all_to_all", *TINY),
)


def _kda(name: str, shapes: Sequence[str], engines: Sequence[str], peers: Sequence[str]) -> Step:
    words = [word for shape in shapes for word in ("--shape", shape)]
    words += [word for gate in GATES for word in ("--gate-mean", gate)]
    words += [word for engine in engines for word in ("--engine", engine)]
    words += [word for peer in peers for word in ("--baseline", peer)]
    words += ["--set", "CULA_CP_CUDNN_INTERIOR=identity"] if "cudnn" in engines else []
    return Step(
        name,
        "C",
        (*KDA, *words, *SHORT),
        estimate_s=15 * len(shapes) * len(GATES) + 60 * bool(peers),
        limit_s=280,
        bench=True,
        alone=True,
        rehearsal=TINY_KDA,
    )


def _mixer(
    group: str,
    ranks: int,
    shapes: Sequence[str],
    *,
    small: bool,
    backend: str,
    more: Sequence[str] = (),
    limit_s: float = 150,
) -> Step:
    size = ("--groups", "4", "--batch", "3") if small else ("--groups", "8")
    kind = "small" if small else "full"
    words = [word for shape in shapes for word in ("--shape", shape)]
    iterations = "20" if small and ranks > 2 and group == "D" else "10"
    return Step(
        f"bench mixer {kind} {ranks}",
        group,
        (
            *(*MIXER, "--backend", backend, "--world-size", str(ranks), *words, *size),
            *("--baseline", "all_to_all", *MEDIAN, iterations, "--timeout-s", "90", *more),
        ),
        estimate_s=20 + 18 * len(shapes),
        limit_s=limit_s,
        bench=True,
        alone=True,
        rehearsal=TINY_MIXER,
    )


def _times() -> list[Step]:
    both = ("triton", "cudnn")
    return [
        _kda("bench kda 2048x16", ["2048x16"], both, ["fla", "cudnn"]),
        *_boundary("C", 4, "--composition", "gather"),
        Step(
            "bench mamba2",
            "C",
            (
                *(*MIXER, "--groups", "8", "--engine", "triton", "--baseline", "mamba_ssm"),
                *("--shape", "4096x64", "--shape", "1024x64", "--shape", "16384x64"),
                *("--overlap", *SHORT),
            ),
            estimate_s=80,
            limit_s=220,
            bench=True,
            alone=True,
            rehearsal=(
                *("mamba2", "--shape", "32x4", "--shape", "16x2", "--groups", "2"),
                *("--headdim", "4", "--dstate", "8", "--chunk-size", "16"),
                *("--engine", "torch", "--engine", "triton"),
                *("--baseline", "mamba_ssm", "--overlap", *TINY),
            ),
        ),
        _kda("bench kda 1024x8", ["1024x8"], both, ["fla", "cudnn"]),
        _kda("bench kda long", ["8192x32", "65536x4"], both, ["cudnn"]),
        *(
            # Two lengths, for what grows with them.
            _mixer(
                "C",
                ranks,
                [f"{length // ranks}x{heads}" for length in (4096, 8192)],
                small=heads == 32,
                backend="cupy_ipc",
            )
            for ranks in (2, 4)
            for heads in (64, 32)
        ),
        *_boundary("C", 2, "--composition", "gather"),
        _overlap("C", "cupy_ipc", 2, ["2048x16"]),
    ]


def _overlap(group: str, backend: str, ranks: int, shapes: Sequence[str]) -> Step:
    """What overlap hides, among real ranks."""
    words = [word for shape in shapes for word in ("--shape", shape)]
    return Step(
        f"bench overlap {backend} {ranks}",
        group,
        (
            *(*KDA, "--engine", "triton", "--backend", backend, "--world-size", str(ranks)),
            *(*words, "--overlap", *SHORT, "--timeout-s", "90"),
        ),
        estimate_s=40,
        limit_s=120,
        bench=True,
        alone=True,
        rehearsal=_tiny_ranks(),
    )


def _tiny_ranks() -> tuple[str, ...]:
    return (
        *("kda", "--backend", "gloo", "--world-size", "2", "--key-dim", "8"),
        *("--shape", "40x2", "--shape", "24x1", "--composition", "gather"),
        *("--composition", "handoff", "--composition", "scan"),
        *("--value-dim", "8", "--engine", "torch", "--overlap", "--baseline", "fla", *TINY),
    )


# ------------------------------------------------------------------------------------------------- D


def _many_gpus(out: Path, gpus: int) -> list[Step]:
    ranks = max(2, gpus)
    one_each = ["--ranks-per-device", "1"]
    shapes = [(4096, 8), (8192, 16)] + ([(65536, 32)] if ranks > 2 else [])
    kda = [word for tokens, heads in shapes for word in ("--shape", f"{tokens // ranks}x{heads}")]
    compositions = ["gather"] if ranks == 2 else ["gather", "handoff", "scan"]
    ways = [word for how in compositions for word in ("--composition", how)]
    lengths = [4096, 16384, 65536] + ([131072] if ranks > 2 else [])
    full = [f"{length // ranks}x64" for length in lengths]
    small = [f"{length // ranks}x32" for length in lengths]
    long = {"more": ways, "limit_s": 280} if ranks > 2 else {}
    few = () if ranks > 2 else ("--composition", "gather")
    made = [
        _warm("D"),
        *(_contract("D", out, backend, ranks) for backend in BACKENDS),
        *(_deaths("D", backend, ranks) for backend in BACKENDS),
        _file("faults", "D", 115, 150, OWN_DAEMON, rehearsal=None),
        *(_ops("D", backend, ranks) for backend in BACKENDS),
        _fla("D", "fla bits", f"bits and {ranks}-", 160, 280),
        *_boundary("D", ranks, *one_each, *BOTH_WAYS, *few),
        *(
            Step(
                f"bench kda ranks {ranks} {backend}",
                "D",
                (
                    *(*KDA, "--engine", "triton", "--backend", backend, "--world-size", str(ranks)),
                    *(*one_each, *kda, *ways, "--overlap", "--baseline", "fla", *PUBLISHED),
                    *("--timeout-s", "150"),
                ),
                # The first one tunes FLA's kernels for all of them.
                estimate_s=170 if backend == BACKENDS[0] else 70,
                limit_s=280 if backend == BACKENDS[0] else 170,
                bench=True,
                alone=True,
                rehearsal=_tiny_ranks(),
            )
            for backend in BACKENDS
        ),
        _mixer("D", ranks, full, small=False, backend="cupy_ipc", **long),
        _mixer("D", ranks, small, small=True, backend="cupy_ipc", **long),
        *(_capture("D", backend, ranks) for backend in BACKENDS),
        *(_endurance("D", backend, ranks) for backend in BACKENDS),
    ]
    return [replace(step, name=f"{ranks} GPUs: {step.name}") for step in made]
