# SPDX-License-Identifier: Apache-2.0
"""Timers, and the loop that interleaves what is measured.

A ``Body`` is one iteration: an untimed preparation, an alignment of the ranks, and the timed part.
Every iteration gives one sample in microseconds on this rank: the time of the timed part by the
steps that it holds. The maximum over ranks is taken later, per iteration. Iterations go round the
bodies, one sample each, so that drift of the machine meets all of them alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from cptransport.bench.samples import quantile

__all__ = [
    "Body",
    "Budget",
    "CudaEvent",
    "GraphReplay",
    "PerfCounter",
    "Profiler",
    "Series",
    "Timer",
    "captured",
    "launch_guard",
    "measure",
]

#: How long the GPU is kept busy before the first event, so that the host can enqueue what follows:
#: 1.5 ms, several times what an eager exchange takes to enqueue.
GUARD_CYCLES = 3_000_000
#: More than any L2 cache holds.
FLUSH_BYTES = 256 << 20


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Body:
    """One iteration of something to measure.

    Attributes:
        timed: what is timed.
        prepare: done before, outside the time.
        align: makes ranks start together; on CUDA ordered on the stream.
        within: makes the context of an iteration, entered outside the time.
        steps: how many steps the timed part holds; a sample is the time of one.
    """

    timed: Callable[[], object]
    prepare: Callable[[], object] = _nothing
    align: Callable[[], object] = _nothing
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    steps: int = 1


@dataclass(frozen=True)
class Budget:
    """How much is measured.

    Attributes:
        warmup: iterations that are thrown away. iterations: samples of each body.
        cold: with CUDA, empty the L2 cache before every iteration.
        repeats: how often all of that is done.
    """

    warmup: int
    iterations: int
    cold: bool = False
    repeats: int = 1


class Timer(Protocol):
    """Takes the time of one iteration."""

    name: str

    def sample(self, body: Body) -> float:
        """Run the body once and return how long its timed part took, all its steps, in microseconds."""
        ...


class PerfCounter:
    """Wall time on the host; a CUDA device is synchronised at both ends."""

    name = "perf_counter"

    def __init__(self, device: torch.device) -> None:
        self._synchronize = torch.cuda.synchronize if device.type == "cuda" else _nothing

    def sample(self, body: Body) -> float:
        """See ``Timer``."""
        body.prepare()
        body.align()
        self._synchronize()
        start = time.perf_counter()
        body.timed()
        self._synchronize()
        return (time.perf_counter() - start) * 1e6


class CudaEvent:
    """Time on the current stream between two events, behind a sleep that lets the host run ahead."""

    name = "cuda_event"

    def sample(self, body: Body) -> float:
        """See ``Timer``."""
        cuda: Any = torch.cuda  # parts of it have no types
        start, stop = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        body.prepare()
        cuda._sleep(GUARD_CYCLES)
        body.align()
        start.record()
        body.timed()
        stop.record()
        stop.synchronize()
        return float(start.elapsed_time(stop)) * 1e3


class GraphReplay(CudaEvent):
    """The same, of a body from ``captured``."""

    name = "graph_replay"


class Profiler:
    """Sum of the times of all kernels and copies of the timed part.

    Attributes:
        kernels: how many kernels the last sample launched.
        kernel_us: name of a kernel or copy -> time of all its launches in the last sample.
    """

    name = "profiler"

    def __init__(self) -> None:
        self.kernels = 0
        self.kernel_us: dict[str, float] = {}

    def sample(self, body: Body) -> float:
        """See ``Timer``."""
        body.prepare()
        body.align()
        torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, acc_events=True) as profile:
            body.timed()
            torch.cuda.synchronize()
        events = [e for e in profile.events() if e.device_type.name == "CUDA"]
        self.kernels = sum(not e.name.startswith(("Memcpy", "Memset")) for e in events)
        self.kernel_us = {}
        for e in events:
            self.kernel_us[e.name] = self.kernel_us.get(e.name, 0.0) + e.self_device_time_total
        return float(sum(self.kernel_us.values()))


def captured(body: Body, steps: int = 1) -> tuple[Body, Any]:
    """Capture preparation and timed part of a body in one CUDA graph.

    Args:
        body: of one step; has run eagerly before, twice at least. It runs once more here, before the
            capture.
        steps: how often both are captured in a row.

    Returns:
        A body whose timed part replays the graph (the alignment stays eager), and what the last timed
        part returned while it was captured: tensors that every replay writes anew.
    """
    cuda: Any = torch.cuda
    side = cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body.prepare()
        body.timed()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Threads that watch a communicator may ask for its events meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(steps):
            body.prepare()
            result = body.timed()
    return replace(body, timed=graph.replay, prepare=_nothing, steps=steps), result


def launch_guard(device: str, world_size: int) -> str:
    """Name what is done so that launches and late ranks do not count."""
    if device == "cuda":
        return "sleep+barrier"
    return "barrier" if world_size > 1 else "none"


@dataclass
class Series:
    """Samples of one body on one rank.

    Attributes:
        timer, body: what is measured.
        samples_us: so far. medians_us: of each repeat.
        error: why it was given up, if it was; the samples are gone then.
    """

    timer: Timer
    body: Body
    samples_us: list[float] = field(default_factory=list)
    medians_us: list[float] = field(default_factory=list)
    error: str | None = None


def measure(
    series: Sequence[Series],
    budget: Budget,
    *,
    device: torch.device,
    progress: Callable[[], object] = _nothing,
) -> None:
    """Take samples of all series in turn, iteration by iteration.

    A series whose body raises is given up with the error's text; the others go on.

    Args:
        series: get their samples.
        budget: how many.
        device: of the ranks' tensors.
        progress: called after every round.
    """
    cold = budget.cold and device.type == "cuda"
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device) if cold else None
    for _ in range(budget.repeats):
        for iteration in range(-budget.warmup, budget.iterations):
            for one in series:
                if one.error is None:
                    _sample(one, keep=iteration >= 0, flush=flush)
            progress()
        for one in series:
            if one.error is None:
                one.medians_us.append(quantile(one.samples_us[-budget.iterations :], 0.5))


def _sample(one: Series, *, keep: bool, flush: Tensor | None) -> None:
    try:
        if flush is not None:
            flush.zero_()
        with one.body.within():
            taken = one.timer.sample(one.body) / one.body.steps
    except Exception as error:
        one.error = f"{type(error).__name__}: {error}"
        one.samples_us.clear()
        one.medians_us.clear()
    else:
        if keep:
            one.samples_us.append(taken)
