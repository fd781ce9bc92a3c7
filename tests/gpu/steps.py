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

Everything but times runs side by side. ``estimate_s`` says how long a step takes by itself.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

ONE_SIDED = ("cupy_ipc", "nvshmem_signal", "nvshmem_barrier")
CUDNN = "cudnn_summary"
BACKENDS = ("nccl", *ONE_SIDED, CUDNN)
#: A test of the contract suite that ends rank processes; see ``Step.apart``.
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
        estimate_s, limit_s: alone; at its limit it is ended.
        bench: ``cptransport bench`` with these arguments; its document is ``NAME.json``.
        command: a program and its arguments, in place of both.
        alone: its times count, so nothing runs beside it.
        apart: it ends ranks or may leave kernels running, so it has an MPS daemon of its own.
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
    apart: bool = False
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
    made = [*_transports(out), *_kernels(out), *_times(out), *_many_gpus(out, gpus)]
    return [*made, Step("other tests", "B", _others(made), 60, 150, rehearsal=None)]


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


def _contract(group: str, out: Path, backend: str, ranks: int) -> list[Step]:
    suite = f"tests/gpu/test_contract_gpu.py::Test{camel(backend)}{ranks}"
    name = f"{group}-{backend}-{ranks}"
    report = ("-p", "cptransport.testing.plugin", f"--cpt-report={out}/conformance-{name}.json")
    # NVSHMEM starts and ends with every transport that is the only one.
    slow = backend.startswith("nvshmem")
    return [
        Step(
            f"contract {backend} {ranks}",
            group,
            (suite, *report, "-k", f"not {DEATH}"),
            estimate_s=160 if slow else 100,
            limit_s=300 if slow else 220,
        ),
        Step(
            f"deaths {backend} {ranks}",
            group,
            (suite, "-k", DEATH),
            estimate_s=60,
            limit_s=130,
            apart=True,
        ),
    ]


def _ops(group: str, backend: str, ranks: int) -> Step:
    chosen = ("-k", f"{backend}-{ranks}-")
    return Step(f"ops {backend} {ranks}", group, ("tests/gpu/test_ops_gpu.py", *chosen), 90, 200)


def _capture(group: str, backend: str, ranks: int) -> Step:
    chosen = ("-k", f"{backend}-{ranks}-")
    where = ("tests/gpu/test_capture_gpu.py", *chosen)
    return Step(f"capture {backend} {ranks}", group, where, 50, 150)


def _endurance(group: str, backend: str, ranks: int) -> Step:
    chosen = ("-k", f"{backend}-{ranks}]")
    where = ("tests/gpu/test_endurance_gpu.py", *chosen)
    return Step(f"endurance {backend} {ranks}", group, where, 110, 240)


def _warm(group: str) -> Step:
    """First, beside what needs none of these kernels; on disk already, it takes seconds."""
    command = ("python", "tests/gpu/warm.py")
    return Step(f"warm {group}", group, command=command, estimate_s=70, limit_s=150)


