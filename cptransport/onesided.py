# SPDX-License-Identifier: Apache-2.0
"""``OneSidedTransport``: a transport over memory that peers can address, with signals on the device.

A backend brings the memory (``PeerMemory``); this class brings the protocol. Producers write into
their own region, peers read it in place. Two ways to order that, both from
``cptransport_kernels.signals``:

* *pairwise* (default): ``publish`` raises a flag at every destination, takers wait for the flags of
  their sources, and ``stage`` tells everyone what this rank no longer reads. ``stage`` of g waits
  until every destination of g-2 has said so.
* *barrier*: ``publish`` is one barrier of all ranks. No acknowledgement is needed: a rank passes
  the barrier of g-1 only after every peer has staged g-1 and thereby released g-2, whose buffer g
  reuses. With one buffer that would not hold.

A slot has one region per rank, alike on all, cut into four buffers: two for eager generations
(g mod 2), two for generations inside captured graphs, whose addresses are fixed. A captured
generation may follow one that used the same buffer (a graph with an odd number of stages,
replayed), so it waits for *all* ranks to have released g-1. Regions grow at ``stage``,
collectively; that synchronises the host, and cannot happen inside a capture.

``fetch`` copies out of the peer's memory; ``gather`` leaves parts in place and writes the table of
addresses on the device; its ``tensor`` copies on demand. Nothing here waits on the host but growth
and ``close``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from cptransport.base import Generation, TransportBase
from cptransport.control import ControlPlane
from cptransport.errors import (
    PeerFailedError,
    RouteError,
    TransportError,
    TransportTimeoutError,
)
from cptransport.transport import Capabilities, Gathered, PartSpec, Slot

__all__ = ["MAX_RANKS", "OneSidedTransport", "PeerMemory", "PeerRegion"]

#: Ranks are bits of one 64-bit mask.
MAX_RANKS = 64
_SLOTS = 256
_BARRIER_SLOT = 0
_BUFFERS = 4
_ALIGNMENT = 256
_TABLE_PARTS = 4


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


@dataclass
class _SlotState:
    """A slot's place in the tables and its memory."""

    index: int
    capacity: int = 0  # bytes of one buffer
    region: PeerRegion | None = None
    regions: Tensor | None = None  # int64 [N]: every rank's region
    captured: int = 0  # stages inside captures so far
    placed: dict[str, int] = field(default_factory=dict)  # part -> offset of this generation
    targets: tuple[int, int] = (0, 0)  # ranks published to in the last two generations, as bits


