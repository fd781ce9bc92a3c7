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

from cptransport.bench.cases import Measured, Progress, one_by_one
from cptransport.bench.layer_stage import LayerOp, Provider, Setup, Stage, check
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
from cptransport.engine_registry import load_engine
from cptransport.errors import BackendError
from cptransport.ops import last_run

__all__ = ["measure_layers"]

_MODES = ("fwd", "fwd_bwd")
#: Samples of a profiler: sums of kernel times hardly vary, and it takes long to start.
_PROFILES = 5
_VERIFICATION = (
    "all ranks against the own unsharded op; the interior rank alone against its run among all, bytes "
    "against plan.volume; without CP against the torch engine in fp64; peers with CP against the "
    "interior rank: output and every gradient, largest error over largest value"
)


@dataclass
class _Entry:
    """One row in the making."""

    stage: Stage
    provider: Provider
    mode: str
    timer: str
    outcome: Outcome
    series: Series | None = None


def measure_layers(
    layers: Sequence[LayerOp], args: argparse.Namespace, progress: Progress
) -> Measured:
    """Measure an op in several configurations, one after the other; see the module docstring."""
    if args.set and not args.engine:
        raise ValueError("--set is for engines that --engine names")
    if args.world_size < 3:
        raise ValueError("an interior rank needs at least 3 ranks")
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    setup = Setup(args.world_size, args.dtype, args.seed, args.timeout_s)

    def one(layer: LayerOp, step: Progress) -> list[dict[str, Any]]:
        found = _measure(Stage(layer, setup, device), args, step)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return found

    rows, interrupted = one_by_one(layers[0].case, layers, one, progress)
    bound = None
    if args.bandwidth_gbytes_s:
        bound = (
            f"inputs, output and gradients moved once per pass at {args.bandwidth_gbytes_s:g} GB/s"
        )
    return Measured(
        rows,
        world_size=1,
        gpus_used=int(device.type == "cuda"),
        interleaving="providers, modes and timers by iteration, the profiler first and by itself, on the host's "
        "clock each after an untimed call of its own; configurations one after the other"
        + interrupted,
        input_distribution=layers[0].distribution,
        verification=_VERIFICATION,
        bound=bound,
        peak_memory=describe(device),
    )


def _measure(stage: Stage, args: argparse.Namespace, step: Progress) -> list[dict[str, Any]]:
    """Check all providers of a configuration, measure them in turn, and return their rows."""
    providers: list[Provider] = []
    for engine in dict.fromkeys(args.engine or [None]):
        step(
            f"all ranks, the unsharded op, and a reference in fp64 ({engine or 'engine auto'})", 0.0
        )
        providers += stage.own(engine, [False, True] if args.overlap else [False])
        variables = _variables(stage.layer.op, engine)
        for name, value in dict.fromkeys(args.set or []):
            if name in variables:
                providers += stage.own(engine, [False], {name: value})
    # What peers with context parallelism must give: of the first engine that was right itself.
    sharded = next((one for one in providers if one.transport is not None), providers[0])
    shape = f"{stage.layer.tokens}x{stage.layer.shape['HV']}"
    for name in dict.fromkeys(args.baseline or []):
        if args.baseline_shape and shape not in args.baseline_shape:
            continue
        step(f"preparing {name}", 0.0)
        providers += stage.peers(name, sharded, args.baseline_limit_s)
    entries: list[_Entry] = []
    for provider in providers:
        step(f"checking {provider.name}", 0.0)
        entries += _entries(stage, provider)
    # Rows of one mode and timer together, so that iterations go round the providers.
    entries.sort(key=lambda entry: (entry.timer, entry.mode))
    running = [entry.series for entry in entries if entry.series is not None]
    profiled = [one for one in running if isinstance(one.timer, Profiler)]
    timed = [one for one in running if not isinstance(one.timer, Profiler)]
    cold = args.l2 == "cold"
    step("kernel times", 0.0)
    measure(profiled, Budget(1, min(args.iterations, _PROFILES), cold), device=stage.device)
    for repeat in range(args.repeats):
        step(f"repeat {repeat + 1} of {args.repeats}", repeat / args.repeats)
        measure(timed, Budget(args.warmup, args.iterations, cold), device=stage.device)
    return [_row(entry, args.bandwidth_gbytes_s) for entry in entries]


