# SPDX-License-Identifier: Apache-2.0
"""What a one-sided ``gather`` hands out: parts that stay where their owners wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from cptransport.errors import RouteError
from cptransport.transport import Gathered

__all__ = ["InPlace"]


class InPlace(Gathered):
    """Peers' parts by address; a tensor of one is a copy, made when it is asked for.

    Args:
        present: part -> ranks whose part is there.
        tables: part -> int64 ``[world_size]`` on the device, written on the device.
        tensor: ``tensor(part, source)`` returns this rank's own part, or copies a peer's once.
        aligned: all addresses are multiples of 16.
        linked: some lie in another device's memory.
    """

    def __init__(
        self,
        present: Mapping[str, Sequence[int]],
        tables: Mapping[str, Tensor],
        tensor: Callable[[str, int], Tensor],
        *,
        aligned: bool = False,
        linked: bool = False,
    ) -> None:
        self._present = {name: frozenset(sources) for name, sources in present.items()}
        self._tables = dict(tables)
        self._tensor = tensor
        self._aligned = frozenset(tables if aligned else ())
        self.linked = linked

    def __getitem__(self, part: str) -> Sequence[Tensor | None]:
        return _Sources(self, part, len(self._tables[part]))

    def tensor(self, part: str, source: int) -> Tensor:
        """See ``Gathered.tensor``; the first call per source copies it to this rank."""
        if source not in self._present.get(part, ()):
            raise RouteError(f"part {part!r} of rank {source} was not gathered")
        return self._tensor(part, source)

    @property
    def addresses(self) -> Mapping[str, Tensor]:
        """Per part an int64 ``[world_size]`` device tensor."""
        return self._tables


class _Sources(Sequence["Tensor | None"]):
    """One part by source rank; only what is looked at is copied."""

    def __init__(self, gathered: InPlace, part: str, world_size: int) -> None:
        self._gathered = gathered
        self._part = part
        self._world_size = world_size

    def __len__(self) -> int:
        return self._world_size

    def __getitem__(self, source: Any) -> Any:
        if isinstance(source, slice):
            return [self[index] for index in range(*source.indices(self._world_size))]
        if not -self._world_size <= source < self._world_size:
            raise IndexError(f"rank {source} of {self._world_size}")
        source %= self._world_size
        present = source in self._gathered.sources(self._part)
        return self._gathered.tensor(self._part, source) if present else None
