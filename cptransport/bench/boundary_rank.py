# SPDX-License-Identifier: Apache-2.0
"""The boundary bench on one rank: real exchanges of random summaries, checked, then timed.

``boundary_rank`` runs on every rank of a backend. It goes through ``variants`` in order, checks each
configuration (states against a fold in fp64, payload bit for bit, bytes against ``plan.volume``) and
then takes samples of all of them in turn. A rank whose check failed goes on taking part, so that its
peers are not left waiting; its error makes the row's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.bench.boundary_baseline import AllGather
from cptransport.bench.boundary_data import (
    Settings,
    Variant,
    expected_states,
    summaries,
    variants,
)
from cptransport.bench.rows import Outcome
from cptransport.bench.timing import (
    Body,
    Budget,
    CudaEvent,
    GraphReplay,
    PerfCounter,
    Series,
    Timer,
    captured,
    measure,
)
from cptransport.composition import expand_routes, schedule
from cptransport.errors import BackendUnavailableError, CapabilityError
from cptransport.exchange import Exchange, Wire, begin
from cptransport.testing.numerics import TOLERANCES, relative_error
from cptransport.testing.ranks import Ranks
from cptransport.testing.recorded import RecordedTransport, RecordingTransport
from cptransport.transport import BoundaryTransport, Slot

__all__ = ["boundary_rank"]


class VerificationError(AssertionError):
    """A configuration gave a wrong result."""


def boundary_rank(ranks: Ranks, settings: Mapping[str, Any]) -> list[Outcome]:
    """Measure every variant on this rank.

    Args:
        ranks: of the backend.
        settings: fields of ``Settings``.

    Returns:
        One outcome per entry of ``variants``.

    Collective: over the ranks.
    """
    what = Settings(**settings)
    chosen = variants(what, ranks.device.type)
    try:
        transport = ranks.create()
    except BackendUnavailableError as error:
        return [Outcome(skipped=str(error)) for _ in chosen]
    bench = _Boundary(what, transport, ranks)
    outcomes, running = [], []
    for variant in chosen:
        outcome = Outcome()
        series = bench.ready(variant, outcome)
        outcomes.append(outcome)
        if series is not None:
            running.append((outcome, series))
    budget = Budget(what.warmup, what.iterations, what.cold, what.repeats)
    measure([series for _, series in running], budget, device=transport.device)
    for outcome, series in running:
        outcome.error = outcome.error or series.error
        outcome.samples_us = [] if outcome.error else series.samples_us
        outcome.repeat_medians_us = [] if outcome.error else series.medians_us
    for variant, outcome in zip(chosen, outcomes, strict=True):
        if variant.baseline:
            outcome.pass_over()
    return outcomes


@dataclass(frozen=True)
class _Work:
    """One step of a variant.

    Attributes:
        timed, align: as ``Body`` has them.
        stage: before; opens the slot and returns what it hands out.
        write: puts what is sent into what ``stage`` returned.
        overwrites: as ``Variant`` has it.
    """

    timed: Callable[[], object]
    align: Callable[[], object]
    stage: Callable[[], Any] = lambda: None
    write: Callable[[Any], object] = lambda handed: None
    overwrites: bool = False

    def body(self) -> Body:
        """Return an eager iteration."""
        return Body(self.timed, lambda: self.write(self.stage()), self.align)

    def captured(self, steps: int) -> tuple[Body, Any]:
        """Return an iteration of captured steps, and what the last of them returned.

        What is sent is written now, once, into all that the steps staged: a kernel that computes
        summaries writes them where they are sent from, at no cost of the step's. Only what a step
        overwrites is written in every step.
        """
        if self.overwrites:
            return captured(self.body(), steps)
        handed: list[Any] = []
        body = replace(self.body(), prepare=lambda: handed.append(self.stage()))
        # Both buffers of captured generations have to exist: one that is made in the middle of a
        # graph may lie where an earlier step keeps what it frees, and every replay would spoil it.
        captured(body, 2)
        body, result = captured(body, steps)
        for one in handed[-steps:]:  # what came before them was not staged in this graph
            self.write(one)
        return body, result


class _Boundary:
    """Bodies and checks of one rank."""

    def __init__(self, settings: Settings, transport: BoundaryTransport, ranks: Ranks) -> None:
        self.settings = settings
        self.transport = transport
        self.ranks = ranks
        self.plan = settings.plan(transport.world_size)
        self.parts = settings.parts(self.plan)
        self.payload = summaries(settings, self.plan, transport.device)
        self.local = self.plan.owned(transport.rank)
        self._replays: dict[tuple[str, str], tuple[RecordedTransport, Tensor]] = {}
        self._barriers = 0
        self._all_gather = AllGather(transport.device) if dist.is_initialized() else None

    def ready(self, variant: Variant, outcome: Outcome) -> Series | None:
        """Check a variant and return what to measure; what fails or cannot be goes into the outcome."""
        refusal = self._refusal(variant)
        if refusal is not None:
            outcome.skipped = refusal
            return None
        try:
            work = self._work(variant)
            body = work.body()
            try:
                self._verify(variant, body, outcome)
            except VerificationError as error:
                outcome.error = f"verification failed: {error}"
            if variant.timer == "graph_replay":
                body, result = work.captured(self.settings.steps(variant.timer))
                for _ in range(2):  # what one replay spoils, the next one sends
                    _once(body)
                try:
                    self._judge(variant, result)
                except VerificationError as error:
                    outcome.error = f"verification of the replay failed: {error}"
        except CapabilityError as error:
            outcome.skipped = str(error)
            return None
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
            return None
        return Series(self._timer(variant.timer), body)

    def _refusal(self, variant: Variant) -> str | None:
        """Say why a variant cannot be timed on this transport."""
        claimed, name = self.transport.capabilities, repr(self.transport.name)
        if variant.timer == "graph_replay" and self.transport.device.type != "cuda":
            return "CUDA graphs need a CUDA device"
        if variant.mode == "fold":  # moves nothing
            return None
        if variant.baseline:
            return self._baseline_refusal(variant)
        if variant.timer == "graph_replay" and not claimed.cuda_graph:
            return f"transport {name} lacks the capability cuda_graph"
        if variant.timer == "cuda_event" and claimed.host_staged:
            return f"transport {name} works on the host (host_staged); events on a stream miss it"
        return None

    def _baseline_refusal(self, variant: Variant) -> str | None:
        if self._all_gather is None:
            return "these ranks have no torch.distributed"
        if self.transport.device.type == "cuda" and not dist.is_nccl_available():
            return "this torch was built without NCCL"
        return None

    def _timer(self, name: str) -> Timer:
        if name == "perf_counter":
            return PerfCounter(self.transport.device)
        return GraphReplay() if name == "graph_replay" else CudaEvent()

    # ----------------------------------------------------------------------------------------- bodies

    def _work(self, variant: Variant) -> _Work:
        if variant.mode == "barrier":
            return _Work(self.transport.barrier, align=self.transport.barrier)
        if variant.mode == "publish_fetch":
            return self._publish_fetch(variant.direction)
        if variant.baseline:
            assert self._all_gather is not None
            return self._merge(variant, self._all_gather)
        if variant.mode == "merge":
            return self._merge(variant, self.transport)
        replay, _ = self._replay(variant)
        return self._merge(variant, replay)

    def _merge(self, variant: Variant, transport: BoundaryTransport | AllGather) -> _Work:
        """Publish, and return the states that enter this rank's segments."""
        over: Any = transport  # an exchange of gathers needs no more than these have in common
        wire = Wire(
            op=self.settings.op,
            parts=self.parts,
            layout="k_major",
            batch=1,
            device=transport.device,
            composition=variant.composition,
        )
        under_way: list[Exchange] = []

        def stage() -> Exchange:
            under_way[:] = [begin(wire, self.plan, over, variant.direction)]
            return under_way[0]

        def timed() -> Tensor:
            under_way[0].publish()
            return under_way[0].incoming()

        return _Work(timed, self.transport.barrier, stage, self._write, variant.overwrites)

    def _write(self, exchange: Exchange) -> None:
        for row, (index, need) in enumerate(zip(self.local, exchange.needs, strict=True)):
            for name, needed in (("state", need.state), ("transition", need.transition)):
                if needed and name in exchange.out:
                    exchange.out[name][row] = self.payload[index][name]

    def _publish_fetch(self, direction: str) -> _Work:
        """The verbs of a gather exchange, without its fold."""
        (step,) = schedule(self.plan, direction, "gather").rounds
        moving = tuple(
            replace(part, routes=expand_routes(step.routes[part.name], 1))
            for part in self.parts
            if step.routes[part.name]
        )
        slot = Slot(f"bench.{direction}", moving)
        sends = step.ranks[self.transport.rank].sends

        def stage() -> Mapping[str, Tensor]:
            return self.transport.stage(slot)

        def write(staged: Mapping[str, Tensor]) -> None:
            for part in moving:
                for row in sends[part.name]:
                    staged[part.name][row] = self.payload[self.local[row]][part.name]

        def timed() -> Any:
            self.transport.publish(slot)
            return self.transport.gather(slot)

        return _Work(timed, self.transport.barrier, stage, write)

    def _replay(self, variant: Variant) -> tuple[RecordedTransport, Tensor]:
        """Return a transport that gives this rank what it got in a real exchange, and its result there."""
        key = (variant.composition, variant.direction)
        if key not in self._replays:
            recorder = RecordingTransport(self.transport)
            result = _once(self._merge(variant, recorder).body())
            replay = RecordedTransport(recorder.recording, self.transport.device)
            self._replays[key] = (replay, result.clone())
        return self._replays[key]

    # ----------------------------------------------------------------------------------------- checks

    def _verify(self, variant: Variant, body: Body, outcome: Outcome) -> None:
        if variant.mode == "barrier":
            self._verify_barrier(body)
            outcome.max_abs_err = 0.0
            return
        _once(body)  # then both buffers of the slot exist, as a capture wants it
        before = self._received(variant)
        result = _once(body)
        received = self._received(variant) - before
        outcome.max_abs_err = self._judge(variant, result)
        if variant.mode != "fold":
            outcome.bytes_received = received
            if not variant.baseline:
                self._verify_bytes(variant, outcome)

    def _received(self, variant: Variant) -> int:
        if variant.baseline:
            assert self._all_gather is not None
            return self._all_gather.bytes_received
        return self.transport.stats().bytes_received

    def _judge(self, variant: Variant, result: Any) -> float:
        """Return the largest error of what a body returned; raise if it is wrong."""
        if variant.mode == "publish_fetch":
            return self._wrong_payload(result, variant.direction)
        if variant.mode == "fold" and not torch.equal(result, self._replay(variant)[1]):
            raise VerificationError("the fold of the same summaries gave other bits")
        return self._wrong_states(result, variant.direction)

    def _verify_barrier(self, body: Body) -> None:
        key = f"barrier/{self._barriers}"
        self._barriers += 1
        self.ranks.store.add(key, 1)
        body.timed()
        if self.transport.device.type == "cuda":
            torch.cuda.synchronize()
        arrived = self.ranks.store.add(key, 0)
        if arrived != self.transport.world_size:
            raise VerificationError(f"left the barrier when {arrived} ranks had arrived")

    def _verify_bytes(self, variant: Variant, outcome: Outcome) -> None:
        volume = self.plan.volume(Slot("bench", self.parts), variant.composition)
        expected = getattr(volume, variant.direction)[self.transport.rank]
        outcome.bytes_expected = expected
        received = outcome.bytes_received
        dense = self.transport.name == "cudnn_summary"  # gathers everything, and may say so
        if received != expected and not (dense and received is not None and received > expected):
            raise VerificationError(f"received {received} bytes where the plan says {expected}")

    def _wrong_payload(self, gathered: Any, direction: str) -> float:
        (step,) = schedule(self.plan, direction, "gather").rounds
        for name, routes in step.routes.items():
            for source, destination, row in routes:
                if destination != self.transport.rank:
                    continue
                expected = self.payload[self.plan.owned(source)[row]][name]
                if not torch.equal(gathered.tensor(name, source)[row], expected):
                    raise VerificationError(f"{name!r} of rank {source} arrived changed")
        return 0.0

    def _wrong_states(self, states: Tensor, direction: str) -> float:
        """Return the largest error of the states that entered; raise if it is too large."""
        expected = expected_states(self.settings, self.plan, self.payload, direction)
        limit = TOLERANCES[states.dtype]
        worst = 0.0
        for row, index in enumerate(self.local):
            reference = expected[index]
            if reference is None:
                continue
            error = relative_error(states[row], reference)
            if not error <= limit:
                raise VerificationError(
                    f"the state that enters segment {index} is off by {error:.1e} relative to fp64, "
                    f"above {limit:.0e}"
                )
            worst = max(worst, float((states[row].double() - reference).abs().max()))
        return worst


def _once(body: Body) -> Any:
    body.prepare()
    body.align()
    return body.timed()
