# SPDX-License-Identifier: Apache-2.0
"""A plan as text for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cptransport.composition import COMPOSITIONS, DIRECTIONS, schedule

if TYPE_CHECKING:
    from cptransport.plan import Plan

__all__ = ["describe"]


def describe(plan: Plan) -> str:
    """Return who owns what, the chain of every sequence, and what each composition moves."""
    return "\n".join([*_ownership(plan), *_chains(plan), *_movement(plan)])


def _ownership(plan: Plan) -> Iterator[str]:
    tokens = plan.cu_seqlens[-1]
    padding = f", {plan.total_rows - tokens} of them padding" if plan.has_padding else ""
    yield (
        f"{plan.layout}: {_count(plan.total_rows, 'row')}{padding}; "
        f"{_count(plan.num_sequences, 'sequence')} in {_count(len(plan.segments), 'segment')} "
        f"on {_count(plan.world_size, 'rank')}"
    )
    for rank in range(plan.world_size):
        view = plan.for_rank(rank)
        runs = ", ".join(f"{run.start}:{run.stop}" for run in view.runs) or "none"
        yield f"rank {rank}: {_count(view.num_tokens, 'row')} ({runs})"
        for segment, s in zip(plan.owned(rank), view.segments, strict=True):
            local = f"{s.local_start}:{s.local_start + s.length}"
            rows = f"{s.start}:{s.stop}"
            yield f"  segment {segment}: sequence {s.sequence}, rows {rows}, local {local}"


def _chains(plan: Plan) -> Iterator[str]:
    for sequence in range(plan.num_sequences):
        segments = [plan.segments[i] for i in plan.chain(sequence)]
        ranks = " -> ".join(f"rank {segment.rank}" for segment in segments)
        tokens = sum(segment.length for segment in segments)
        yield f"sequence {sequence}: {_count(tokens, 'token')}, {ranks}"


def _movement(plan: Plan) -> Iterator[str]:
    for composition in COMPOSITIONS:
        for direction in DIRECTIONS:
            rounds = schedule(plan, direction, composition).rounds
            yield f"{composition}, {direction}: {_count(len(rounds), 'round')}"
            for part in ("state", "transition"):
                received = Counter(route[1] for step in rounds for route in step.routes[part])
                if received:
                    counts = ", ".join(f"rank {r} {n}" for r, n in sorted(received.items()))
                    yield f"  {part}s received: {counts}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