class OneSidedTransport(TransportBase):
    """One rank's end; see the module docstring.

    Args:
        memory: the provider.
        barrier: order by barriers rather than pairwise flags.
        others: as ``TransportBase``.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device,
        control: ControlPlane,
        timeout_s: float,
        capabilities: Capabilities,
        memory: PeerMemory,
        barrier: bool = False,
    ) -> None:
        super().__init__(
            name, device=device, control=control, timeout_s=timeout_s, capabilities=capabilities
        )
        from cptransport_kernels import signals

        self._signals = signals
        self._memory_provider = memory
        self._by_barrier = barrier
        self._timeout_ns = int(timeout_s * 1e9)
        self._states: dict[str, _SlotState] = {}
        self._everyone = (1 << self.world_size) - 1
        self._others = self._everyone & ~(1 << self.rank)
        self._received_memory: dict[tuple[str, str, int, str], Tensor] = {}
        self._error = torch.zeros(3, dtype=torch.int64).pin_memory()
        self._error_view = (ctypes.c_int64 * 3).from_address(self._error.data_ptr())
        self._counters = torch.zeros(_SLOTS, dtype=torch.int64, device=device)
        self._nans: list[Tensor] = []  # all kept: captured graphs know their addresses
        self._board_region = memory.allocate(8 * signals.board_numel(_SLOTS, self.world_size))
        self._board = self._board_region.local.view(torch.int64)
        self._board.zero_()
        torch.cuda.synchronize(device)
        control.exchange("", f"{name}: boards are cleared")
        self._boards = self._on_device(self._board_region)
        self._first_use()

    def _first_use(self) -> None:
        """Compile and load the kernels now: later another kernel may occupy the device."""
        slot = Slot("cptransport.first-use", (PartSpec("token", (8,), torch.uint8),))
        self.stage(slot)
        self.publish(slot)
        for source in range(self.world_size):
            self.fetch(slot, "token", source=source)
        self.stage(slot)
        self.publish(slot)
        self.gather(slot)
        self.barrier()
        torch.cuda.synchronize(self.device)
        error = self._reported()
        if error is not None:
            raise error
        self.control.staged = False
        del self._generations[slot.name]
        self._sent.clear()
        self._arrived.clear()
        self._messages = 0

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        slot = current.slot
        state = self._state(slot.name)
        offsets, total = _layout(slot)
        capturing = torch.cuda.is_current_stream_capturing()
        if state.region is None or total > state.capacity:
            if capturing:
                raise TransportError(
                    f"slot {slot.name!r} must be staged once with these shapes before it is captured"
                )
            self._grow(state, slot, total)
        if capturing:
            buffer, depth, waits = 2 + state.captured % 2, 1, self._others
            state.captured += 1
        else:
            buffer, depth, waits = current.number % 2, 2, state.targets[0]
        releases = self._others
        if self._by_barrier and not capturing:
            releases = waits = 0
        elif retired is not None:
            releases &= ~self._untaken(retired)
        state.targets = (state.targets[1], 0)
        self._signals.stage(
            self._counters,
            self._board,
            self._boards,
            self._error,
            slot=state.index,
            rank=self.rank,
            releases=releases,
            waits=waits,
            depth=depth,
            timeout_ns=self._timeout_ns,
        )
        base = buffer * state.capacity
        state.placed = {name: base + offset for name, offset in offsets.items()}
        assert state.region is not None
        return {
            part.name: _view(state.region.local, state.placed[part.name], part)
            for part in slot.parts
        }

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        state = self._state(current.slot.name)
        targets = 0
        for part in current.slot.parts:
            for rank in range(self.world_size):
                if self._moves(part, self.rank, rank, to):
                    targets |= 1 << rank
        state.targets = (state.targets[0], targets)
        if self._by_barrier:
            self._signals.barrier(
                self._counters,
                self._board,
                self._boards,
                self._error,
                slot=state.index,
                rank=self.rank,
                everyone=self._everyone,
                timeout_ns=self._timeout_ns,
                count=False,
            )
        elif targets:
            self._signals.publish(
                self._counters, self._boards, slot=state.index, rank=self.rank, targets=targets
            )

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        return {
            (part.name, source): self._copy_out(current, part, source) for part, source in wanted
        }

    def _gather(
        self, current: Generation, names: Sequence[str], absent: Sequence[tuple[PartSpec, int]]
    ) -> Gathered:
        state = self._state(current.slot.name)
        present = {
            name: sum(1 << source for part, source in absent if part.name == name) for name in names
        }
        sources = 0
        for mask in present.values():
            sources |= mask
        table = torch.empty(
            (len(names), self._boards.numel()), dtype=torch.int64, device=self.device
        )
        assert state.regions is not None
        for first in range(0, len(names), _TABLE_PARTS):
            some = names[first : first + _TABLE_PARTS]
            self._signals.locate(
                self._counters,
                self._board,
                state.regions,
                self._error,
                table[first : first + len(some)],
                slot=state.index,
                sources=sources,
                offsets=[state.placed[name] for name in some],
                present=[present[name] | 1 << self.rank for name in some],
                nan_address=self._nans[-1].data_ptr(),
                timeout_ns=self._timeout_ns,
            )
        return _InPlace(self, current, names, absent, table)

    def _copy_out(self, current: Generation, part: PartSpec, source: int) -> Tensor:
        """Copy what the routes move of a source's part into memory of this rank."""
        state = self._state(current.slot.name)
        offset = state.placed[part.name]
        target = self._received_buffer(current, part, source)
        rows = part.rows(source, self.rank)
        spans = [(0, part.nbytes)] if rows is None else _byte_spans(part, rows)
        line = target.reshape(-1).view(torch.uint8)
        assert state.regions is not None
        for start, nbytes in spans or [(0, 0)]:
            self._signals.fetch(
                self._counters,
                self._board,
                state.regions,
                self._error,
                line[start : start + nbytes],
                slot=state.index,
                source=source,
                offset=offset + start,
                timeout_ns=self._timeout_ns,
            )
        return target

    def _barrier(self) -> None:
        self._signals.barrier(
            self._counters,
            self._board,
            self._boards,
            self._error,
            slot=_BARRIER_SLOT,
            rank=self.rank,
            everyone=self._everyone,
            timeout_ns=self._timeout_ns,
            count=True,
        )

    def _reported(self) -> BaseException | None:
        word, index, generation = self._error_view
        if word == 0:
            return None
        try:
            self.control.check()  # a peer that left a record says more than a missing flag
        except PeerFailedError as error:
            return error
        peer = word - 1
        names = {state.index: name for name, state in self._states.items()}
        place = (
            "barrier"
            if index == _BARRIER_SLOT
            else f"slot {names.get(index)!r}, generation {generation}"
        )
        return TransportTimeoutError(
            f"rank {self.rank}: {place}: waited {self.timeout_s:g} s on the device for rank {peer}",
            peer=peer,
            slot=names.get(index),
            generation=generation,
            waited_s=self.timeout_s,
            missing=[peer],
        )

    def _close(self, broken: bool) -> None:
        try:
            if not broken:
                torch.cuda.synchronize(self.device)
                self.control.exchange("", f"{self.name}: closing")
                for state in self._states.values():
                    if state.region is not None:
                        self._memory_provider.free(state.region)
                self._memory_provider.free(self._board_region)
        except (PeerFailedError, TransportTimeoutError):
            broken = True
        finally:
            self._memory_provider.close(broken)
            self._states.clear()
            self._received_memory.clear()

    def _state(self, name: str) -> _SlotState:
        if name not in self._states:
            if len(self._states) + 1 >= _SLOTS:
                raise TransportError(f"more than {_SLOTS - 1} slots on one transport")
            self._states[name] = _SlotState(index=1 + len(self._states))
        return self._states[name]

    def _untaken(self, retired: Generation) -> int:
        """Ranks whose message, in parts without routes, this rank could have taken and did not."""
        free = [part.name for part in retired.slot.parts if part.routes is None]
        missing = 0
        for source in range(self.world_size):
            taken = [name for name in free if (name, source) in retired.taken]
            if free and source != self.rank and len(taken) < len(free):
                missing |= 1 << source
        return missing

    def _grow(self, state: _SlotState, slot: Slot, total: int) -> None:
        """Give a slot a larger region, on all ranks."""
        torch.cuda.synchronize(self.device)
        self.control.exchange("", f"{self.name}: growing slot {slot.name!r}")
        if state.region is not None:
            self._memory_provider.free(state.region)
        state.capacity = total
        state.region = self._memory_provider.allocate(_BUFFERS * total)
        state.regions = self._on_device(state.region)
        if not self._nans or total > self._nans[-1].numel():
            self._nans.append(torch.full((total,), 0xFF, dtype=torch.uint8, device=self.device))
        torch.cuda.synchronize(self.device)
        self.control.exchange("", f"{self.name}: slot {slot.name!r} has grown")

    def _on_device(self, region: PeerRegion) -> Tensor:
        """Addresses of a region on the device, one lane per rank; lanes of no rank hold this rank's."""
        lanes = self._signals.lanes(self.world_size)
        own = region.addresses[self.rank]
        table = [*region.addresses, *[own] * (lanes - self.world_size)]
        return torch.tensor(table, dtype=torch.int64).to(self.device)

    def _received_buffer(self, current: Generation, part: PartSpec, source: int) -> Tensor:
        kind = (
            "captured"
            if torch.cuda.is_current_stream_capturing()
            else "even"
            if current.number % 2 == 0
            else "odd"
        )
        key = (current.slot.name, part.name, source, kind)
        memory = self._received_memory.get(key)
        if memory is None or memory.numel() < part.nbytes:
            memory = torch.empty(part.nbytes, dtype=torch.uint8, device=self.device)
            self._received_memory[key] = memory
        return _view(memory, 0, part)


