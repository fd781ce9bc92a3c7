# SPDX-License-Identifier: Apache-2.0
"""KDA among real ranks: ours over the backend, FLA's context parallelism over ``torch.distributed``, in turn.

Every rank makes the whole input from the seed, computes the unsharded op for itself, and compares
its part; then all ranks take samples of everything in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.bench.baselines import Place, load_peers
from cptransport.bench.cases import Measured, Progress, one_by_one
from cptransport.bench.kda_op import KDAShape, kda_layer
from cptransport.bench.launch import placement
from cptransport.bench.layer_stage import PEERS, SHARDED, Setup, Stage, Tensors, asking, check
from cptransport.bench.memory import describe
from cptransport.bench.rank_runs import MODES, Candidate, Key, measure_backends, run_candidates
from cptransport.bench.rows import Outcome, Subject, row
from cptransport.bench.timing import Budget
from cptransport.context import CPContext
from cptransport.errors import BackendUnavailableError
from cptransport.ops import last_run
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport

__all__ = ["kda_rank", "measure_on_ranks"]

Run = Callable[[str], list[Tensor]]


def measure_on_ranks(
    shapes: Sequence[KDAShape], args: argparse.Namespace, progress: Progress
) -> Measured:
    """Measure configurations, one after the other, on all ranks of every backend."""
    if "threads" in args.backend:
        raise ValueError(
            "threads share one autograd and one environment; name a backend of processes"
        )
    where = placement(args, 4)
    if where.world_size < 2:
        raise ValueError("real ranks are at least 2")
    baselines = list(dict.fromkeys(args.baseline or []))
    if others := set(baselines) - {"fla"}:
        raise ValueError(f"{sorted(others)} have no context parallelism; drop --backend")
    setup = Setup(where.world_size, args.dtype, args.seed, args.timeout_s)

    def one(shape: KDAShape, step: Progress) -> list[dict[str, Any]]:
        named = f"{shape.tokens}x{shape.value_heads}"
        found = measure_backends(
            kda_rank,
            args,
            where,
            step,
            shape=asdict(shape),
            setup=asdict(setup),
            engines=list(dict.fromkeys(args.engine or [None])),
            compositions=list(dict.fromkeys(args.composition or [None])),
            overlaps=[False, True] if args.overlap else [False],
            fla=bool(baselines) and named in (args.baseline_shape or [named]),
            limit_s=args.baseline_limit_s,
            warmup=args.warmup,
            iterations=args.iterations,
            repeats=args.repeats,
            cold=args.l2 == "cold",
        )
        return [
            _row(shape, setup, backend, key, outcomes)
            for backend, of_backend in found.items()
            for key, outcomes in of_backend.items()
        ]

    rows, interrupted = one_by_one("kda", shapes, one, progress)
    return Measured(
        rows,
        world_size=where.world_size,
        gpus_used=where.gpus_used,
        interleaving="providers, modes and timers of a backend by iteration, on the host's clock each after an "
        "untimed call of its own; backends one after the other" + interrupted,
        input_distribution=kda_layer(shapes[0]).distribution,
        verification="every rank's output and gradients against the own unsharded op: largest error over "
        "largest value; captured calls by their replay",
        peak_memory=describe(torch.device(args.device)),
    )


def _row(
    shape: KDAShape, setup: Setup, backend: str, key: Key, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    layer = kda_layer(shape)
    options = {**layer.options, **dict(key.options)}
    if key.baseline:
        options["beside"] = backend
    tokens = {"T_global": shape.tokens * setup.world_size, "T_local": shape.tokens, "N": 1}
    subject = Subject(
        case=layer.case,
        op=layer.op,
        mode=key.mode,
        provider=key.provider,
        timer=key.timer,
        world_size=setup.world_size,
        dtype=setup.dtype,
        shape={**layer.shape, **tokens},
        baseline=key.baseline,
        options=options,
    )
    return row(subject, outcomes, tokens=shape.tokens * setup.world_size, moves=False)


def kda_rank(
    ranks: Ranks,
    shape: Mapping[str, Any],
    setup: Mapping[str, Any],
    engines: Sequence[str | None],
    compositions: Sequence[str | None],
    overlaps: Sequence[bool],
    fla: bool,
    limit_s: float,
    warmup: int,
    iterations: int,
    repeats: int,
    cold: bool,
) -> list[tuple[Key, Outcome]]:
    """Measure on this rank; a case of ``on_ranks``."""
    try:
        transport = ranks.create()
    except BackendUnavailableError as error:
        skipped = Outcome(skipped=str(error))
        return [(Key(ranks.backend, mode, "perf_counter"), skipped) for mode in MODES]
    stage = Stage(kda_layer(KDAShape(**shape)), Setup(**setup), ranks.device)
    candidates = []
    first: Tensors = {}
    for engine in engines:
        expected = _expected(stage, engine, ranks.rank)
        first = first or expected
        for composition in compositions:
            candidates += [
                _own(stage, transport, expected, engine, composition, overlap)
                for overlap in overlaps
            ]
    if fla:
        candidates.append(_fla(stage, ranks, first, limit_s))
    return run_candidates(candidates, transport, Budget(warmup, iterations, cold, repeats))


def _expected(stage: Stage, engine: str | None, rank: int) -> Tensors:
    """Return this rank's part of the unsharded op."""
    single = stage.single(stage.plan.total_rows)
    whole = stage.layer.explicit(stage.inputs, single, engine, stage.grad)
    return {name: stage.plan.shard(x, rank).clone() for name, x in whole.items()}


