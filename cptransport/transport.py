# SPDX-License-Identifier: Apache-2.0
"""The protocol: slots, what moves, and the verbs of a transport.

Pure declarations; nothing here talks to a process group. The clauses behind the words are in
``docs/contract.md``.

A *slot* is a named set of parts (tensors of fixed shape). Each use of it is a *generation*::

    staged = transport.stage(slot)        # opens generation g; every rank, same order
    staged["state"].copy_(summary)        # written in place, no further copy
    transport.publish(slot)               # release: peers may read
    incoming = transport.fetch(slot, "state", source=0)     # acquire: waits for rank 0's g
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from cptransport.addresses import address_table
from cptransport.errors import RouteError, TransportError

__all__ = [
    "TRANSPORT_API_VERSION",
    "BoundaryTransport",
    "Capabilities",
    "Gathered",
    "PartSpec",
    "PartStats",
    "Route",
    "Selection",
    "Slot",
    "TransportStats",
]

TRANSPORT_API_VERSION = 1

#: ``(source, destination)`` moves a whole part, ``(source, destination, row)`` one row of its first
#: axis.
Route = tuple[int, int] | tuple[int, int, int]


@dataclass(frozen=True)
class PartSpec:
    """One tensor of a slot.

    Args:
        name: e.g. ``"state"``, ``"transition"``, ``"halo"``.
        shape: the same on every rank; any size from 0.
        dtype: any torch dtype; bytes out equal bytes in.
        routes: what moves, a set of ``(source, destination)`` or ``(source, destination, row)``.
            None: every rank's whole part goes to every rank that ``publish`` names.

    Raises:
        TransportError: the name, shape or dtype is malformed.
        RouteError: a route is malformed or names a row outside the first axis.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    routes: frozenset[Route] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TransportError(f"a part needs a non-empty name, got {self.name!r}")
        shape = tuple(int(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise TransportError(f"part {self.name!r}: negative size in shape {shape}")
        if not isinstance(self.dtype, torch.dtype):
            raise TransportError(
                f"part {self.name!r}: dtype must be a torch.dtype, got {self.dtype!r}"
            )
        object.__setattr__(self, "shape", shape)
        if self.routes is not None:
            object.__setattr__(
                self, "routes", frozenset(self._route(entry) for entry in self.routes)
            )

    def _route(self, entry: Iterable[int]) -> Route:
        values = tuple(int(value) for value in entry)
        if len(values) not in (2, 3) or any(value < 0 for value in values):
            raise RouteError(
                f"part {self.name!r}: a route is (source, destination) or (source, destination, row) "
                f"of non-negative integers, got {values}"
            )
        if len(values) == 3 and (not self.shape or values[2] >= self.shape[0]):
            raise RouteError(
                f"part {self.name!r}: row {values[2]} is outside the shape {self.shape}"
            )
        return values  # type: ignore[return-value]

    @property
    def numel(self) -> int:
        """Number of elements of the part on one rank."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the part on one rank."""
        return self.numel * self.dtype.itemsize

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row of the first axis; the whole part when it is a scalar or has no rows."""
        return self.nbytes // self.shape[0] if self.shape and self.shape[0] else self.nbytes

    def rows(self, source: int, destination: int) -> tuple[int, ...] | None:
        """Rows that move from source to destination, ascending; None: the whole part; ``()``: nothing.

        Without routes this is None for every pair.
        """
        return None if self.routes is None else self._moves.get((source, destination), ())

    @cached_property
    def _moves(self) -> Mapping[tuple[int, int], tuple[int, ...] | None]:
        # Verbs ask for every pair of ranks at every use, and routes may be as many as those.
        rows: dict[tuple[int, int], list[int]] = {}
        for route in self.routes or ():
            rows.setdefault(route[:2], []).extend(route[2:])
        whole = {route for route in self.routes or () if len(route) == 2}
        return {pair: None if pair in whole else tuple(sorted(r)) for pair, r in rows.items()}

    @cached_property
    def highest_rank(self) -> int:
        """The highest rank that a route names; -1 without any."""
        return max((max(route[:2]) for route in self.routes or ()), default=-1)

    def sources(self, destination: int) -> tuple[int, ...]:
        """Ranks from which a route comes to a rank, ascending, itself among them if one says so."""
        return self._traffic[1].get(destination, _NO_TRAFFIC).peers

    def sends(self, source: int) -> tuple[int, int]:
        """Messages and payload bytes that the routes move from a rank to others."""
        return self._traffic[0].get(source, _NO_TRAFFIC).total

    def receives(self, destination: int) -> tuple[int, int]:
        """Messages and payload bytes that the routes move to a rank from others."""
        return self._traffic[1].get(destination, _NO_TRAFFIC).total

    @cached_property
    def _traffic(self) -> tuple[Mapping[int, _Traffic], Mapping[int, _Traffic]]:
        # Counted once: a verb would else look at every pair of ranks.
        out: dict[int, list[tuple[int, int]]] = {}
        back: dict[int, list[tuple[int, int]]] = {}
        for source, destination in self._moves:
            count = self.moved_bytes(source, destination)
            out.setdefault(source, []).append((destination, count))
            back.setdefault(destination, []).append((source, count))
        first, second = ({r: _traffic_of(r, x) for r, x in side.items()} for side in (out, back))
        return first, second

    def moved_bytes(self, source: int, destination: int) -> int:
        """Payload bytes that the routes move between two different ranks."""
        rows = self.rows(source, destination)
        return self.nbytes if rows is None else self.row_nbytes * len(rows)


class _Traffic(NamedTuple):
    """What the routes move on one side of a rank: with whom, and messages and bytes with others."""

    peers: tuple[int, ...]
    total: tuple[int, int]


_NO_TRAFFIC = _Traffic((), (0, 0))


def _traffic_of(rank: int, peers: Iterable[tuple[int, int]]) -> _Traffic:
    known = dict(peers)
    others = [count for peer, count in known.items() if peer != rank]
    return _Traffic(tuple(sorted(known)), (len(others), sum(others)))


@dataclass(frozen=True)
class Slot:
    """A named set of parts.

    A slot *is* its name: buffers, counters and flags belong to the name; parts and routes may
    change from one generation to the next, alike on all ranks.
    """

    name: str
    parts: tuple[PartSpec, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TransportError(f"a slot needs a non-empty name, got {self.name!r}")
        object.__setattr__(self, "parts", tuple(self.parts))
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise TransportError(f"slot {self.name!r}: part names repeat: {names}")

    def part(self, name: str) -> PartSpec:
        """Return the part of that name.

        Raises:
            RouteError: the slot has no such part.
        """
        for part in self.parts:
            if part.name == name:
                return part
        raise RouteError(
            f"slot {self.name!r} has no part {name!r}; it has {[part.name for part in self.parts]}"
        )


@dataclass(frozen=True)
class Capabilities:
    """What a transport can do beyond the verbs; optional things are flags, never methods that throw.

    Attributes:
        device_types: types of device whose tensors the verbs take.
        pairwise: ``fetch`` may precede ``publish`` (a handoff along a chain works).
        cuda_graph: verbs can be captured in a CUDA graph.
        shared_device: several ranks may share one device.
        cross_host: ranks may live on different hosts.
        in_place: ``fetch`` and ``gather`` may hand out peers' memory.
        host_staged: CUDA tensors pass through host memory and the verbs block the host.
        dense: a part that some rank sends to two or more others goes whole from every rank to every
            other, and is counted so.
        several_groups: a process may have transports on groups with different members at once; else
            the second group is refused.
    """

    device_types: tuple[str, ...] = ("cpu",)
    pairwise: bool = True
    cuda_graph: bool = False
    shared_device: bool = False
    cross_host: bool = False
    in_place: bool = False
    host_staged: bool = False
    dense: bool = False
    several_groups: bool = True


@dataclass(frozen=True)
class Selection:
    """Which backend was asked for, which one runs, and why the others do not.

    Attributes:
        requested: the name asked for (``"auto"`` when nothing was).
        source: ``"argument"``, ``"environment"`` or ``"default"``.
        chosen: name of the backend that runs.
        passed_over: ``(name, reason)`` for every candidate that was considered first.
    """

    requested: str
    source: str
    chosen: str
    passed_over: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class PartStats:
    """Payload bytes of one part name."""

    bytes_sent: int = 0
    bytes_received: int = 0


@dataclass(frozen=True)
class TransportStats:
    """What the verbs of one transport moved so far on this rank: payload only, a rank's own data never counts.

    Attributes:
        bytes_sent, bytes_received: payload bytes, integers.
        by_part: the same per part name.
        messages: payload messages sent plus received.
        waited_s: seconds the host spent waiting for peers.
    """

    bytes_sent: int = 0
    bytes_received: int = 0
    by_part: Mapping[str, PartStats] = field(default_factory=dict)
    messages: int = 0
    waited_s: float = 0.0


class Gathered:
    """The parts that one ``gather`` brought.

    ``gathered[part]`` is indexable by source rank: a dense ``[world_size, *shape]`` tensor, or a
    tuple with peers' tensors in place (None where nothing came). ``addresses[part]`` is an int64
    ``[world_size]`` tensor on the transport's device: where each source's (contiguous) part starts,
    0 where nothing came. Rows that no route moved hold unspecified values. This rank's own entry is
    its staged tensor.

    Ownership: valid until this rank's next ``stage`` of the slot.
    """

    #: Whether addresses lead to memory of other devices, across a link.
    linked: bool = False
    #: Parts all of whose addresses were seen to be multiples of 16.
    _aligned: frozenset[str] = frozenset()

    def __init__(
        self,
        parts: Mapping[str, Tensor | Sequence[Tensor | None]],
        device: torch.device,
        present: Mapping[str, Sequence[int]],
    ) -> None:
        self._parts = dict(parts)
        self._device = device
        self._present = {name: frozenset(sources) for name, sources in present.items()}
        self._addresses: dict[str, Tensor] = {}

    def __getitem__(self, part: str) -> Tensor | Sequence[Tensor | None]:
        return self._parts[part]

    def tensor(self, part: str, source: int) -> Tensor:
        """Return one source's part, shaped like its PartSpec.

        Raises:
            RouteError: that part of that source was not gathered.
        """
        if part not in self._parts or source not in self._present[part]:
            raise RouteError(f"part {part!r} of rank {source} was not gathered")
        value = self._parts[part][source]
        assert value is not None
        return value

    def sources(self, part: str) -> tuple[int, ...]:
        """Ranks whose part is present, ascending."""
        return tuple(sorted(self._present.get(part, ())))

    @property
    def addresses(self) -> Mapping[str, Tensor]:
        """Per part an int64 ``[world_size]`` device tensor of addresses."""
        for part, values in self._parts.items():
            if part not in self._addresses:
                table = [
                    values[source].data_ptr() if source in self._present[part] else 0  # type: ignore[union-attr]
                    for source in range(len(values))
                ]
                if not any(address % 16 for address in table):
                    self._aligned |= {part}
                self._addresses[part] = address_table(tuple(table), self._device)
        return self._addresses

    def aligned(self, part: str) -> bool:
        """Whether all of a part's addresses are known to be multiples of 16 bytes: kernels read as many at once."""
        return part in self.addresses and part in self._aligned


@runtime_checkable
class BoundaryTransport(Protocol):
    """What moves boundary state between the ranks of one group. See ``docs/contract.md`` for every clause."""

    name: str
    rank: int
    world_size: int
    device: torch.device
    capabilities: Capabilities
    selection: Selection

    def stage(self, slot: Slot) -> Mapping[str, Tensor]:
        """Open the slot's next generation and return the tensors that its parts are written into."""
        ...

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        """Release the staged parts to their destinations; at most once per generation."""
        ...

    def fetch(self, slot: Slot, part: str, *, source: int) -> Tensor:
        """Wait for one source's part of this generation and return it."""
        ...

    def gather(self, slot: Slot, *, parts: Mapping[str, Sequence[int]] | None = None) -> Gathered:
        """Wait for the parts of several sources; None: everything that comes to this rank."""
        ...

    def barrier(self) -> None:
        """Return (on CUDA: let the stream go on) only after every rank has arrived."""
        ...

    def stats(self) -> TransportStats:
        """Return what the verbs moved so far."""
        ...

    def check(self) -> None:
        """Raise what a device wait or a peer has reported."""
        ...

    def close(self) -> None:
        """Free everything; collective while all ranks live, local after a death; idempotent."""
        ...
