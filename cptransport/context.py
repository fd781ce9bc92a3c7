# SPDX-License-Identifier: Apache-2.0
"""``CPContext``: a plan and the transport that serves it; what ops take as ``cp_context``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cptransport.errors import PlanError
from cptransport.plan import Plan, RankPlan, build_plan
from cptransport.select import create_transport, group_world_size
from cptransport.transport import BoundaryTransport

__all__ = ["CPContext", "build_cp_context"]


@dataclass(frozen=True)
class CPContext:
    """Who owns which tokens, and how their boundary state travels.

    Args:
        plan: from ``build_plan``.
        transport: from ``create_transport`` or ``threads.run``.

    Raises:
        PlanError: plan and transport differ in world size.
    """

    plan: Plan
    transport: BoundaryTransport

    def __post_init__(self) -> None:
        if self.plan.world_size != self.transport.world_size:
            raise PlanError(
                f"the plan is for {self.plan.world_size} ranks, the transport has {self.transport.world_size}"
            )

    @property
    def rank(self) -> int:
        """This rank in the transport's group."""
        return self.transport.rank

    @property
    def local(self) -> RankPlan:
        """This rank's part of the plan."""
        return self.plan.for_rank(self.transport.rank)


def build_cp_context(
    cu_seqlens: Sequence[int] | Tensor,
    group: Any = None,
    *,
    layout: str = "contiguous",
    backend: str | None = None,
    boundaries: Sequence[Any] | None = None,
) -> CPContext:
    """Build the plan and the transport of a group in one call.

    Args:
        cu_seqlens: offsets of the global packed stream, see ``build_plan``.
        group: see ``create_transport``.
        layout, boundaries: see ``build_plan``.
        backend: see ``create_transport``.

    Returns:
        CPContext: close its ``transport`` when done.

    Raises:
        PlanError, BackendError, EnvVarError: as those two.

    Collective: over the group.
    """
    plan = build_plan(
        cu_seqlens, world_size=group_world_size(group), layout=layout, boundaries=boundaries
    )
    return CPContext(plan, create_transport(group, backend=backend))
