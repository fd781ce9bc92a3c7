# SPDX-License-Identifier: Apache-2.0
"""Whole ops among real ranks: candidates are checked, then measured in turn, on every rank alike.

``run_candidates`` is what each rank does, all repeats at once, since making ready takes longer than
measuring; ``measure_backends`` starts the ranks of one backend after the other. A rank whose check
fails goes on taking part, so that its peers are not left waiting; its error is the row's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cptransport.bench.cases import Progress
from cptransport.bench.launch import (
    CaseError,
    Placement,
    close_ranks,
    last_words,
    on_ranks,
    shared_gpu,
)
from cptransport.bench.memory import peak_bytes
from cptransport.bench.rows import Outcome
from cptransport.bench.timing import (
    Body,
    Budget,
    GraphReplay,
    PerfCounter,
    Series,
    Timer,
    captured,
    measure,
)
from cptransport.transport import BoundaryTransport

__all__ = ["MODES", "Candidate", "Key", "measure_backends", "run_candidates"]

MODES = ("fwd", "fwd_bwd")


@dataclass(frozen=True)
class Key:
    """Which row a measurement belongs to; ``options`` as sorted pairs."""

    provider: str
    mode: str
    timer: str
    baseline: bool = False
    options: tuple[tuple[str, Any], ...] = ()


@dataclass
class Candidate:
    """One implementation on one rank.

    Attributes:
        provider, baseline, options: of its rows.
        run: does one iteration of a mode of ``MODES`` and returns output and gradients; collective.
        check: returns the largest absolute error of what ``run`` gave; raises AssertionError.
        foreign: a wrong result of it is no failure of ours, and has no number.
        capture: whether it may be captured.
        skipped: why it cannot run here, alike on all ranks.
        received: bytes that came to this rank so far; None: nobody counts them.
        within: makes the context of every iteration, entered outside the time.
    """

    provider: str
    run: Callable[[str], list[Tensor]]
    check: Callable[[Sequence[Tensor]], float]
    baseline: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    foreign: bool = False
    capture: bool = True
    skipped: str | None = None
    received: Callable[[], int] | None = None
    within: Callable[[], AbstractContextManager[object]] = nullcontext


def run_candidates(
    candidates: Sequence[Candidate], transport: BoundaryTransport, budget: Budget
) -> list[tuple[Key, Outcome]]:
    """Check and measure every candidate in both modes on this rank.

    Args:
        candidates: the same on all ranks, in the same order.
        transport: brings the ranks together before every sample.
        budget: how much is measured.

    Collective: over the transport's ranks.
    """
    found: list[tuple[Key, Outcome]] = []
    running: list[tuple[Candidate, Outcome, Series]] = []
    for candidate in candidates:
        for mode in MODES:
            with candidate.within():
                outcome = _checked(candidate, mode, transport)
            for timer in _timers(candidate, transport):
                own = Outcome(**vars(outcome))
                key = Key(
                    candidate.provider,
                    mode,
                    timer,
                    candidate.baseline,
                    tuple(sorted(candidate.options.items())),
                )
                found.append((key, own))
                with candidate.within():
                    series = _series(candidate, mode, timer, transport, own)
                if series is not None:
                    running.append((candidate, own, series))
    measure([series for _, _, series in running], budget, device=transport.device)
    for candidate, outcome, series in running:
        if candidate.foreign and outcome.error:
            outcome.pass_over()
            continue
        outcome.error = outcome.error or series.error
        outcome.samples_us = [] if outcome.error else series.samples_us
        outcome.repeat_medians_us = [] if outcome.error else series.medians_us
    return found


def _checked(candidate: Candidate, mode: str, transport: BoundaryTransport) -> Outcome:
    if candidate.skipped is not None:
        return Outcome(skipped=candidate.skipped)
    outcome = Outcome()
    before = candidate.received() if candidate.received else 0
    results = candidate.run(mode)  # what it raises ends the case: peers would wait for this rank
    if candidate.received:
        outcome.bytes_received = candidate.received() - before
    try:
        outcome.max_abs_err = candidate.check(results)
    except AssertionError as error:
        outcome.error = f"verification failed: {error}"
    del results
    transport.barrier()
    outcome.peak_mem_bytes = peak_bytes(lambda: candidate.run(mode), transport.device)
    return outcome


def _timers(candidate: Candidate, transport: BoundaryTransport) -> list[str]:
    captures = candidate.capture and transport.capabilities.cuda_graph
    if transport.device.type == "cuda" and captures and candidate.skipped is None:
        return ["perf_counter", "graph_replay"]
    return ["perf_counter"]


def _series(
    candidate: Candidate, mode: str, timer: str, transport: BoundaryTransport, outcome: Outcome
) -> Series | None:
    if outcome.skipped is not None:
        return None
    body = Body(lambda: candidate.run(mode), align=transport.barrier, within=candidate.within)
    chosen: Timer = PerfCounter(transport.device)
    if timer == "perf_counter":
        body = replace(body, prepare=body.timed)  # a candidate follows itself: see ``layer._arm``
    if timer == "graph_replay":
        chosen = GraphReplay()
        try:
            body, results = captured(body)
        except Exception as error:  # alike on all ranks; what is eager is measured all the same
            outcome.error = f"cannot be captured: {type(error).__name__}: {error}"
            return None
        body.align()
        body.timed()
        torch.cuda.synchronize()
        try:
            candidate.check(results)
        except AssertionError as error:
            outcome.error = f"verification of the replay failed: {error}"
    return Series(chosen, body)


def measure_backends(
    case: Callable[..., Any],
    args: argparse.Namespace,
    where: Placement,
    progress: Progress,
    **settings: Any,
) -> dict[str, dict[Key, list[Outcome]]]:
    """Run a case on the ranks of every backend of ``args.backend``.

    Args:
        case: ``case(ranks, **settings)`` returns what ``run_candidates`` returns.
        args: the options of a bench.
        where: the ranks.
        progress: told what runs.
        settings: JSON values.

    Returns:
        backend -> row -> outcomes by rank. A backend whose ranks did not come back has rows of
        ``MODES`` that say why.
    """
    backends = list(dict.fromkeys(args.backend))
    merged: dict[str, dict[Key, list[Outcome]]] = {backend: {} for backend in backends}
    with shared_gpu(where):
        for number, backend in enumerate(backends):
            progress(backend, number / len(backends))
            try:
                found = on_ranks(
                    case,
                    backend=backend,
                    world_size=where.world_size,
                    device=args.device,
                    ranks_per_device=where.per_device,
                    timeout_s=args.timeout_s,
                    **settings,
                )
            except CaseError as error:
                found = _ended(error, backend, where.world_size)
            for rank, of_rank in enumerate(found):
                for key, outcome in of_rank:
                    blank = [Outcome() for _ in range(where.world_size)]
                    merged[backend].setdefault(key, blank)[rank].add(outcome)
            if where.shared and len(backends) > 1:
                close_ranks()  # shares of the GPU must not add up to more than all of it
    return merged


def _ended(error: CaseError, backend: str, world_size: int) -> list[list[tuple[Key, Outcome]]]:
    return [
        [(Key(backend, mode, "perf_counter"), Outcome(error=text)) for mode in MODES]
        for text in last_words(error, world_size)
    ]