class _InPlace(Gathered):
    """Parts that stay where their owners wrote them; ``tensor`` copies one out when asked."""

    def __init__(
        self,
        transport: OneSidedTransport,
        current: Generation,
        names: Sequence[str],
        absent: Sequence[tuple[PartSpec, int]],
        table: Tensor,
    ) -> None:
        own = transport.rank
        present = {
            name: [own, *(source for part, source in absent if part.name == name)] for name in names
        }
        super().__init__({}, transport.device, present)
        self._transport = transport
        self._current = current
        self._table = {name: table[i, : transport.world_size] for i, name in enumerate(names)}

    def __getitem__(self, part: str) -> Sequence[Tensor | None]:
        return tuple(
            self.tensor(part, source) if source in self._present[part] else None
            for source in range(self._transport.world_size)
        )

    def tensor(self, part: str, source: int) -> Tensor:
        """See ``Gathered.tensor``; the first call per source copies it to this rank."""
        if source not in self._present.get(part, ()):
            raise RouteError(f"part {part!r} of rank {source} was not gathered")
        if source == self._transport.rank:
            return self._current.staged[part]
        spec = self._current.slot.part(part)
        return self._transport._obtain(self._current, [(spec, source)])[part, source]

    @property
    def addresses(self) -> Mapping[str, Tensor]:
        """Per part an int64 ``[world_size]`` device tensor, written on the device."""
        return self._table


def _layout(slot: Slot) -> tuple[dict[str, int], int]:
    """Offsets of a slot's parts in one buffer, and the buffer's bytes."""
    offsets, total = {}, 0
    for part in slot.parts:
        offsets[part.name] = total
        total += -(-max(part.nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
    return offsets, max(total, _ALIGNMENT)


def _view(memory: Tensor, offset: int, part: PartSpec) -> Tensor:
    return memory[offset : offset + part.nbytes].view(part.dtype).view(part.shape)


def _byte_spans(part: PartSpec, rows: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending rows as runs of bytes ``(start, count)``."""
    spans: list[tuple[int, int]] = []
    for row in rows:
        start = row * part.row_nbytes
        if spans and sum(spans[-1]) == start:
            spans[-1] = (spans[-1][0], spans[-1][1] + part.row_nbytes)
        else:
            spans.append((start, part.row_nbytes))
    return spans
