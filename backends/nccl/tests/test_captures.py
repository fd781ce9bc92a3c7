# SPDX-License-Identifier: Apache-2.0
"""Captures one after the other, of the same slot: each waits for work of its own alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from cptransport.testing import Ranks
from cptransport.testing.oracle import assert_bytes, fill
from cptransport.transport import PartSpec, Slot

RANKS = 2
#: One way, so that a rank only sends or only receives, and both ways.
_SLOTS = tuple(
    Slot(name, (PartSpec("x", (4,), torch.float32, frozenset(routes)),))
    for name, routes in (("one", {(0, 1)}), ("both", {(0, 1), (1, 0)}))
)


def _phases(ranks: Ranks, phases: list[int]) -> int:
    """Run phases of so many generations, negative ones captured; return how many were checked."""
    from fake_nccl import capture

    transport: Any = ranks.create()
    number = checked = 0
    for phase in phases:
        within: AbstractContextManager[None] = capture() if phase < 0 else nullcontext()
        with within:
            for _ in range(abs(phase)):
                number += 1
                for slot in _SLOTS:
                    fill(transport, slot, number)
                    transport.publish(slot)
                    (part,) = slot.parts
                    if part.rows(1 - ranks.rank, ranks.rank) != ():
                        got = transport.fetch(slot, "x", source=1 - ranks.rank)
                        where = {"slot": slot.name, "generation": number}
                        assert_bytes(got, part, rank=1 - ranks.rank, **where)
                        checked += 1
        ranks.sync()
    transport.close()
    return checked


@pytest.mark.parametrize(
    "phases", [[2, -2, -2], [2, -1, -1, -3], [2, -3, 1, -3], [2, -2, 2, -2], [1, -2, 3, -1, -1, 1]]
)
def test_every_capture_stands_for_itself(run: Callable[..., list[Any]], phases: list[int]) -> None:
    generations = sum(map(abs, phases))
    assert run(_phases, phases=phases) == [generations, 2 * generations]
