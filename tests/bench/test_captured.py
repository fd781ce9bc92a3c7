# SPDX-License-Identifier: Apache-2.0
"""Captured samples: several steps in one graph, their time by their number, and what they send.

There is no GPU here, so graphs are played: of ``captured`` a fake ``torch.cuda`` shows what is
captured when, and captured rows of a boundary run their steps over threads, whose captured
generations get two buffers that nothing but the bench writes, as one-sided transports hand out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import bench
from torch import Tensor

from cptransport.bench import boundary_data, boundary_rank, timing
from cptransport.bench.timing import Body, Budget, PerfCounter, Series, captured, measure
from cptransport.transports.threads import ThreadTransport, poison

CPU = torch.device("cpu")
STEPS = 10


class Said:
    """A timer that says what it is told to."""

    name = "said"

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def sample(self, body: Body) -> float:
        body.timed()
        return next(self._times)


def test_a_sample_is_the_time_of_one_step() -> None:
    many = Series(Said(99.0, 70.0, 30.0), Body(lambda: None, steps=10))
    one = Series(Said(99.0, 70.0, 30.0), Body(lambda: None))
    measure([many, one], Budget(warmup=1, iterations=2), device=CPU)
    assert (many.samples_us, many.medians_us) == ([7.0, 3.0], [5.0])
    assert (one.samples_us, one.medians_us) == ([70.0, 30.0], [50.0])


@pytest.mark.parametrize("steps", [1, 3])
def test_preparation_and_timed_part_are_captured_as_often_as_asked(
    steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []

    @contextmanager
    def within(name: str) -> Iterator[None]:
        log.append(f"{name}(")
        yield
        log.append(")")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    cuda = SimpleNamespace(
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda which: within("side"),
        CUDAGraph=lambda: SimpleNamespace(replay=lambda: log.append("replay")),
        graph=lambda graph, capture_error_mode: within("graph"),
    )
    monkeypatch.setattr(timing, "torch", SimpleNamespace(cuda=cuda))

    def timed() -> int:
        log.append("timed")
        return log.count("timed")

    body, result = captured(
        Body(timed, lambda: log.append("prepare"), lambda: log.append("align")), steps
    )
    step = ["prepare", "timed"]
    assert log == ["side(", *step, ")", "graph(", *step * steps, ")"]
    assert (body.steps, result) == (steps, 1 + steps)  # of the last step
    log.clear()
    body.prepare()
    body.align()
    body.timed()
    assert log == ["align", "replay"]


class _Playing(threading.local):
    """Of this thread's rank: whether it runs a captured step, and what is made in the middle of a graph."""

    now = False
    midway: list[Tensor] | None = None


@dataclass
class _Latest:
    """What the last replay gathered, as the tensors of a graph hold what its last replay wrote."""

    gathered: Any

    def tensor(self, part: str, source: int) -> Tensor:
        return self.gathered.tensor(part, source)


def _bits(result: Any) -> dict[Any, Tensor]:
    """What a step returned, copied before the next one overwrites it; rows that no route moved are NaN."""
    if isinstance(result, Tensor):
        return {"states": result.clone()}
    parts = ("state", "transition")
    return {
        (part, source): result.tensor(part, source).nan_to_num(0.0)
        for part in parts
        for source in result.sources(part)
    }


