# SPDX-License-Identifier: Apache-2.0
"""How many bytes an exchange moves: the routes of its schedule, counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cptransport.composition import DIRECTIONS, RowRoute, check_composition, schedule
from cptransport.errors import PlanError
from cptransport.halo import halo
from cptransport.transport import PartSpec, Slot

if TYPE_CHECKING:
    from cptransport.plan import Plan

__all__ = ["Volume", "volume"]


@dataclass(frozen=True)
class Volume:
    """Payload bytes that each rank receives in one exchange, indexed by rank."""

    forward: list[int]
    backward: list[int]


def volume(plan: Plan, slot: Slot, composition: str) -> Volume:
    """Return the payload bytes that every rank receives in one exchange of the slot's parts.

    Args:
        plan: who owns what.
        slot: parts among ``state`` and ``transition`` (``[max_segments * B, ...]``) and ``halo``
            (``[max_segments * (W - 1), ...]``). What it lacks is not counted; its own routes are
            not read.
        composition: ``"handoff"``, ``"gather"`` or ``"scan"``; the halo does not depend on it.

    Raises:
        PlanError: another part, or a first axis that is not a multiple of ``max_segments``.
        OpInputError: unknown composition.
    """
    check_composition(composition)
    for part in slot.parts:
        _check_part(plan, part)
    return Volume(*(_received(plan, slot, direction, composition) for direction in DIRECTIONS))


def _received(plan: Plan, slot: Slot, direction: str, composition: str) -> list[int]:
    received = [0] * plan.world_size
    for part in slot.parts:
        rows_per_segment = part.shape[0] // plan.max_segments
        if part.name == "halo":
            routes: Iterable[RowRoute] = halo(plan, rows_per_segment + 1).routes(direction)
            moved = part.row_nbytes
        else:
            rounds = schedule(plan, direction, composition).rounds
            routes = (route for step in rounds for route in step.routes[part.name])
            moved = part.row_nbytes * rows_per_segment
        for _, destination, _ in routes:
            received[destination] += moved
    return received


def _check_part(plan: Plan, part: PartSpec) -> None:
    if part.name not in ("state", "transition", "halo"):
        raise PlanError(f"volume counts the parts state, transition and halo, not {part.name!r}")
    if not part.shape or part.shape[0] % plan.max_segments:
        raise PlanError(
            f"part {part.name!r} of shape {list(part.shape)}: the first axis must be a multiple of "
            f"the plan's max_segments, {plan.max_segments}"
        )
