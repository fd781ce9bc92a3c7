# SPDX-License-Identifier: Apache-2.0
"""``cptransport verify OP``: an op on the ranks of any backend against the recurrence in fp64."""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from cptransport import env, errors
from cptransport.bench.launch import CaseError, close_ranks, on_ranks, torchrun_world
from cptransport.cli.plan import boundaries, offsets
from cptransport.composition import COMPOSITIONS
from cptransport.errors import CPTransportError
from cptransport.layouts import LAYOUTS
from cptransport.testing.op_cases import OPTIONAL, OpCase, OpSpec
from cptransport.testing.op_oracle import Comparison, judge
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import RankRun, run_rank
from cptransport.testing.ranks import Ranks

__all__ = ["add_parser", "run", "verify_rank"]

#: Names on the command line -> the oracle's.
_OPS = {
    "kda": "kda",
    "chunk_kda": "kda",
    "mamba2": "ssd",
    "ssd": "ssd",
    "mamba_chunk_scan_combined": "ssd",
    "conv1d": "conv1d",
    "causal_conv1d": "conv1d",
    "mixer": "mixer",
    "mamba_split_conv1d_scan_combined": "mixer",
}
_DTYPES = ("float32", "float64", "bfloat16", "float16")
_OPTIONS: dict[str, dict[str, Any]] = {
    "kda": {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    },
    "ssd": {"chunk_size": 64, "dt_softplus": True},
    "conv1d": {"activation": "silu"},
    "mixer": {"chunk_size": 64},
}


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "verify",
        help="an op on the ranks of a backend against the token-by-token recurrence in fp64",
        description="Runs an op forward and backward on every rank and compares every output, state "
        "and gradient on every rank with the unsharded recurrence in fp64, sums over ranks where "
        "inputs are replicated, and the bytes that moved with the plan. All comparisons are made "
        "before the verdict, which is the same on every rank. Under torchrun the ranks of the launch "
        "are used. Exit code 1: some comparison does not hold.",
    )
    parser.add_argument("op", choices=sorted(_OPS), metavar="OP", help=", ".join(sorted(_OPS)))
    parser.add_argument(
        "--backend",
        help="a backend's name; 'threads' runs the ranks in this process "
        f"(default: {env.COMM_BACKEND.name}, else auto)",
    )
    parser.add_argument("--world-size", type=int, default=4, metavar="N", help="ranks (default 4)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument(
        "--ranks-per-device", type=int, default=1, metavar="N", help="ranks that share a GPU"
    )
    parser.add_argument("--dtype", default="float32", choices=_DTYPES)
    plan = parser.add_argument_group("plan")
    plan.add_argument(
        "--cu-seqlens",
        type=offsets,
        default=[0, 5, 5, 37, 101],
        metavar="0,5,13",
        help="offsets of the sequences (default 0,5,5,37,101)",
    )
    plan.add_argument(
        "--layout",
        default="contiguous",
        metavar="NAME",
        help=f"{', '.join(LAYOUTS)} (default contiguous)",
    )
    plan.add_argument("--boundaries", type=boundaries, metavar="0,4,13", help="see 'plan'")
    plan.add_argument("--padded-cu-seqlens", type=offsets, metavar="0,8,16", help="see 'plan'")
    plan.add_argument("--batch", type=int, metavar="B", help="rows of a plan of one sequence")
    sizes = parser.add_argument_group("sizes")
    sizes.add_argument("--heads", type=int, metavar="H", help="H, or groups")
    sizes.add_argument("--value-heads", type=int, metavar="HV", help="HV, or heads of Mamba2")
    sizes.add_argument("--key-dim", type=int, metavar="K", help="K, or dstate")
    sizes.add_argument("--value-dim", type=int, metavar="V", help="V, or headdim")
    sizes.add_argument("--width", type=int, metavar="W", help="of the convolution")
    how = parser.add_argument_group("how")
    how.add_argument("--engine", help=f"local compute (default: {env.ENGINE.name}, else auto)")
    how.add_argument(
        "--composition",
        choices=("auto", *COMPOSITIONS),
        help=f"of summaries (default: {env.COMPOSITION.name}, else auto)",
    )
    how.add_argument("--overlap", action="store_true", default=None)
    how.add_argument("--seed", type=int, default=0, help="of the inputs (default 0)")
    how.add_argument(
        "--random",
        type=int,
        default=0,
        metavar="N",
        help="also N calls with random plans and options",
    )
    how.add_argument(
        "--timeout-s", type=float, default=300.0, help="of the whole run (default 300)"
    )
    parser.add_argument("--json", action="store_true", help="print only JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Verify; 0: every comparison holds, 1: some do not."""
    launched = torchrun_world()
    backend, _ = env.text(env.COMM_BACKEND, args.backend)
    env.flag(env.STRICT)  # the ranks read it; a typo is refused before any of them starts
    if launched is not None and backend != "threads":
        args.world_size = launched[1]
    specs = _specs(args)
    cases = [OpCase.of(spec) for spec in specs]  # refuses a plan before any rank starts
    start = time.monotonic()
    try:
        answers = on_ranks(
            verify_rank,
            backend=backend,
            world_size=args.world_size,
            device=args.device,
            ranks_per_device=args.ranks_per_device,
            timeout_s=args.timeout_s,
            specs=[spec.to_json() for spec in specs],
        )
    except CaseError as failure:
        raise errors.TransportError(_last_line(failure)) from failure
    finally:
        close_ranks()
    _raise_errors(answers)
    exact = backend != "cudnn_summary"  # it gathers densely
    judged = [
        judge(case, [answer[1][i] for answer in answers], exact_bytes=exact)
        for i, case in enumerate(cases)
    ]
    correct = all(each.ok for comparisons in judged for each in comparisons)
    if launched is not None and launched[0] > 0:
        return 0 if correct else 1
    seconds = time.monotonic() - start
    if args.json:
        results = [_result(*each) for each in zip(cases, answers[0][1], judged, strict=True)]
        report = {
            "op": args.op,
            "backend": backend,
            "transport": answers[0][0],
            "world_size": args.world_size,
            "device": args.device,
            "ok": correct,
            "seconds": seconds,
            "calls": results,
        }
        print(json.dumps(report, indent=1, allow_nan=False))
    else:
        for case, first, comparisons in zip(cases, answers[0][1], judged, strict=True):
            print(_text(case, answers[0][0], first, comparisons))
        total = sum(len(comparisons) for comparisons in judged)
        wrong = sum(not each.ok for comparisons in judged for each in comparisons)
        print(f"{total} comparisons on {args.world_size} ranks, {wrong} wrong, {seconds:.1f} s")
        print("verified" if correct else "WRONG")
    return 0 if correct else 1


def verify_rank(ranks: Ranks, specs: Sequence[Mapping[str, Any]]) -> Any:
    """Run one rank's half of all calls: ``(transport, runs)``, or ``(error's class, its text)``."""
    try:
        transport = ranks.create()
        runs = [run_rank(transport, OpCase.of(OpSpec(**spec))) for spec in specs]
        return transport.name, runs
    except CPTransportError as error:
        return type(error).__name__, str(error)


def _specs(args: argparse.Namespace) -> list[OpSpec]:
    """Return the call that the arguments describe, with all optional inputs, then random ones."""
    op = _OPS[args.op]
    sizes: dict[str, Any] = {"heads": 3, "value_heads": 6, "key_dim": 8, "value_dim": 12}
    if args.device == "cuda":
        sizes.update(heads=2, value_heads=4, key_dim=32, value_dim=64)
    given = ("heads", "value_heads", "key_dim", "value_dim", "width", "batch")
    sizes.update({name: v for name in given if (v := getattr(args, name)) is not None})
    how: dict[str, Any] = {"engine": args.engine, "overlap": env.flag(env.OVERLAP, args.overlap)}
    how["composition"] = env.choice(env.COMPOSITION, args.composition)
    first = OpSpec(
        op,
        args.cu_seqlens,
        args.world_size,
        args.layout,
        args.boundaries,
        args.padded_cu_seqlens,
        dtype=args.dtype,
        optional=OPTIONAL[op],
        options=_OPTIONS[op],
        seed=args.seed,
        **sizes,
        **how,
    )
    rng = random.Random(args.seed)
    fixed = {"world_size": args.world_size, "dtype": args.dtype, "engine": args.engine}
    if args.dtype in ("bfloat16", "float16"):
        fixed["loss"] = ("output", "final")  # else gradients may be below what 16 bits hold
    return [first, *(random_spec(rng, op, **fixed) for _ in range(args.random))]


def _raise_errors(answers: Sequence[Any]) -> None:
    """Raise what a rank met itself, before what the others heard of it."""
    failed = [answer for answer in answers if isinstance(answer[1], str)]
    own = [answer for answer in failed if answer[0] != "PeerFailedError"]
    for name, text in own or failed:
        raise getattr(errors, name)(text)


def _result(case: OpCase, first: RankRun, comparisons: Sequence[Comparison]) -> dict[str, Any]:
    return {
        "spec": _plain(case.spec.to_json()),
        "plan": case.plan.digest(),
        "engine": first.record.engine if first.record else None,
        "composition": first.record.composition if first.record else None,
        "ok": all(each.ok for each in comparisons),
        "comparisons": [
            {**{name: _plain(value) for name, value in vars(each).items()}, "ok": each.ok}
            for each in comparisons
        ],
    }


def _plain(value: Any) -> Any:
    """Return JSON: numbers that are not finite become texts."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(case: OpCase, transport: str, run: RankRun, comparisons: Sequence[Comparison]) -> str:
    spec, ran = case.spec, run.record
    how = f"engine {ran.engine}, composition {ran.composition}" if ran else "no record"
    lines = [
        f"{spec.op} on {transport}: {spec.dtype}, layout {spec.layout}, cu_seqlens "
        f"{list(spec.cu_seqlens)}, {how}",
        *map(str, comparisons),
        "",
    ]
    return "\n".join(lines)


def _last_line(failure: CaseError) -> str:
    """Return one line that says why the ranks gave no answer."""
    rank, text = next(iter(failure.failures.items()))
    return f"rank {rank}: {text.strip().splitlines()[-1]}"
