# SPDX-License-Identifier: Apache-2.0
"""The ``cudnn_summary`` transport: each part of a summary is one typed all-gather into a dense workspace.

::

    part that some rank sends to two or more others     part that moves between pairs only
    ------------------------------------------------    ----------------------------------
    workspace [world_size, *shape], row r from rank r   by its routes, as on nccl and gloo

State updates and transitions are parts of their own, so each workspace is contiguous whatever the
world size, and a run of predecessors is a slice of it: what cuDNN's KDA composes from.

A part is *widened*: below the verbs its routes go from every rank to every other, so what is moved
and what is counted is what arrives; above them callers still see only what they asked for. All else
(waits, deaths, capture, the control plane) is the transport underneath: ``nccl`` on CUDA, ``gloo``
on the CPU. Both are used on connections of this transport's own.

Every rank publishes every generation, also where it sends nothing: an all-gather is collective. So
the transport does not claim ``pairwise``.

Memory: a slot has one workspace per part, made at its first ``stage``, kept and reused by every
later generation, hence by every layer; only what a rank stages is double-buffered. Its rows are
written after this rank's ``stage``, which gave up what they held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cptransport.backend import Generation, TransportBase
from cptransport.transport import (
    BoundaryTransport,
    Capabilities,
    Gathered,
    PartSpec,
    Selection,
    Slot,
)
from cptransport.transports import gloo
from cptransport.transports.gloo import GlooTransport
from cptransport_nccl import BACKEND as NCCL
from cptransport_nccl.transport import NcclTransport

__all__ = ["CAPABILITIES", "DenseGloo", "DenseNccl", "DensePart", "create", "workspace_bytes"]

#: By device type; what the transports underneath can do, but ``pairwise``.
CAPABILITIES = {
    "cpu": Capabilities(
        device_types=("cpu",), pairwise=False, cross_host=True, shared_device=True, dense=True
    ),
    "cuda": Capabilities(
        device_types=("cuda",), pairwise=False, cross_host=True, cuda_graph=True, dense=True
    ),
}


@dataclass(frozen=True)
class DensePart(PartSpec):
    """A part as it moves, from every rank to every other; ``asked`` is the part as the caller gave it."""

    asked: PartSpec | None = None


def workspace_bytes(slot: Slot, world_size: int) -> int:
    """Return the size of a slot's workspace on one rank.

    At world size 64, H = 32, K = V = 128, one segment per rank: 128 MiB of states and as much of
    transitions, 256 MiB. The forward and the backward exchange of an op are a slot each.
    """
    wire = _wire(slot, world_size)
    return sum(world_size * part.nbytes for part in wire.parts if isinstance(part, DensePart))


@lru_cache(maxsize=1024)
def _wire(slot: Slot, world_size: int) -> Slot:
    """Return the slot as it moves; the slot itself where nothing in it is widened."""
    parts = tuple(_widened(part, world_size) for part in slot.parts)
    if all(wide is part for wide, part in zip(parts, slot.parts, strict=True)):
        return slot
    return Slot(slot.name, parts)


def _widened(part: PartSpec, world_size: int) -> PartSpec:
    pairs = {route[:2] for route in part.routes or () if route[0] != route[1]}
    if max(Counter(source for source, _ in pairs).values(), default=0) < 2:
        return part
    return DensePart(part.name, part.shape, part.dtype, _everywhere(world_size), asked=part)


@lru_cache(maxsize=16)
def _everywhere(world_size: int) -> frozenset[tuple[int, int]]:
    ranks = range(world_size)
    return frozenset((s, d) for s in ranks for d in ranks if s != d)


class _Dense(TransportBase):
    """What turns a transport underneath into one that gathers densely; a mixin in front of it."""

    def _serve(self) -> None:
        self.name = "cudnn_summary"
        self.selection = Selection(self.name, "argument", self.name)
        self.capabilities = CAPABILITIES[self.device.type]

    def stage(self, slot: Slot) -> Mapping[str, Tensor]:
        """See ``BoundaryTransport.stage``."""
        return super().stage(_wire(slot, self.world_size))

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        """See ``BoundaryTransport.publish``."""
        super().publish(_wire(slot, self.world_size), to=to)

    def fetch(self, slot: Slot, part: str, *, source: int) -> Tensor:
        """See ``BoundaryTransport.fetch``."""
        return super().fetch(_wire(slot, self.world_size), part, source=source)

    def gather(self, slot: Slot, *, parts: Mapping[str, Sequence[int]] | None = None) -> Gathered:
        """See ``BoundaryTransport.gather``; a widened part is one dense tensor, own row included."""
        if parts is None:
            ranks = range(self.world_size)
            parts = {
                part.name: [s for s in ranks if part.rows(s, self.rank) != ()]
                for part in slot.parts
            }
        return super().gather(_wire(slot, self.world_size), parts=parts)

    def _check_source(self, part: PartSpec, source: int) -> None:
        asked = part.asked if isinstance(part, DensePart) else None
        super()._check_source(asked or part, source)

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        staged = super()._stage(current, retired)
        for part in _dense_parts(current.slot):
            self._workspace(current, part)  # nothing is allocated between publish and gather
        return staged

    def _gather(
        self, current: Generation, names: Sequence[str], absent: Sequence[tuple[PartSpec, int]]
    ) -> Gathered:
        found = super()._gather(current, names, absent)
        tables = {
            part.name: self._complete(current, part)
            for part in _dense_parts(current.slot)
            if part.name in names
        }
        if not tables:
            return found
        parts = {name: tables.get(name, found[name]) for name in names}
        return Gathered(parts, self.device, {name: found.sources(name) for name in names})

    def _workspace(self, current: Generation, part: DensePart) -> Tensor:
        """Return the ``[world_size, *shape]`` memory that a part is gathered into."""
        raise NotImplementedError

    def _complete(self, current: Generation, part: DensePart) -> Tensor:
        """Return the workspace with this rank's own row in it."""
        raise NotImplementedError


