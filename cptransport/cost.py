# SPDX-License-Identifier: Apache-2.0
"""What an exchange of summaries is predicted to take, and the composition that takes the least.

Three numbers per backend, and what the plan says; no measurement at run time, so every rank and
every run chooses alike. On every rank a round costs a latency, its bytes at a bandwidth, and its
folds at the rate at which they read summaries. Ranks that wait for each other are followed one by
one, so that chains which get in each other's way in a handoff count as the longer chain they are.

The numbers predict the order of the compositions, not a clock: ``docs/scaling.md`` says where they
come from and what follows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from graphlib import TopologicalSorter
from typing import TYPE_CHECKING

from cptransport.composition import DIRECTIONS, Fold, Round, schedule
from cptransport.transport import PartSpec

if TYPE_CHECKING:
    from cptransport.plan import Plan

__all__ = ["BACKENDS", "Choice", "Costs", "choose", "costs_of", "predict"]


@dataclass(frozen=True)
class Costs:
    """What a backend costs.

    Attributes:
        latency_s: from a publish until the gather that it completes returns, without payload.
        bytes_per_s: payload that a rank receives in a second.
        fold_bytes_per_s: bytes of summaries that folds read in a second, E and M in every step.
        lockstep: a round ends for all ranks at once, also for those that receive nothing.
        dense: every round moves whole parts from every rank to every rank, whatever the routes say.
    """

    latency_s: float
    bytes_per_s: float
    fold_bytes_per_s: float
    lockstep: bool = False
    dense: bool = False


#: A CPU, or CUDA tensors through it. One set, so that what is tested on one composes alike on all.
_HOST = Costs(2e-4, 1e9, 1.5e9)

#: Every backend that is not listed costs like those of the host.
BACKENDS: Mapping[str, Costs] = {
    "loopback": _HOST,
    "threads": _HOST,
    "gloo": _HOST,
    "nccl": Costs(4e-5, 1.15e11, 1.55e11),
    "cudnn_summary": Costs(4e-5, 1.15e11, 1.55e11, lockstep=True, dense=True),
    "nvshmem_signal": Costs(1.4e-5, 1.15e11, 1.55e11),
    "nvshmem_barrier": Costs(1.4e-5, 1.15e11, 1.55e11, lockstep=True),
    "cupy_ipc": Costs(1.4e-5, 1.15e11, 1.55e11),
}


@dataclass(frozen=True)
class Choice:
    """A composition, and why.

    Attributes:
        composition: its name.
        predicted_s: seconds for one forward and one backward exchange.
        passed_over: ``(composition, reason)`` for the others, where there was a choice.
    """

    composition: str
    predicted_s: float
    passed_over: tuple[tuple[str, str], ...] = ()


def costs_of(backend: str) -> Costs:
    """Return the costs of a backend by its name."""
    return BACKENDS.get(backend, _HOST)


@lru_cache(maxsize=1024)
def choose(plan: Plan, parts: tuple[PartSpec, ...], backend: str, pairwise: bool) -> Choice:
    """Return the composition that is predicted to take the least; the simpler one at a tie.

    Args:
        plan: who owns which segments.
        parts: the engine's ``state`` and ``transition``, ``[max_segments * B, ...]``.
        backend: the transport's name.
        pairwise: its capability; without it there is no handoff.

    Collective: no; alike on every rank.
    """
    if all(len(plan.chain(sequence)) == 1 for sequence in range(plan.num_sequences)):
        return Choice("gather", 0.0)
    costs = costs_of(backend)
    names = ("gather", "scan", "handoff") if pairwise else ("gather", "scan")
    times = {name: predict(plan, parts, name, costs) for name in names}
    best = min(times, key=lambda name: round(times[name] * 1e9))  # rounding errors choose nothing
    passed = [
        (name, f"predicted {time * 1e6:.0f} us, {best} {times[best] * 1e6:.0f} us")
        for name, time in times.items()
        if name != best
    ]
    if not pairwise:
        passed.append(("handoff", f"transport {backend!r} is not pairwise"))
    return Choice(best, times[best], tuple(passed))


@lru_cache(maxsize=1024)
def predict(plan: Plan, parts: tuple[PartSpec, ...], composition: str, costs: Costs) -> float:
    """Return the seconds that one forward and one backward exchange are predicted to take.

    Raises:
        OpInputError: unknown composition.
    """
    sizes = {part.name: part.nbytes // plan.max_segments for part in parts}
    model = _Model(plan, sizes, costs)
    if composition == "gather" and not costs.dense:
        return sum(model.gather(direction) for direction in DIRECTIONS)
    return sum(model.rounds(direction, composition) for direction in DIRECTIONS)


class _Model:
    """One plan on one backend; ``sizes`` are the bytes of one segment's parts."""

    def __init__(self, plan: Plan, sizes: Mapping[str, int], costs: Costs) -> None:
        self.plan = plan
        self.sizes = sizes
        self.costs = costs
        self.step = sizes["state"] + sizes["transition"]

    def gather(self, direction: str) -> float:
        """What ``rounds`` gives for a gather, counted without its schedule, which grows with the square of a chain."""
        ranks = range(self.plan.world_size)
        received, folded = ([0] * len(ranks) for _ in range(2))
        for sequence in range(self.plan.num_sequences):
            chain = [self.plan.segments[i].rank for i in self.plan.chain(sequence)]
            if direction == "backward":
                chain.reverse()
            positions: dict[int, list[int]] = {}
            for position, rank in enumerate(chain):
                positions.setdefault(rank, []).append(position)
            for rank, own in positions.items():
                last = own[-1]  # what comes before it comes once, however many segments read it
                states = last - len(own) + 1
                transitions = last - 1 - sum(0 < position < last for position in own)
                received[rank] += states * self.sizes["state"]
                received[rank] += max(0, transitions) * self.sizes["transition"]
                folded[rank] += sum(max(0, position - 1) for position in own) * self.step
        busy = [r for r in ranks if received[r]]
        times = (self._move(received[r]) + self._fold(folded[r]) for r in busy)
        return self.costs.latency_s + max(times) if busy else 0.0

    def rounds(self, direction: str, composition: str) -> float:
        """Follow every rank through the rounds of the schedule."""
        made = schedule(self.plan, direction, composition)
        finishing = {s for s, need in enumerate(made.needs) if need.state}
        clock = [0.0] * self.plan.world_size
        for step in made.rounds:
            bytes_in = self._bytes_in(step)
            published: dict[int, float] = {}
            for rank in _order(step) if made.receive_first else range(len(clock)):
                share = step.ranks[rank]
                if made.receive_first:
                    clock[rank] = self._receive(step, rank, clock, published, bytes_in)
                    ends = sum(fold.target.segment in finishing for fold in share.folds)
                    clock[rank] += self._fold(ends * self.step)
                else:
                    clock[rank] += self._fold(self._read(share.windows))
                published[rank] = clock[rank]
            if not made.receive_first:
                clock = [
                    self._receive(step, rank, clock, published, bytes_in)
                    + self._fold(self._read(step.ranks[rank].folds))
                    for rank in range(len(clock))
                ]
        return max(clock)

    def _receive(
        self,
        step: Round,
        rank: int,
        clock: Sequence[float],
        published: Mapping[int, float],
        bytes_in: Sequence[int],
    ) -> float:
        """When a rank has what a round brings it; what comes shares its way in with what came before."""
        peers = published if self.costs.lockstep else step.ranks[rank].receives["state"]
        came = max((published[peer] for peer in peers), default=None)
        if came is None:
            return clock[rank]
        return max(clock[rank], came + self.costs.latency_s) + self._move(bytes_in[rank])

    def _bytes_in(self, step: Round) -> list[int]:
        ranks = self.plan.world_size
        if self.costs.dense:
            whole = sum(self.sizes[part] for part in step.parts) * self.plan.max_segments
            return [whole * (ranks - 1)] * ranks
        received = [0] * ranks
        for part, routes in step.routes.items():
            for _, destination, _ in routes:
                received[destination] += self.sizes[part]
        return received

    def _read(self, folds: Iterable[Fold]) -> int:
        """Bytes that folds read: a step per source after the first, and products of transitions."""
        return sum(
            (len(fold.sources) - 1) * self.step + fold.transition * 2 * self.sizes["transition"]
            for fold in folds
        )

    def _move(self, count: int) -> float:
        return count / self.costs.bytes_per_s

    def _fold(self, count: int) -> float:
        return count / self.costs.fold_bytes_per_s


def _order(step: Round) -> Iterable[int]:
    """Ranks in an order in which those come first that others wait for."""
    waits = {rank: share.receives["state"] for rank, share in enumerate(step.ranks)}
    return TopologicalSorter(waits).static_order()
