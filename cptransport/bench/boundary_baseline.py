# SPDX-License-Identifier: Apache-2.0
"""The baseline of the boundary bench: one dense all-gather of ``torch.distributed``, then the same fold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.transport import Capabilities, Gathered, Slot

__all__ = ["AllGather"]


class AllGather:
    """The verbs of a gather exchange over the default group, as whoever has no transport writes them.

    State and transition of a rank lie in one buffer, so that one collective moves both. NCCL runs
    it for CUDA, gloo for CPU.

    Args:
        device: of the tensors.
    """

    name = "all_gather"
    capabilities = Capabilities(device_types=("cpu", "cuda"), pairwise=False)

    def __init__(self, device: torch.device) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.bytes_received = 0
        self._buffers: dict[Slot, tuple[Tensor, Tensor]] = {}

    def stage(self, slot: Slot) -> Mapping[str, Tensor]:
        """Return views of this rank's buffer."""
        if slot not in self._buffers:
            numel = sum(part.nbytes // part.dtype.itemsize for part in slot.parts)
            made = torch.zeros(1 + self.world_size, numel, dtype=slot.parts[0].dtype)
            made = made.to(self.device)
            self._buffers[slot] = made[0], made[1:]
        return self._views(slot, self._buffers[slot][0])

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        """Gather the buffers of all ranks."""
        mine, everyones = self._buffers[slot]
        dist.all_gather_into_tensor(everyones.view(-1), mine)
        self.bytes_received += (self.world_size - 1) * mine.nbytes

    def gather(self, slot: Slot, *, parts: Mapping[str, Sequence[int]] | None = None) -> Gathered:
        """Return what came, in place."""
        everyones = [self._views(slot, one) for one in self._buffers[slot][1]]
        names = [part.name for part in slot.parts]
        return Gathered(
            {name: tuple(one[name] for one in everyones) for name in names},
            self.device,
            {name: range(self.world_size) for name in names},
        )

    @staticmethod
    def _views(slot: Slot, line: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for part in slot.parts:
            numel = part.nbytes // part.dtype.itemsize
            views[part.name] = line[start : start + numel].view(part.shape)
            start += numel
        return views