def _variables(op: str, engine: str | None) -> tuple[str, ...]:
    """Return the variables of an engine's own; none of one that does not load, as its rows say."""
    try:
        return getattr(load_engine(op, engine), "variables", ()) if engine else ()
    except BackendError:
        return ()


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
        return [_Entry(stage, provider, mode, "perf_counter", replace(reason)) for mode in _MODES]
    runs = _Runs(stage, provider)
    entries = []
    for mode in _MODES:
        call = getattr(runs, mode)
        with provider.within():
            outcome = (
                Outcome(error=provider.failed) if provider.failed else _verify(runs, mode, call)
            )
            good = outcome.error is None and outcome.skipped is None
            if good:
                outcome.peak_mem_bytes = peak_bytes(call, stage.device)
            for timer in _timers(stage.device, own=provider.name.startswith("cptransport")):
                entry = _Entry(stage, provider, mode, timer, replace(outcome))
                if good:
                    _arm(entry, runs, call, stage.device)
                entries.append(entry)
    return entries


def _verify(runs: _Runs, mode: str, call: Callable[[], list[Tensor]]) -> Outcome:
    outcome, provider = Outcome(), runs.provider
    transport = provider.transport
    ours = provider.name.startswith("cptransport")
    try:
        before = transport.stats().bytes_received if transport else 0
        results = call()
        ran = last_run()
        if ours and ran is not None:
            provider.options["engine"] = provider.engine or ran.engine
            if transport is not None:
                provider.options["composition"] = ran.composition
            if provider.engine not in (None, ran.engine):
                reasons = [why for name, why in ran.reasons if name == provider.engine]
                outcome.skipped = f"engine {provider.engine} cannot serve: {'; '.join(reasons)}"
                return outcome
        outcome.max_abs_err = runs.check(results)
        if transport is not None:
            outcome.bytes_expected = provider.volume[mode]
            outcome.bytes_received = transport.stats().bytes_received - before
            if outcome.bytes_received != outcome.bytes_expected:
                raise AssertionError(
                    f"received {outcome.bytes_received} bytes where the plan says {outcome.bytes_expected}"
                )
    except Exception as error:
        if not ours:  # no number, but no failure of ours either
            outcome.skipped = f"not measured: {_text(error)}"
            return outcome
        outcome.error = _text(error)
    return outcome


def _arm(
    entry: _Entry, runs: _Runs, call: Callable[[], list[Tensor]], device: torch.device
) -> None:
    """Make the series of an entry; a captured one is checked again, by its replay."""
    body = Body(call, within=runs.provider.within)
    if entry.timer == "perf_counter":
        # A provider follows itself, as one of many layers does. What follows another finds the
        # host's caches warm if they share code, as ours with and without CP do, and else cold.
        body = replace(body, prepare=call)
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


def _row(entry: _Entry, bandwidth_gbytes_s: float | None) -> dict[str, Any]:
    stage, provider, outcome = entry.stage, entry.provider, entry.outcome
    layer = stage.layer
    if entry.series is not None:
        outcome.error = outcome.error or entry.series.error
        outcome.samples_us = [] if outcome.error else entry.series.samples_us
        if isinstance(entry.series.timer, Profiler):
            outcome.kernels = entry.series.timer.kernels
            outcome.kernel_us = {} if outcome.error else entry.series.timer.kernel_us
    tokens = {"T_global": layer.tokens * provider.world_size, "T_local": layer.tokens, "N": 1}
    subject = Subject(
        case=layer.case,
        op=layer.op,
        mode=entry.mode,
        provider=provider.name,
        timer=entry.timer,
        world_size=provider.world_size,
        dtype=stage.setup.dtype,
        shape={**layer.shape, **tokens},
        baseline=provider.baseline,
        options={**layer.options, **provider.options},
    )
    return row(
        subject,
        [outcome],
        bandwidth_gbytes_s=bandwidth_gbytes_s,
        moved_bytes=_moved_bytes(stage, entry.mode),
        tokens=layer.tokens,
        moves=False,
    )


def _moved_bytes(stage: Stage, mode: str) -> int:
    """Return the bytes that no implementation can avoid: inputs and output once per pass, and gradients."""
    inputs = sum(x.nbytes for x in stage.local(stage.rank).values())
    output = stage.local_grad(stage.rank).nbytes
    return inputs + output if mode == "fwd" else 3 * inputs + 2 * output


def _timers(device: torch.device, *, own: bool) -> list[str]:
    """Timers of a provider; peers are not captured, they may synchronise the host or tune."""
    timers = ["perf_counter", "graph_replay"] if own else ["perf_counter"]
    return [*timers, "profiler"] if device.type == "cuda" else timers


def _timer(name: str, device: torch.device) -> Timer:
    if name == "perf_counter":
        return PerfCounter(device)
    return GraphReplay() if name == "graph_replay" else Profiler()


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