def _transports(out: Path) -> list[Step]:
    own = [(backend, ranks) for ranks in (2, 4) for backend in ("nccl", *ONE_SIDED)]
    contract = [step for pair in own for step in _contract("A", out, *pair)]
    return [
        _warm("A"),
        Step("signal kernels", "A", ("tests/kernels/test_signals.py",), 30, 100, rehearsal=None),
        Step("fla bits", "A", ("tests/integrations/test_fla_gpu.py", "-k", "same_bits"), 150, 280),
        *contract,
        *(_ops("A", *pair) for pair in own),
        Step("compositions", "A", ("tests/gpu/test_compositions_gpu.py",), 80, 200),
        *(_capture("A", *pair) for pair in own),
        Step("strict", "A", ("tests/gpu/test_strict_gpu.py",), 110, 240),
        Step(
            "launch", "A", ("tests/gpu/test_launch_gpu.py",), 110, 220, apart=True, rehearsal=None
        ),
        Step(
            "faults",
            "A",
            ("tests/gpu/test_faults_gpu.py",),
            70,
            150,
            apart=True,
            rehearsal=None,
        ),
        *(_endurance("A", *pair) for pair in own),
        Step(
            "fla published",
            "A",
            ("tests/integrations/test_fla_gpu.py", "-k", "published"),
            230,
            300,
        ),
        *_contract("A", out, "gloo", 2)[:1],
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
            estimate_s=120,
            limit_s=200,
            apart=True,
            rehearsal=(op,),
        )
        for tool in ("memcheck", "racecheck")
        for op in ("kda", "ssd", "conv1d")
    ]
    return [
        Step(
            "kda kernels", "B", _found("tests/kernels", "test_kda*_gpu.py"), 90, 200, rehearsal=None
        ),
        Step(
            "ssd kernels", "B", _found("tests/kernels", "test_ssd*_gpu.py"), 90, 200, rehearsal=None
        ),
        Step(
            "conv1d kernels",
            "B",
            _found("tests/kernels", "test_conv1d*_gpu.py"),
            60,
            150,
            rehearsal=None,
        ),
        Step(
            "cudnn engine",
            "B",
            _found("backends/cudnn_summary/tests", "test_*gpu*.py"),
            90,
            200,
            rehearsal=None,
        ),
        *(step for pair in pairs for step in _contract("B", out, *pair)),
        *(_ops("B", *pair) for pair in pairs),
        *(_capture("B", *pair) for pair in pairs),
        Step("long sequences", "B", ("tests/gpu/test_long_gpu.py",), 90, 200),
        Step("large", "B", ("tests/gpu/test_large_gpu.py",), 60, 150),
        Step("cold start", "B", ("tests/gpu/test_cold_gpu.py",), 80, 180),
        *sanitizers,
        *(_endurance("B", *pair) for pair in pairs),
        Step(
            "doctor",
            "B",
            command=("python", "-m", "cptransport", "doctor", "--json"),
            estimate_s=15,
        ),
    ]


# ------------------------------------------------------------------------------------------------- C


def _boundary(group: str, ranks: int, *more: str, limit_s: float) -> Step:
    """All backends; the slowest part is to start their ranks."""
    backends = (*ONE_SIDED, "nccl", CUDNN)
    named = [word for backend in backends for word in ("--backend", backend)]
    return Step(
        f"bench boundary {ranks}",
        group,
        (
            *("boundary", *named, "--world-size", str(ranks), "--heads", "8"),
            *(*more, *PUBLISHED),
        ),
        estimate_s=26 * len(backends),
        limit_s=limit_s,
        bench=True,
        alone=True,
        rehearsal=(
            *("boundary", "--backend", "gloo", "--backend", "threads", "--world-size", "2"),
            *("--heads", "2", "--key-dim", "4", "--value-dim", "4", *BOTH_WAYS, *TINY),
        ),
    )


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
#: p50 of the maxima over ranks, of 10 iterations after 5.
TEN = ("--warmup", "5", "--iterations", "10", "--repeats", "1")
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
    return Step(
        name,
        "C",
        (*KDA, *words, *SHORT),
        estimate_s=12 * len(shapes) * len(GATES) + 60 * bool(peers),
        limit_s=280,
        bench=True,
        alone=True,
        rehearsal=TINY_KDA,
    )


def _mixer(group: str, ranks: int, shapes: Sequence[str], *, small: bool, backend: str) -> Step:
    size = ("--groups", "4", "--batch", "3") if small else ("--groups", "8")
    kind = "small" if small else "full"
    words = [word for shape in shapes for word in ("--shape", shape)]
    return Step(
        f"bench mixer {kind} {ranks}",
        group,
        (
            *(*MIXER, "--backend", backend, "--world-size", str(ranks), *words, *size),
            *("--baseline", "all_to_all", *TEN),
        ),
        estimate_s=20 + 8 * len(shapes),
        limit_s=150,
        bench=True,
        alone=True,
        rehearsal=TINY_MIXER,
    )


