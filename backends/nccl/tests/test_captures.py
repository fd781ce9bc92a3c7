# SPDX-License-Identifier: Apache-2.0
"""Captures one after the other, of the same slot: each waits for work of its own alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from cptransport.errors import GenerationError, TransportError
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


def _across(ranks: Ranks, captured: bool) -> list[str]:
    """Generation 3 is staged and published on one side of a capture's edge, and taken on the other."""
    from fake_nccl import capture

    transport: Any = ranks.create()
    (slot,) = _SLOTS[1:]
    sides: list[AbstractContextManager[None]] = [capture(), nullcontext()]
    before, after = sides if captured else reversed(sides)
    for number in (1, 2):
        fill(transport, slot, number)
        transport.publish(slot)
        transport.fetch(slot, "x", source=1 - ranks.rank)
    with before:
        fill(transport, slot, 3)
        transport.publish(slot)
    with after, pytest.raises(GenerationError) as caught:
        transport.fetch(slot, "x", source=1 - ranks.rank)
    ranks.sync()
    return [str(caught.value)]


@pytest.mark.parametrize("captured", [True, False])
def test_a_generation_does_not_cross_the_edge_of_a_capture(
    run: Callable[..., list[Any]], captured: bool
) -> None:
    where = "inside a graph capture" if captured else "outside of graph captures"
    for (said,) in run(_across, captured=captured):
        assert f"slot 'both', generation 3 was staged {where}" in said


def _not_looked_at(ranks: Ranks) -> str:
    """Rank 1 neither publishes nor takes what an eager generation brings, and captures the next one."""
    from fake_nccl import capture

    transport: Any = ranks.create()
    slot = _SLOTS[0]
    fill(transport, slot, 1)
    if ranks.rank == 0:
        transport.publish(slot)
        ranks.ask("raised")
        return ""
    with capture(), pytest.raises(GenerationError) as caught:
        transport.stage(slot)
    transport.fetch(slot, "x", source=0)
    ranks.tell("raised", "")
    return str(caught.value)


def test_what_was_not_looked_at_is_not_received_in_a_capture(run: Callable[..., list[Any]]) -> None:
    assert "generation 1 was staged outside of graph captures" in run(_not_looked_at)[1]


def _first_use(ranks: Ranks) -> list[str]:
    from fake_nccl import capture

    transport: Any = ranks.create()
    said = []
    free = Slot("free", (PartSpec("x", (4,), torch.float32),))
    for call in (transport.barrier, lambda: transport.stage(free)):
        with capture(), pytest.raises(TransportError, match="connects to the peers") as caught:
            call()
        said.append(str(caught.value))
        call()
        ranks.sync()
    return said


def test_a_first_use_cannot_be_captured(run: Callable[..., list[Any]]) -> None:
    for barrier, free in run(_first_use):
        assert "'barriers'" in barrier
        assert "'free/" in free


def _outgrown(ranks: Ranks) -> bool:
    from fake_nccl import capture

    transport: Any = ranks.create()
    sizes = []
    for size in (4, 4, 4000, 4000):
        slot = Slot("grows", (PartSpec("x", (size,), torch.float32, frozenset({(0, 1), (1, 0)})),))
        with capture():
            sizes.append(transport.stage(slot)["x"].data_ptr())
            transport.publish(slot)
            transport.fetch(slot, "x", source=1 - ranks.rank)
    kept = {memory.data_ptr() for memory in transport._outgrown}
    transport.close()
    return kept >= set(sizes[:2]) and not transport._outgrown


def test_graphs_keep_the_memory_that_a_slot_outgrew(run: Callable[..., list[Any]]) -> None:
    assert run(_outgrown) == [True, True]
