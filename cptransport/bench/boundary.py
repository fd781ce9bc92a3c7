# SPDX-License-Identifier: Apache-2.0
"""``bench boundary``: what it takes from published summaries to merged states, on any backend.

Modes: ``merge`` is the whole step; ``publish_fetch`` is its synchronisation and movement alone;
``fold`` is its computation alone, the same exchange on recorded summaries. Eager times begin when
the summaries are written; a captured step holds staging too (option ``region``). Beside every
backend, on its ranks, the baseline: one all-gather of ``torch.distributed`` and the same fold.

A captured row replays ten steps in a row (option ``steps``), and its samples are tenths: of a lone
step the slowest rank's time would mostly be how far apart the ranks leave the barrier before it.
Only that is shared out. Steps of different ranks do not slide far past each other: over peers' memory
the first ``stage`` of a replay waits until all others have released the generation before, later ones
until the destinations have released the one before that, and an all-gather until all have entered it,
so a rank is two steps ahead of those it sends to at most.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import asdict
from typing import Any

from cptransport.bench.boundary_data import Settings, Variant, variants
from cptransport.bench.boundary_rank import boundary_rank
from cptransport.bench.cases import Case, Measured, Progress, positive
from cptransport.bench.launch import (
    CaseError,
    Placement,
    last_words,
    on_ranks,
    placement,
    shared_gpu,
    torchrun_world,
)
from cptransport.bench.rows import Outcome, Subject, row
from cptransport.composition import COMPOSITIONS, DIRECTIONS
from cptransport.layouts import LAYOUTS
from cptransport.testing.pool import close_pools

__all__ = ["CASE"]


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        help="a backend's name; several times: all of them, on the CPU interleaved (default: threads and "
        "gloo on CPU; on CUDA nccl with a GPU per rank, gloo with fewer)",
    )
    parser.add_argument(
        "--world-size",
        type=positive,
        help="ranks to start, at least 2 (default 4, with 2 or 3 GPUs one each); under torchrun those "
        "of the launch",
    )
    parser.add_argument(
        "--ranks-per-device", type=positive, help="with CUDA (default: as few as there must be)"
    )
    parser.add_argument("--op", choices=("kda", "ssd"), default="kda", help="default kda")
    parser.add_argument("--heads", type=positive, default=8, help="HV or nheads (default 8)")
    parser.add_argument("--key-dim", type=positive, default=128, help="K or dstate (default 128)")
    parser.add_argument(
        "--value-dim", type=positive, default=128, help="V or headdim (default 128)"
    )
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument(
        "--layout", choices=[name for name in LAYOUTS if name != "custom"], default="contiguous"
    )
    parser.add_argument("--sequences", type=positive, default=1, help="default 1")
    parser.add_argument(
        "--composition", action="append", choices=COMPOSITIONS, help="default: all of them"
    )
    parser.add_argument("--direction", action="append", choices=DIRECTIONS, help="default: forward")
    parser.add_argument(
        "--no-baseline",
        action="store_true",
        help="leave out torch.distributed's all-gather with the same fold, which runs beside each backend",
    )


def _measure(args: argparse.Namespace, progress: Progress) -> Measured:
    ranks = placement(args)
    world_size = ranks.world_size
    if world_size < 2:
        raise ValueError("bench boundary needs at least 2 ranks: one rank has no boundary")
    backends = list(dict.fromkeys(args.backend or _default_backends(args.device, ranks)))
    # On GPUs making ready takes longer than a repeat: each backend does all its repeats at once.
    at_once = ranks.gpus_used > 0
    settings = Settings(
        op=args.op,
        heads=args.heads,
        key_dim=args.key_dim,
        value_dim=args.value_dim,
        dtype=args.dtype,
        layout=args.layout,
        sequences=args.sequences,
        compositions=tuple(dict.fromkeys(args.composition or COMPOSITIONS)),
        directions=tuple(dict.fromkeys(args.direction or ["forward"])),
        baseline=not args.no_baseline,
        warmup=args.warmup,
        iterations=args.iterations,
        repeats=args.repeats if at_once else 1,
        cold=args.l2 == "cold",
        seed=args.seed,
    )
    chosen = variants(settings, args.device)
    ended: set[str] = set()
    outcomes: dict[str, list[list[Outcome]]] = {
        backend: [[Outcome() for _ in chosen] for _ in range(world_size)] for backend in backends
    }
    repeats = range(1 if at_once else args.repeats)
    turns = [(repeat, backend) for repeat in repeats for backend in backends]
    with shared_gpu(ranks):
        for number, (repeat, backend) in enumerate(turns):
            if backend in ended:
                continue
            which = "all repeats" if at_once else f"repeat {repeat + 1} of {len(repeats)}"
            progress(f"boundary on {backend}, {which}", number / len(turns))
            try:
                found = _repeat(args, backend, ranks, settings)
            except CaseError as error:  # its row says so; another repeat would wait as long again
                ended.add(backend)
                texts = last_words(error, world_size)
                found = [[Outcome(error=text) for _ in chosen] for text in texts]
            except KeyboardInterrupt:
                if not number:
                    raise
                progress("interrupted; what came before it is kept", number / len(turns))
                _interrupted(outcomes, {backend for _, backend in turns[:number]})
                break
            for rank, of_rank in enumerate(found):
                for outcome, later in zip(outcomes[backend][rank], of_rank, strict=True):
                    outcome.add(later)
            if at_once:
                close_pools()  # the next backend has the GPUs to itself
    rows = [
        row(
            _subject(settings, variant, backend, world_size),
            [outcomes[backend][rank][index] for rank in range(world_size)],
            bandwidth_gbytes_s=args.bandwidth_gbytes_s,
        )
        for index, variant in enumerate(chosen)
        for backend in backends
    ]
    bound = None
    if args.bandwidth_gbytes_s:
        bound = f"bytes of the busiest receiver at {args.bandwidth_gbytes_s:g} GB/s"
    return Measured(
        rows,
        world_size,
        ranks.gpus_used,
        interleaving="modes and compositions of a backend by iteration, backends "
        + ("one after the other" if at_once else "by repeat"),
        input_distribution="state N(0, 1); KDA transition N(0, 1 / 4K), SSD log decay -|N(0, 1)|",
        verification="entering states against a fold in fp64 (relative error as the tests), payload bit "
        "for bit, fold on recorded summaries bit-equal to the real one, bytes against plan.volume",
        bound=bound,
    )


def _default_backends(device: str, ranks: Placement) -> list[str]:
    if device == "cuda":
        return ["nccl" if ranks.per_device == 1 else "gloo"]
    return ["gloo"] if torchrun_world() else ["threads", "gloo"]


def _repeat(
    args: argparse.Namespace, backend: str, ranks: Placement, settings: Settings
) -> list[list[Outcome]]:
    """Return one repeat's outcomes, by rank and variant."""
    return on_ranks(
        boundary_rank,
        backend=backend,
        world_size=ranks.world_size,
        device=args.device,
        ranks_per_device=ranks.per_device,
        timeout_s=args.timeout_s,
        settings=asdict(settings),
    )