def _leaves(stage: Stage, rank: int) -> Tensors:
    return {name: x.detach().clone().requires_grad_() for name, x in stage.local(rank).items()}


def _steps(stage: Stage, rank: int, leaves: Tensors, call: Callable[[], Tensor]) -> Run:
    grad = stage.local_grad(rank)

    def run(mode: str) -> list[Tensor]:
        output = call()
        if mode == "fwd":
            return [output.detach()]
        return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), grad)]

    return run


def _checks(what: str, expected: Tensors, leaves: Tensors, limit: float) -> Callable[..., float]:
    names = ["o", *leaves]

    def judge(results: Sequence[Tensor]) -> float:
        pairs = zip(names[: len(results)], results, strict=True)
        return max(check(f"{name} of {what}", x, expected[name], limit) for name, x in pairs)

    return judge


def _own(
    stage: Stage,
    transport: BoundaryTransport,
    expected: Tensors,
    engine: str | None,
    composition: str | None,
    overlap: bool,
) -> Candidate:
    cp, rank = CPContext(stage.plan, transport), transport.rank
    leaves = _leaves(stage, rank)

    within = partial(asking, overlap=overlap, composition=composition)

    def call() -> Tensor:
        return stage.layer.call(leaves, cp, engine)

    options: dict[str, Any] = {"overlap": overlap}
    skipped = None
    if composition == "handoff" and not transport.capabilities.pairwise:
        skipped = f"{transport.name!r} lacks the capability pairwise"
        options.update(engine=engine or "auto", composition=composition)
    else:
        with within():
            call()  # compiles, and tells what runs
        ran = last_run()
        assert ran is not None
        options.update(engine=engine or ran.engine, composition=ran.composition)
        if engine not in (None, ran.engine):
            reasons = [why for name, why in ran.reasons if name == engine]
            skipped = f"engine {engine} cannot serve: {'; '.join(reasons)}"
    return Candidate(
        transport.name,
        _steps(stage, rank, leaves, call),
        _checks(transport.name, expected, leaves, SHARDED[stage.dtype]),
        options=options,
        skipped=skipped,
        received=lambda: transport.stats().bytes_received,
        within=within,
    )


def _fla(stage: Stage, ranks: Ranks, expected: Tensors, limit_s: float) -> Candidate:
    """FLA over the default group; its kernels are tuned on this rank alone, before peers could wait."""
    place = Place(
        stage.layer.op,
        stage.device,
        stage.dtype,
        ranks.rank,
        ranks.world_size,
        stage.local,
        stage.local_grad,
        stage.layer.options,
        limit_s,
    )
    absent = load_peers("fla", place)[0].absent
    ranks.tell(f"tuned/{ranks.rank}", absent or "")
    others = [ranks.ask(f"tuned/{rank}", limit_s + 60) for rank in range(ranks.world_size)]
    absent = next((reason for reason in others if reason), None)
    leaves = _leaves(stage, ranks.rank)
    if absent is not None:
        return Candidate("fla", lambda mode: [], lambda results: 0.0, baseline=True, skipped=absent)
    from fla.ops.cp import build_cp_context
    from fla.ops.kda import chunk_kda

    whole = torch.tensor([0, stage.plan.total_rows], dtype=torch.int32, device=stage.device)
    context = build_cp_context(whole, dist.group.WORLD)

    def call() -> Tensor:
        output: Tensor = chunk_kda(**leaves, cp_context=context)[0]
        return output

    return Candidate(
        "fla",
        _steps(stage, ranks.rank, leaves, call),
        _checks("fla", expected, leaves, PEERS[stage.dtype]),
        baseline=True,
        foreign=True,
        capture=False,
    )
