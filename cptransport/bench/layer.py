# SPDX-License-Identifier: Apache-2.0
"""Whole ops: what one interior rank spends with its boundary, without it, and what peers spend.

All ranks run once, as threads, and are checked against the unsharded op; what came to the interior
rank is recorded. Then that rank runs alone on the recording (``cptransport.testing.recorded``),
beside the same op without context parallelism on the same tokens (``cptransport``, the baseline
of the ratio that says what the boundary costs) and beside peers, all in turn.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from cptransport.bench.baselines import BASELINES
from cptransport.bench.cases import Measured, Progress, positive
from cptransport.bench.layer_stage import LayerOp, Provider, Stage, check
from cptransport.bench.memory import describe, peak_bytes
from cptransport.bench.rows import Outcome, Subject, row
from cptransport.bench.timing import (
    Body,
    Budget,
    GraphReplay,
    PerfCounter,
    Profiler,
    Series,
    Timer,
    captured,
    measure,
)
from cptransport.ops import last_run

__all__ = ["add_layer_arguments", "measure_layer"]

_MODES = ("fwd", "fwd_bwd")


def add_layer_arguments(parser: argparse.ArgumentParser, op: str) -> None:
    """Add the options that whole-op benches share."""
    parser.add_argument("--tokens", type=positive, default=4096, help="local (default 4096)")
    parser.add_argument(
        "--world-size", type=positive, default=4, help="ranks recorded, at least 3 (default 4)"
    )
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16", "float64"), default="float32"
    )
    parser.add_argument("--engine", help="default: CULA_CP_ENGINE, else auto")
    parser.add_argument(
        "--baseline",
        action="append",
        choices=list(BASELINES[op]),
        help="a peer, without CP; may be given several times",
    )


@dataclass
class _Entry:
    """One row in the making."""

    provider: Provider
    mode: str
    timer: str
    outcome: Outcome
    series: Series | None = None


def measure_layer(layer: LayerOp, args: argparse.Namespace, progress: Progress) -> Measured:
    """Measure an op; see the module docstring."""
    if args.world_size < 3:
        raise ValueError("an interior rank needs at least 3 ranks")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    stage = Stage(layer, args, device)
    progress(f"{layer.case}: all ranks, the unsharded op, and a reference in fp64", 0.0)
    own = stage.own()
    entries: list[_Entry] = []
    for provider in [*own, *stage.peers(own[-1])]:
        progress(f"{layer.case}: checking {provider.name}", 0.0)
        entries += _entries(stage, provider)
    # Rows of one mode and timer together, so that iterations go round the providers.
    entries.sort(key=lambda entry: (entry.timer, entry.mode))
    running = [entry.series for entry in entries if entry.series is not None]
    budget = Budget(args.warmup, args.iterations, args.l2 == "cold")
    for repeat in range(args.repeats):
        progress(f"{layer.case}: repeat {repeat + 1} of {args.repeats}", repeat / args.repeats)
        measure(running, budget, device=device)
    bound = None
    if args.bandwidth_gbytes_s:
        bound = (
            f"inputs, output and gradients moved once per pass at {args.bandwidth_gbytes_s:g} GB/s"
        )
    return Measured(
        [_row(stage, entry) for entry in entries],
        world_size=1,
        gpus_used=int(device.type == "cuda"),
        interleaving="providers, modes and timers by iteration",
        input_distribution=layer.distribution,
        verification="all ranks against the own unsharded op; the interior rank alone against its run "
        "among all, bytes against plan.volume; without CP against the torch engine in fp64: output and "
        "every gradient, largest error over largest value",
        bound=bound,
        peak_memory=describe(device),
    )


class _Runs:
    """What a provider runs: both modes on leaves of its own."""

    def __init__(self, stage: Stage, provider: Provider) -> None:
        self.provider = provider
        self.leaves = {
            name: x.detach().clone().requires_grad_() for name, x in stage.local(stage.rank).items()
        }
        self._grad = stage.local_grad(stage.rank)

    def fwd(self) -> list[Tensor]:
        """Return the output."""
        assert self.provider.call is not None
        return [self.provider.call(self.leaves)]

    def fwd_bwd(self) -> list[Tensor]:
        """Return the output and all gradients."""
        (output,) = self.fwd()
        return [output, *torch.autograd.grad(output, list(self.leaves.values()), self._grad)]

    def check(self, results: Sequence[Tensor]) -> float:
        """Return the largest absolute error of results of either mode; raise if too large."""
        provider = self.provider
        names = ["o", *self.leaves][: len(results)]
        return max(
            check(f"{name} of {provider.name}", actual, provider.expected[name], provider.limit)
            for name, actual in zip(names, results, strict=True)
        )


def _entries(stage: Stage, provider: Provider) -> list[_Entry]:
    """Check a provider and return its rows to be."""
    if provider.absent is not None:
        reason = Outcome(skipped=provider.absent)
        return [_Entry(provider, mode, "perf_counter", replace(reason)) for mode in _MODES]
    runs = _Runs(stage, provider)
    entries = []
    for mode in _MODES:
        call = getattr(runs, mode)
        outcome = Outcome(error=provider.failed) if provider.failed else _verify(runs, mode, call)
        if outcome.error is None:
            outcome.peak_mem_bytes = peak_bytes(call, stage.device)
        for timer in _timers(stage.device):
            entry = _Entry(provider, mode, timer, replace(outcome))
            if outcome.error is None:
                _arm(entry, runs, call, stage.device)
            entries.append(entry)
    return entries


def _verify(runs: _Runs, mode: str, call: Callable[[], list[Tensor]]) -> Outcome:
    outcome, provider = Outcome(), runs.provider
    transport = provider.transport
    try:
        before = transport.stats().bytes_received if transport else 0
        outcome.max_abs_err = runs.check(call())
        if transport is not None:
            outcome.bytes_expected = provider.volume[mode]
            outcome.bytes_received = transport.stats().bytes_received - before
            if outcome.bytes_received != outcome.bytes_expected:
                raise AssertionError(
                    f"received {outcome.bytes_received} bytes where the plan says {outcome.bytes_expected}"
                )
    except Exception as error:
        outcome.error = _text(error)
    ran = last_run()
    if provider.name.startswith("cptransport") and ran is not None:
        provider.options["engine"] = ran.engine
        if transport is not None:
            provider.options["composition"] = ran.composition
    return outcome


def _arm(
    entry: _Entry, runs: _Runs, call: Callable[[], list[Tensor]], device: torch.device
) -> None:
    """Make the series of an entry; a captured one is checked again, by its replay."""
    body = Body(call)
    if entry.timer == "graph_replay":
        if device.type != "cuda":
            entry.outcome.skipped = "CUDA graphs need a CUDA device"
            return
        try:
            body, results = captured(body)
            body.timed()
            runs.check(results)
        except Exception as error:
            entry.outcome.error = _text(error)
            return
    entry.series = Series(_timer(entry.timer, device), body)


def _row(stage: Stage, entry: _Entry) -> dict[str, Any]:
    args, layer, provider, outcome = stage.args, stage.layer, entry.provider, entry.outcome
    if entry.series is not None:
        outcome.error = outcome.error or entry.series.error
        outcome.samples_us = [] if outcome.error else entry.series.samples_us
        if isinstance(entry.series.timer, Profiler):
            outcome.kernels = entry.series.timer.kernels
    tokens = {"T_global": args.tokens * provider.world_size, "T_local": args.tokens, "N": 1}
    subject = Subject(
        case=layer.case,
        op=layer.op,
        mode=entry.mode,
        provider=provider.name,
        timer=entry.timer,
        world_size=provider.world_size,
        dtype=args.dtype,
        shape={**layer.shape, **tokens},
        baseline=provider.baseline,
        options={**layer.options, **provider.options},
    )
    return row(
        subject,
        [outcome],
        bandwidth_gbytes_s=args.bandwidth_gbytes_s,
        moved_bytes=_moved_bytes(stage, entry.mode),
        tokens=args.tokens,
        moves=False,
    )


def _moved_bytes(stage: Stage, mode: str) -> int:
    """Return the bytes that no implementation can avoid: inputs and output once per pass, and gradients."""
    inputs = sum(x.nbytes for x in stage.local(stage.rank).values())
    output = stage.local_grad(stage.rank).nbytes
    return inputs + output if mode == "fwd" else 3 * inputs + 2 * output


def _timers(device: torch.device) -> list[str]:
    wall_and_graph = ["perf_counter", "graph_replay"]
    return [*wall_and_graph, "profiler"] if device.type == "cuda" else wall_and_graph


def _timer(name: str, device: torch.device) -> Timer:
    if name == "perf_counter":
        return PerfCounter(device)
    return GraphReplay() if name == "graph_replay" else Profiler()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