def _dense_parts(slot: Slot) -> list[DensePart]:
    return [part for part in slot.parts if isinstance(part, DensePart)]


class DenseGloo(_Dense, GlooTransport):
    """One rank's end on the CPU. gloo delivers the rows as messages, since its collectives cannot be cut short."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._serve()

    def _buffer(self, key: tuple[str, ...], part: PartSpec, device: torch.device) -> Tensor:
        if key[0] == "received" and isinstance(part, DensePart):
            _, slot, _, source, _ = key
            return self._table(slot, part)[int(source)]
        return super()._buffer(key, part, device)

    def _table(self, slot: str, part: DensePart) -> Tensor:
        table = PartSpec(part.name, (self.world_size, *part.shape), part.dtype)
        return super()._buffer(("workspace", slot, part.name), table, self.device)

    def _workspace(self, current: Generation, part: DensePart) -> Tensor:
        return self._table(current.slot.name, part)

    def _complete(self, current: Generation, part: DensePart) -> Tensor:
        table = self._workspace(current, part)
        table[self.rank].copy_(current.staged[part.name])
        return table


class DenseNccl(_Dense, NcclTransport):
    """One rank's end on CUDA: a widened part is one ``ncclAllGather``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._serve()

    def _is_dense(self, part: PartSpec) -> bool:
        return isinstance(part, DensePart)

    def _dense_table(self, current: Generation, part: PartSpec) -> Tensor:
        # One for all generations: a gather is issued after this rank's stage, behind the readers of
        # the generation before on the current stream.
        table = PartSpec(part.name, (self.world_size, *part.shape), part.dtype)
        return self._buffer("dense", current.slot.name, table, 0)

    def _workspace(self, current: Generation, part: DensePart) -> Tensor:
        return self._dense_table(current, part)

    def _complete(self, current: Generation, part: DensePart) -> Tensor:
        self._receive(current, ())  # the all-gather writes this rank's row too; wait for it
        return self._dense_table(current, part).detach()


def create(group: Any, device: Any, timeout_s: float, **options: Any) -> BoundaryTransport:
    """Make the transport of a group; collective.

    Raises:
        BackendUnavailableError: NCCL or gloo cannot connect the group.
    """
    if torch.device(device).type == "cuda":
        return NCCL.create(group, device, timeout_s, kind=DenseNccl)
    return gloo.BACKEND.create(group, device, timeout_s, kind=DenseGloo)
