# SPDX-License-Identifier: Apache-2.0
"""``CPContext``: a plan and the transport that serves it; what ops take as ``cp_context``."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport import env
from cptransport.activations import Carrier, GroupCarrier
from cptransport.errors import CapabilityError, OpInputError, PlanError
from cptransport.plan import Plan, RankPlan, build_plan
from cptransport.select import create_transport, group_world_size
from cptransport.transport import BoundaryTransport
from cptransport.transports import threads
from cptransport.transports.loopback import LoopbackTransport

__all__ = ["CPContext", "alone", "build_cp_context", "carrier_of", "context_of"]

_keys = itertools.count()
_contexts: weakref.WeakValueDictionary[str, CPContext] = weakref.WeakValueDictionary()


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
    #: What ops have worked out for calls with this context, by their signature.
    calls: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    #: Names this context in a compiled program; never used again in this process.
    key: str = field(
        default_factory=lambda: str(next(_keys)), init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if self.plan.world_size != self.transport.world_size:
            raise PlanError(
                f"the plan is for {self.plan.world_size} ranks, the transport has {self.transport.world_size}"
            )
        _contexts[self.key] = self

    @property
    def rank(self) -> int:
        """This rank in the transport's group."""
        return self.transport.rank

    @property
    def local(self) -> RankPlan:
        """This rank's part of the plan."""
        return self.plan.for_rank(self.transport.rank)


def context_of(key: str) -> CPContext:
    """Return the context of that key.

    Raises:
        OpInputError: it is gone.
    """
    found = _contexts.get(key)
    if found is None:
        raise OpInputError(
            "the cp_context of a compiled program is gone; keep it while the program runs"
        )
    return found


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


def alone(context: CPContext) -> CPContext:
    """Return the context of an op that has the whole stream on this rank; nothing communicates."""
    outer = context.transport
    transport = LoopbackTransport(outer.device, env.timeout_s(getattr(outer, "timeout_s", None)))
    for setting in ("strict", "preferred_engine"):
        setattr(transport, setting, getattr(outer, setting, None))
    return CPContext(_whole(context.plan), transport)


@lru_cache(maxsize=128)
def _whole(plan: Plan) -> Plan:
    return build_plan(plan.cu_seqlens, world_size=1, padded_cu_seqlens=plan.padded_cu_seqlens)


def carrier_of(cp_or_group: Any) -> Carrier:
    """Return what moves activations for a ``cp_or_group`` argument.

    Args:
        cp_or_group: a ``CPContext``, a transport, or a ``torch.distributed`` group that this
            process is in. None: as ``create_transport``, without making one.

    Raises:
        OpInputError: none of these.
        CapabilityError: a transport that neither moves activations nor has a group.
        TransportError: this process is not in the group.
    """
    found = cp_or_group.transport if isinstance(cp_or_group, CPContext) else cp_or_group
    if found is None:
        found = threads.current_transport()
    if found is None and not dist.is_initialized():
        return LoopbackTransport(torch.device("cpu"), env.timeout_s())
    absent = dist.is_available() and found == dist.GroupMember.NON_GROUP_MEMBER
    if found is None or absent or isinstance(found, dist.ProcessGroup):
        group_world_size(found)  # refuses a group that this process is not in
        return GroupCarrier(found or dist.group.WORLD, env.timeout_s())
    if hasattr(found, "move"):
        return cast(Carrier, found)
    if not isinstance(found, BoundaryTransport):
        raise OpInputError(
            "cp_or_group must be a CPContext or a torch.distributed group, got "
            f"{type(found).__name__}"
        )
    group = getattr(found, "group", None)
    if group is None:
        raise CapabilityError(
            f"transport {found.name!r} moves no activations, and its group is unknown"
        )
    return GroupCarrier(group, env.timeout_s())
