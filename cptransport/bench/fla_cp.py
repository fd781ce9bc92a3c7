# SPDX-License-Identifier: Apache-2.0
"""FLA's context-parallel KDA on one rank alone: what its all-gathers would bring is recorded first.

FLA's ranks meet in ``all_gather_into_tensor`` only: once in the forward, once in the backward. What
a rank contributes does not depend on what it gets there, so every rank is run once, alone, to
record its contribution; then the rank that is measured gets all of them, as tensors that are there
already. FLA's communication thus costs nothing, which is to FLA's advantage; its pre-process, the
merge and everything else run as they are.

Source: flash-linear-attention 0.6.0, ``fla/ops/cp/chunk_delta_h.py`` and ``context.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Alone"]

_DIRECTIONS = ("forward", "backward")


class Alone:
    """Stands in for the process group of FLA's context.

    Args:
        world_size: ranks. tokens: of each. device: of the tensors.

    Attributes:
        cu_seqlens (int32, [2]): of one rank's tokens as one sequence.
    """

    def __init__(self, world_size: int, tokens: int, device: torch.device) -> None:
        from fla.ops.cp.context import get_cp_cu_seqlens

        self.world_size = world_size
        self.cu_seqlens = torch.tensor([0, tokens], dtype=torch.int32, device=device)
        whole = torch.tensor([0, tokens * world_size], dtype=torch.int32, device=device)
        self._contexts = []
        for rank in range(world_size):
            context = get_cp_cu_seqlens(whole, world_size=world_size, rank=rank)
            context.group = self
            self._contexts.append(context)
        self.rank = 0
        self._direction = _DIRECTIONS[0]
        self._keeps: dict[str, list[Tensor | None]] = {
            name: [None] * world_size for name in _DIRECTIONS
        }
        self._recording = True
        self._brought: dict[str, Tensor] = {}
        _install()

    @contextmanager
    def forward(self) -> Iterator[Any]:
        """Run FLA's forward in the block, with the context that this gives; its backward comes after."""
        self._direction = "forward"
        try:
            yield self._contexts[self.rank]
        finally:
            self._direction = "backward"

    @contextmanager
    def recorded(self, rank: int) -> Iterator[None]:
        """Be that rank in the block, and keep what it contributes."""
        self.rank, self._recording = rank, True
        yield

    def replay(self, rank: int) -> None:
        """Be that rank from now on, and hand out what was kept."""
        self.rank, self._recording = rank, False
        for name, kept in self._keeps.items():
            self._brought[name] = torch.stack([x for x in kept if x is not None])
            assert len(self._brought[name]) == self.world_size, (
                f"{name}: not all ranks were recorded"
            )

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return what the gather brings, rank-major."""
        if not self._recording:
            return self._brought[self._direction]
        self._keeps[self._direction][self.rank] = mine.clone()
        return torch.zeros_like(mine).expand(self.world_size, *mine.shape).contiguous()


def _install() -> None:
    """Let FLA's recurrences ask an ``Alone`` where it is the group; other groups go where they went."""
    from fla.ops.cp import chunk_delta_h as module

    if isinstance(module.dist, _Distributed):
        return
    gather = module.all_gather_into_tensor

    def all_gather_into_tensor(
        inp: Tensor, out: Tensor | None = None, group: Any = None, async_op: bool = False
    ) -> tuple[Tensor, Any]:
        if isinstance(group, Alone):
            return group.all_gather(inp), None
        found: tuple[Tensor, Any] = gather(inp, out, group=group, async_op=async_op)
        return found

    module.dist = _Distributed(dist.__name__)
    module.all_gather_into_tensor = all_gather_into_tensor


class _Distributed(ModuleType):
    """``torch.distributed``, as FLA's recurrences see it."""

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    @staticmethod
    def get_rank(group: Any = None) -> int:
        return group.rank if isinstance(group, Alone) else dist.get_rank(group)

    @staticmethod
    def get_world_size(group: Any = None) -> int:
        return group.world_size if isinstance(group, Alone) else dist.get_world_size(group)
