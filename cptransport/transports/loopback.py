# SPDX-License-Identifier: Apache-2.0
"""``loopback``: the transport of a group of one rank. Nothing moves, nothing waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.backend import BackendSpec
from cptransport.base import Generation, TransportBase
from cptransport.control import ControlPlane
from cptransport.transport import TRANSPORT_API_VERSION, Capabilities, PartSpec

__all__ = ["BACKEND", "LoopbackTransport"]

_CAPABILITIES = Capabilities(
    device_types=("cpu", "cuda"),
    cuda_graph=True,
    shared_device=True,
    cross_host=True,
    in_place=True,
)


class LoopbackTransport(TransportBase):
    """A rank may stage, publish to itself and take from itself; its own parts are handed out in place."""

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        super().__init__(
            "loopback",
            device=device,
            control=ControlPlane(None, 0, 1, timeout_s),
            timeout_s=timeout_s,
            capabilities=_CAPABILITIES,
        )
        self._buffers: dict[tuple[str, str, int], Tensor] = {}

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        staged = {}
        for part in current.slot.parts:
            key = (current.slot.name, part.name, current.number % 2)
            buffer = self._buffers.get(key)
            if buffer is None or buffer.numel() < part.nbytes:
                buffer = torch.empty(part.nbytes, dtype=torch.uint8, device=self.device)
                self._buffers[key] = buffer
            staged[part.name] = buffer[: part.nbytes].view(part.dtype).view(part.shape)
        return staged

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        pass

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        raise AssertionError("a group of one rank has no other source")

    def _barrier(self) -> None:
        pass

    def _close(self, broken: bool) -> None:
        self._buffers.clear()


def _probe(group: Any, device: Any) -> str | None:
    if group is not None and dist.get_world_size(group) != 1:
        return f"loopback serves one rank; this group has {dist.get_world_size(group)}"
    return None


def _create(group: Any, device: Any, timeout_s: float, **options: Any) -> LoopbackTransport:
    return LoopbackTransport(torch.device(device), timeout_s)


BACKEND = BackendSpec(
    name="loopback",
    api_version=TRANSPORT_API_VERSION,
    summary="one rank; nothing moves",
    capabilities=_CAPABILITIES,
    probe=_probe,
    create=_create,
)