def _interrupted(outcomes: dict[str, list[list[Outcome]]], measured: set[str]) -> None:
    """Let the rows of backends whose turn never came say so."""
    for backend in outcomes.keys() - measured:
        for outcome in itertools.chain(*outcomes[backend]):
            outcome.skipped = "interrupted before it was measured"


def _subject(settings: Settings, variant: Variant, backend: str, world_size: int) -> Subject:
    plan = settings.plan(world_size)
    options: dict[str, Any] = {"layout": settings.layout}
    if variant.baseline:
        options["beside"] = backend
    message = None
    if variant.mode != "barrier":
        options["composition"] = variant.composition
        options["direction"] = variant.direction
        start, end = "written", "received" if variant.mode == "publish_fetch" else "merged"
        if variant.timer == "graph_replay":
            start = "staged and written" if variant.overwrites else "staged"
            options["steps"] = settings.steps(variant.timer)
        options["region"] = f"{start} to {end}"
        message = sum(part.nbytes for part in settings.parts(plan))
    return Subject(
        case="boundary",
        op=settings.op,
        mode=variant.mode,
        provider="all_gather" if variant.baseline else backend,
        baseline=variant.baseline,
        timer=variant.timer,
        world_size=world_size,
        dtype=settings.dtype,
        shape={
            "T_global": None,
            "T_local": None,
            "H": settings.heads,
            "K": settings.key_dim,
            "V": settings.value_dim,
            "chunk_size": None,
            "N": settings.sequences,
        },
        message_bytes=message,
        options=options,
    )


CASE = Case(
    name="boundary",
    summary="publish to merged, synchronisation and fold apart, per backend and composition",
    add_arguments=_add_arguments,
    measure=_measure,
)