def _times(out: Path) -> list[Step]:
    both = ("triton", "cudnn")
    return [
        _kda("bench kda 2048x16", ["2048x16"], both, ["fla", "cudnn"]),
        _boundary("C", 4, "--composition", "gather", limit_s=260),
        Step(
            "bench mamba2",
            "C",
            (
                *(*MIXER, "--groups", "8", "--engine", "triton", "--baseline", "mamba_ssm"),
                *("--shape", "4096x64", "--shape", "1024x64", "--shape", "16384x64"),
                *("--overlap", *SHORT),
            ),
            estimate_s=90,
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
            _mixer("C", ranks, [f"{4096 // ranks}x{heads}"], small=heads == 32, backend="cupy_ipc")
            for ranks in (2, 4)
            for heads in (64, 32)
        ),
        _boundary("C", 2, "--composition", "gather", limit_s=260),
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
            *(*words, "--overlap", *SHORT),
        ),
        estimate_s=40,
        limit_s=120,
        bench=True,
        alone=True,
        rehearsal=_tiny_ranks(),
    )


def _tiny_ranks() -> tuple[str, ...]:
    return (
        *("kda", "--backend", "gloo", "--backend", "nccl", "--world-size", "2", "--key-dim", "8"),
        *("--shape", "40x2", "--shape", "24x1", "--composition", "gather"),
        *("--composition", "handoff", "--composition", "scan"),
        *("--value-dim", "8", "--engine", "torch", "--overlap", "--baseline", "fla", *TINY),
    )


# ------------------------------------------------------------------------------------------------- D


def _many_gpus(out: Path, gpus: int) -> list[Step]:
    ranks = max(2, gpus)
    one_each = ["--ranks-per-device", "1"]
    named = [word for backend in BACKENDS for word in ("--backend", backend)]
    shapes = [(4096, 8), (8192, 16)] + ([(65536, 32)] if ranks > 2 else [])
    kda = [word for tokens, heads in shapes for word in ("--shape", f"{tokens // ranks}x{heads}")]
    compositions = ["gather"] if ranks == 2 else ["gather", "handoff", "scan"]
    ways = [word for how in compositions for word in ("--composition", how)]
    lengths = [4096, 16384, 65536] + ([131072] if ranks > 2 else [])
    full = [f"{length // ranks}x64" for length in lengths]
    small = [f"{length // ranks}x32" for length in lengths[:2]]
    few = () if ranks > 2 else ("--composition", "gather")
    made = [
        _warm("D"),
        *(step for backend in BACKENDS for step in _contract("D", out, backend, ranks)),
        Step("faults", "D", ("tests/gpu/test_faults_gpu.py",), 60, 150, rehearsal=None),
        *(_ops("D", backend, ranks) for backend in BACKENDS),
        Step(
            "fla bits",
            "D",
            ("tests/integrations/test_fla_gpu.py", "-k", f"bits and {ranks}-"),
            120,
            280,
        ),
        _boundary("D", ranks, *one_each, *BOTH_WAYS, *few, limit_s=290),
        Step(
            f"bench kda ranks {ranks}",
            "D",
            (
                *(*KDA, "--engine", "triton", *named, "--world-size", str(ranks), *one_each),
                *(*kda, *ways, "--overlap", "--baseline", "fla", *PUBLISHED),
            ),
            estimate_s=170,
            limit_s=280,
            bench=True,
            alone=True,
            rehearsal=_tiny_ranks(),
        ),
        _mixer("D", ranks, full, small=False, backend="cupy_ipc"),
        _mixer("D", ranks, small, small=True, backend="cupy_ipc"),
        *(_capture("D", backend, ranks) for backend in BACKENDS),
    ]
    return [replace(step, name=f"{ranks} GPUs: {step.name}") for step in made]
