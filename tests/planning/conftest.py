# SPDX-License-Identifier: Apache-2.0
"""Random plans, and who owns which row of them by a count that knows nothing of the library's."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from cptransport.layouts import LAYOUTS
from cptransport.plan import Plan, build_plan

PLANS_PER_LAYOUT = 40


@dataclass(frozen=True)
class Case:
    """A plan, and per row of its stream the rank that owns it and the sequence (None: padding)."""

    arguments: dict[str, Any]
    plan: Plan
    ranks: list[int]
    sequences: list[int | None]

    @property
    def empty_ranks(self) -> dict[int, int]:
        """Empty sequence -> the rank that should own it."""
        cu = self.arguments["cu_seqlens"]
        starts = self.arguments.get("padded_cu_seqlens", cu)
        return {
            i: self.ranks[starts[i]] if starts[i] < len(self.ranks) else 0
            for i in range(len(cu) - 1)
            if cu[i] == cu[i + 1]
        }


def make_case(cu_seqlens: list[int], **arguments: Any) -> Case:
    """Build a plan and count its rows one by one."""
    arguments = {"cu_seqlens": cu_seqlens, **arguments}
    starts = arguments.get("padded_cu_seqlens", cu_seqlens)
    sequences: list[int | None] = []
    for i in range(len(starts) - 1):
        length = cu_seqlens[i + 1] - cu_seqlens[i]
        sequences += [i] * length + [None] * (starts[i + 1] - starts[i] - length)
    plan = build_plan(**arguments)
    return Case(arguments, plan, _count_ranks(arguments, starts), sequences)


def _count_ranks(arguments: dict[str, Any], starts: list[int]) -> list[int]:
    world_size = arguments["world_size"]
    layout = arguments.get("layout", "contiguous")
    boundaries = arguments.get("boundaries")
    if layout == "custom":
        owner = {row: rank for rank, start, stop in boundaries for row in range(start, stop)}
        return [owner[row] for row in range(starts[-1])]
    if boundaries is not None:
        return [sum(row >= boundary for boundary in boundaries[1:-1]) for row in range(starts[-1])]
    order = list(range(world_size))
    if "zigzag" in layout:
        order += order[::-1]
    edges = starts if "per_sequence" in layout else [0, starts[-1]]
    ranks: list[int] = []
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        left = stop - start
        for i, rank in enumerate(order):  # the first pieces are the larger ones
            size = -(-left // (len(order) - i))
            ranks += [rank] * size
            left -= size
    return ranks


def random_case(rng: random.Random, layout: str, *, padded: bool) -> Case:
    """Return a small plan with short and empty sequences, and with empty ranks."""
    world_size = rng.randint(1, 6)
    lengths = [rng.choice([0, 0, 1, 2, 3, 5, 8, 13, 21]) for _ in range(rng.randint(1, 6))]
    extents = [length + padded * rng.choice([0, 0, 1, 3]) for length in lengths]
    arguments: dict[str, Any] = {"world_size": world_size, "layout": layout}
    if padded:
        arguments["padded_cu_seqlens"] = _offsets(extents)
    total = sum(extents)
    if layout == "contiguous" and rng.random() < 0.5:
        inner = sorted(rng.randint(0, total) for _ in range(world_size - 1))
        arguments["boundaries"] = [0, *inner, total]
    if layout == "custom":
        cuts = sorted({0, total, *(rng.randint(0, total) for _ in range(rng.randint(0, 14)))})
        pieces = [
            (rng.randrange(world_size), start, stop)
            for start, stop in zip(cuts[:-1], cuts[1:], strict=True)
        ]
        pieces += [(rng.randrange(world_size), row, row) for row in cuts[:2]]
        arguments["boundaries"] = rng.sample(pieces, len(pieces))
    return make_case(_offsets(lengths), **arguments)


def _offsets(lengths: list[int]) -> list[int]:
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


@pytest.fixture(name="make_case")
def make_case_fixture() -> Any:
    """``make_case(cu_seqlens, world_size=..., ...)``."""
    return make_case


@pytest.fixture(
    scope="module",
    params=[(layout, padded) for layout in LAYOUTS for padded in (False, True)],
    ids=lambda param: f"{param[0]}{'-padded' * param[1]}",
)
def cases(request: pytest.FixtureRequest) -> list[Case]:
    """Random cases of one layout, with or without padding."""
    layout, padded = request.param
    rng = random.Random(f"{layout} {padded}")
    return [random_case(rng, layout, padded=padded) for _ in range(PLANS_PER_LAYOUT)]