class Graphs:
    """Plays ``captured`` on threads; ``replays`` keeps what every step of every replay returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.playing = _Playing()
        self.replays: list[tuple[int, list[dict[Any, Tensor]]]] = []
        self.fixed: dict[tuple[ThreadTransport, Any], dict[str, Tensor]] = {}
        self.kept: set[tuple[ThreadTransport, str, int]] = set()
        self._patch_transport(monkeypatch)
        monkeypatch.setattr(boundary_rank, "captured", self.captured)
        monkeypatch.setattr(boundary_rank, "GraphReplay", lambda: PerfCounter(CPU))
        monkeypatch.setattr(
            boundary_rank._Boundary,
            "_refusal",
            lambda self, variant: "none here" if variant.baseline else None,
        )

    def captured(self, body: Body, steps: int = 1) -> tuple[Body, Any]:
        body.prepare()  # as on the side stream
        body.timed()
        midway: list[Tensor] = []
        with self._captured():
            for step in range(steps):
                self.playing.midway = midway if step else None
                body.prepare()
                result = body.timed()
            self.playing.midway = None
        held = result if isinstance(result, Tensor) else _Latest(result)

        def replay() -> None:
            found = []
            for memory in midway:  # lies where an earlier step of the graph kept something else
                poison(memory)
            with self._captured():
                for _ in range(steps):
                    body.prepare()
                    again = body.timed()
                    found.append(_bits(again))
            if isinstance(again, Tensor):
                held.copy_(again)
            else:
                held.gathered = again
            self.replays.append((steps, found))

        return replace(body, timed=replay, prepare=lambda: None, steps=steps), held

    @contextmanager
    def _captured(self) -> Iterator[None]:
        self.playing.now = True
        try:
            yield
        finally:
            self.playing.now = False

    def _patch_transport(self, monkeypatch: pytest.MonkeyPatch) -> None:
        stage, retire = ThreadTransport._stage, ThreadTransport._retire

        def stage_(transport: Any, current: Any, retired: Any) -> Mapping[str, Tensor]:
            fresh = stage(transport, current, retired)
            if not self.playing.now:
                return fresh
            self.kept.add((transport, current.slot.name, current.number))
            # NaN until the bench writes.
            key = transport, (current.slot, current.number % 2)
            if key not in self.fixed:
                self.fixed[key] = dict(fresh)
                if self.playing.midway is not None:
                    self.playing.midway.extend(fresh.values())
            return self.fixed[key]

        def retire_(transport: Any, retired: Any) -> None:
            if (transport, retired.slot.name, retired.number) not in self.kept:
                retire(transport, retired)

        monkeypatch.setattr(ThreadTransport, "_stage", stage_)
        monkeypatch.setattr(ThreadTransport, "_retire", retire_)


def play(monkeypatch: pytest.MonkeyPatch) -> tuple[list[dict[str, Any]], Graphs]:
    """Return the captured rows of a boundary over threads, and what was replayed."""
    graphs = Graphs(monkeypatch)
    compositions = [f"--composition={name}" for name in ("gather", "handoff", "scan")]
    sizes = ["--heads", "2", "--key-dim", "4", "--value-dim", "3", "--layout", "zigzag"]
    made = bench("boundary", "--backend", "threads", "--world-size", "3", *compositions, *sizes)
    return [row for row in made["rows"] if row["timer"] == "graph_replay"], graphs


def test_every_step_of_a_replay_sends_what_was_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, graphs = play(monkeypatch)
    own = [row for row in rows if not row["baseline"]]
    assert {(row["status"], row["reason"]) for row in own} == {("ok", None)}
    assert {
        (row["mode"], row["options"]["composition"]): row["options"]["region"] for row in own
    } == {
        ("merge", "gather"): "staged to merged",
        ("fold", "gather"): "staged to merged",
        ("publish_fetch", "gather"): "staged to received",
        ("merge", "handoff"): "staged and written to merged",
        ("fold", "handoff"): "staged and written to merged",
        ("merge", "scan"): "staged to merged",
        ("fold", "scan"): "staged to merged",
    }
    assert {row["options"]["steps"] for row in rows} == {STEPS}
    # 3 ranks, 7 rows; in each of two repeats 2 replays of the check and 1 + 2 that are timed.
    assert [steps for steps, _ in graphs.replays] == [STEPS] * (3 * 7 * 2 * 5)
    for _, found in graphs.replays:
        for step in found:
            assert step.keys() == found[0].keys()
            for name, tensor in step.items():
                assert tensor.isfinite().all(), name
                assert torch.equal(tensor, found[0][name]), name
                assert tensor.ndim == 4 or name[0] == "transition"


def _nothing_written(write: Callable[..., Any]) -> Callable[..., Any]:
    def captured_(work: Any, steps: int) -> Any:
        return write(work if work.overwrites else replace(work, write=lambda handed: None), steps)

    return captured_


@pytest.mark.parametrize(
    ("owner", "name", "spoilt", "failed"),
    [
        (
            boundary_rank._Work,
            "captured",
            _nothing_written(boundary_rank._Work.captured),
            {("merge", "gather"), ("publish_fetch", "gather"), ("merge", "scan")},
        ),
        (boundary_data.Variant, "overwrites", False, {("merge", "handoff")}),
    ],
    ids=["nothing is written", "a handoff's states are written once"],
)
def test_a_replay_that_sends_something_else_has_no_number(
    owner: type,
    name: str,
    spoilt: Any,
    failed: set[tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(owner, name, spoilt)
    rows, _ = play(monkeypatch)
    wrong = [row for row in rows if row["status"] == "error"]
    assert {(row["mode"], row["options"]["composition"]) for row in wrong} == failed
    assert all("verification of the replay failed" in row["reason"] for row in wrong)


def test_a_cold_sample_holds_one_step() -> None:
    chosen = {"op": "kda", "heads": 1, "key_dim": 4, "value_dim": 4, "dtype": "float32"}
    chosen |= {"layout": "contiguous", "sequences": 1, "compositions": (), "directions": ()}
    chosen |= {"baseline": False, "warmup": 1, "iterations": 1, "repeats": 1, "seed": 0}
    warm, cold = (boundary_data.Settings(**chosen, cold=cold) for cold in (False, True))
    timers = ("graph_replay", "perf_counter", "cuda_event")
    assert [warm.steps(timer) for timer in timers] == [STEPS, 1, 1]
    assert [cold.steps(timer) for timer in timers] == [1, 1, 1]
