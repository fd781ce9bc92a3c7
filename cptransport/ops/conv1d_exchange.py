# SPDX-License-Identifier: Apache-2.0
"""A convolution call without its tensors, and the exchange of its halos or of their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from cptransport.composition import expand_routes
from cptransport.context import CPContext
from cptransport.halo import Halo, halo
from cptransport.ops.scope import RunRecord
from cptransport.transport import Gathered, PartSpec, Slot

__all__ = ["ConvCall", "ConvGrads", "Convolution", "HaloExchange"]


@dataclass(frozen=True)
class ConvCall:
    """A call without its tensors.

    Attributes:
        context: plan and transport.
        width: W. batch: B. channels: D. states: N.
        silu: apply it. final: return the final states. overlap: see ``CULA_CP_OVERLAP``.
        dtype: of x. compute: of sums and of halo gradients.
        initial_dtype: of the initial state, None without one.
        device: where the tensors are.
        computes: who computes it. record: the same for users.
    """

    context: CPContext
    width: int
    batch: int
    channels: int
    states: int
    silu: bool
    final: bool
    overlap: bool
    dtype: torch.dtype
    compute: torch.dtype
    initial_dtype: torch.dtype | None
    device: torch.device
    computes: Convolution
    record: RunRecord

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """``[N, D, W-1]``."""
        return self.states, self.channels, self.width - 1

    @property
    def table_shape(self) -> tuple[int, int, int]:
        """``[max_segments * (W-1), B, D]``, the slot's part."""
        return self.context.plan.max_segments * (self.width - 1), self.batch, self.channels


class HaloExchange:
    """Moves one table of halo rows to the ranks that need them.

    A call that borrows no row of another rank moves nothing.

    Args:
        call: alike on all ranks.
        direction: ``"forward"`` or ``"backward"``.
        dtype: of the table.

    Attributes:
        table: staged, to be written before ``publish``; None where nothing moves.
    """

    def __init__(self, call: ConvCall, direction: str, dtype: torch.dtype) -> None:
        self._transport = call.context.transport
        moves = halo(call.context.plan, call.width)
        self._slot = _slot(moves, direction, call.table_shape, dtype)
        self.table: Tensor | None = None
        if self._slot is not None:
            self.table = self._transport.stage(self._slot)["halo"]

    def publish(self) -> None:
        """Release what was written into ``table``."""
        if self._slot is not None:
            self._transport.publish(self._slot)

    def gather(self) -> Gathered | None:
        """Wait for the peers' tables; None where nothing moves."""
        return None if self._slot is None else self._transport.gather(self._slot)


@lru_cache(maxsize=256)
def _slot(moves: Halo, direction: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot | None:
    routes = moves.routes(direction)
    if not routes:
        return None
    return Slot(f"conv1d.{direction}", (PartSpec("halo", shape, dtype, expand_routes(routes, 1)),))


@dataclass(frozen=True)
class ConvGrads:
    """Gradients in the dtypes of what they belong to; None for what was not given."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    residual: Tensor | None
    initial_state: Tensor | None


class Convolution(Protocol):
    """One implementation of the local part. Both halves write, publish, gather, in this order."""

    name: str

    def forward(
        self,
        call: ConvCall,
        exchange: HaloExchange,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return y, the final states if ``call.final``, and what the backward wants of the halos."""
        ...

    def backward(
        self,
        call: ConvCall,
        exchange: HaloExchange,
        border: Tensor | None,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual_dtype: torch.dtype | None,
        grad_y: Tensor,
        grad_final: Tensor | None,
    ) -> ConvGrads:
        """Return the gradients; rows of no segment get zeros and those of ``grad_y`` are not read."""
        ...
