# SPDX-License-Identifier: Apache-2.0
"""One use of a slot, as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from cptransport.transport import Slot

__all__ = ["Generation"]


@dataclass
class Generation:
    """One generation of one slot on this rank.

    Attributes:
        slot: as staged.
        number: 1, 2, ...
        step: of the control plane when it was staged; alike on all ranks.
        staged: part name -> its buffer (no autograd history).
        handed: part name -> the view of it that the user was given.
        to: destinations of ``publish``; None before it.
        received: (part, source) -> tensor handed out, for parts with routes.
        taken: (part, source) already handed out.
        counted: whether the payload of the routes is in the counters.
    """

    slot: Slot
    number: int
    step: int = 0
    staged: dict[str, Tensor] = field(default_factory=dict)
    handed: dict[str, Tensor] = field(default_factory=dict)
    to: tuple[int, ...] | None = None
    received: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    taken: set[tuple[str, int]] = field(default_factory=set)
    counted: bool = False
