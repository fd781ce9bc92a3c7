# SPDX-License-Identifier: Apache-2.0
"""Memory that the ranks of a group address from each other, and where a slot's parts lie in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cptransport.transport import PartSpec, Slot

__all__ = ["PeerMemory", "PeerRegion", "byte_spans", "bytes_at", "layout", "view"]

_ALIGNMENT = 256


@dataclass(frozen=True)
class PeerRegion:
    """Memory of the same size on every rank.

    Attributes:
        local: uint8 ``[nbytes]`` on this rank's device.
        addresses: where this process addresses every rank's region, this rank's own included.
        handle: whatever the provider needs to free it.
    """

    local: Tensor
    addresses: tuple[int, ...]
    handle: Any = None


class PeerMemory(Protocol):
    """Where a one-sided backend gets its memory from."""

    def allocate(self, nbytes: int) -> PeerRegion:
        """Allocate on every rank; collective, waits on the host. Raises ``TransportError`` alike on all ranks."""
        ...

    def free(self, region: PeerRegion) -> None:
        """Free on every rank; collective, after all ranks have stopped using it."""
        ...

    def close(self, broken: bool) -> None:
        """Give up the provider; when broken, without peers and without freeing what they may map."""
        ...


class _Bytes:
    """Device memory as ``torch.as_tensor`` takes it without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def bytes_at(address: int, nbytes: int, device: torch.device) -> Tensor:
    """View device memory that torch did not allocate as a uint8 tensor; who holds it must not outlive the memory."""
    return torch.as_tensor(_Bytes(address, nbytes), device=device)


def layout(slot: Slot) -> tuple[dict[str, int], int]:
    """Return the offsets of a slot's parts in one buffer, and the buffer's bytes."""
    offsets, total = {}, 0
    for part in slot.parts:
        offsets[part.name] = total
        total += -(-max(part.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(total, _ALIGNMENT)


def view(memory: Tensor, offset: int, part: PartSpec) -> Tensor:
    """View uint8 memory from an offset on as a part."""
    return memory[offset : offset + part.nbytes].view(part.dtype).view(part.shape)


def byte_spans(part: PartSpec, rows: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return ascending rows (None: the whole part) as runs of bytes ``(start, count)``; at least one, maybe empty."""
    if rows is None:
        return [(0, part.nbytes)]
    spans: list[tuple[int, int]] = []
    for row in rows:
        start = row * part.row_nbytes
        if spans and sum(spans[-1]) == start:
            spans[-1] = (spans[-1][0], spans[-1][1] + part.row_nbytes)
        else:
            spans.append((start, part.row_nbytes))
    return spans or [(0, 0)]
