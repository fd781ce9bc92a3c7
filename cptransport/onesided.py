# SPDX-License-Identifier: Apache-2.0
"""``OneSidedTransport``: a transport over memory that peers can address, with signals on the device.

A backend brings the memory (``PeerMemory``); this class brings the protocol. Producers write into
their own region, peers read it in place. Two ways to order that, both from
``cptransport_kernels.signals``:

* *pairwise* (default): ``publish`` raises a flag at every destination, takers wait for the flags of
  their sources, and ``stage`` tells everyone what this rank no longer reads. ``stage`` waits until
  every destination of the last generation in the same buffer has said so.
* *barrier*: ``publish`` is one barrier of all ranks. No acknowledgement is needed: a rank passes
  the barrier of g-1 only after every peer has staged g-1 and thereby released g-2, whose buffer g
  reuses. With one buffer that would not hold. A generation that was not published has its barrier at
  the next ``stage``. Only messages that must be taken (parts without routes) are acknowledged, as
  above.

A slot has one region per rank, alike on all, cut into four buffers: two for eager generations, in
turn, two for generations inside captured graphs, whose addresses are fixed. Which one comes next
follows from no generation's number: the host counts a generation when it is captured, the device
when it is replayed. The first generation of a graph may follow one that used the same buffer (a
graph with an odd number of stages, replayed), so it waits for *all* ranks to have released g-1; the
second one, whose buffer was used no later than that, for nobody; those after it as eager ones do.
Regions grow at ``stage``, collectively; that synchronises the host, and cannot happen inside a capture.

``fetch`` copies out of the peer's memory; ``gather`` leaves parts in place and writes the table of
addresses on the device; its ``tensor`` copies on demand. Nothing here waits on the host but growth
and ``close``. A thread looks for peers' records meanwhile, so that a wait for a rank that failed ends
before its deadline.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from operator import or_

import torch
from torch import Tensor

from cptransport.base import Generation, TransportBase
from cptransport.control import ControlPlane
from cptransport.cuda_driver import capture_id
from cptransport.errors import (
    GenerationError,
    PeerFailedError,
    TransportError,
    TransportTimeoutError,
)
from cptransport.in_place import InPlace
from cptransport.peer_memory import PeerMemory, PeerRegion, byte_spans, layout, view
from cptransport.peer_watch import PeerWatch
from cptransport.signal_kernels import load_kernels
from cptransport.transport import Capabilities, Gathered, PartSpec, Slot

__all__ = ["MAX_RANKS", "OneSidedTransport"]

#: Ranks are bits of one 64-bit mask.
MAX_RANKS = 64
#: Cells of the tables; the first is no slot's.
_SLOTS = 256
_BARRIER_SLOT = 1
_FIRST_SLOT = 2
#: Buffers of eager generations, and as many of captured ones.
_DEPTH = 2

#: What a kernel may still write to after its transport broke.
_kept: list[Tensor] = []


@dataclass
class _Turns:
    """Generations that take two buffers in turn, eager or captured ones."""

    first: int  # buffer
    taken: int = 0
    capture: int = 0  # number of the one that the last ones were in, one after the other
    awaited: tuple[int, ...] = ()  # of the last two of these: ranks that must release them, as bits

    def take(self, capture: int, others: int) -> tuple[int, int, int]:
        """Return the next buffer, and how many generations ago the given ranks must have released it."""
        buffer = self.first + self.taken % _DEPTH
        self.taken += 1
        if capture != self.capture:
            self.capture, self.awaited = capture, ()
            depth, waits = 1, others
        else:
            depth, waits = _DEPTH, self.awaited[0] if len(self.awaited) == _DEPTH else 0
        self.awaited = (*self.awaited[-1:], 0)
        return buffer, depth, waits

    def awaits(self, ranks: int) -> None:
        """Say who must release the last one before its buffer is used again."""
        self.awaited = (*self.awaited[:-1], ranks)


@dataclass
class _SlotState:
    """A slot's place in the tables and its memory."""

    index: int
    capacity: int = 0  # bytes of one buffer
    region: PeerRegion | None = None
    regions: Tensor | None = None  # int64 [N]: every rank's region
    aligned: bool = False  # all of them, and so all parts, to 16 bytes
    eager: _Turns = field(default_factory=lambda: _Turns(0))
    captured: _Turns = field(default_factory=lambda: _Turns(_DEPTH))
    last: _Turns = field(default_factory=lambda: _Turns(0))  # one of these
    placed: dict[str, int] = field(default_factory=dict)  # part -> offset of this generation


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
        self._provider = memory
        self._by_barrier = barrier
        self._timeout_ns = int(timeout_s * 1e9)
        self._states: dict[str, _SlotState] = {}
        self._everyone = (1 << self.world_size) - 1
        self._others = self._everyone & ~(1 << self.rank)
        self._received_memory: dict[tuple[str, str, int, str], Tensor] = {}
        # What captured graphs know the addresses of, whatever has grown since.
        self._captured_regions: list[PeerRegion] = []
        self._captured_memory: list[Tensor] = []
        self._error = torch.zeros(5, dtype=torch.int64).pin_memory()
        self._error_view = (ctypes.c_int64 * 5).from_address(self._error.data_ptr())
        self._watch = PeerWatch(
            control, partial(_waits, self._error), partial(_give_up, self._error)
        )
        weakref.finalize(self, self._watch.end)
        self._counters = torch.zeros(_SLOTS, dtype=torch.int64, device=device)
        self._nans = torch.empty(0, dtype=torch.uint8, device=device)
        self._board_region = memory.allocate(8 * signals.board_numel(_SLOTS, self.world_size))
        self._board = self._board_region.local.view(torch.int64)
        self._board.zero_()
        self._boards = self._on_device(self._board_region)
        with torch.cuda.device(device):
            tables = self._counters, self._board, self._boards, self._error
            load_kernels(signals, tables, _BARRIER_SLOT, self.rank)
        torch.cuda.synchronize(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
        gpus = control.exchange(gpu, f"{name}: boards are cleared")
        self._linked = len({*gpus}) > 1
        self._first_use()

    def _first_use(self) -> None:
        """Exchange a token: peers' memory is what it is taken for, or the transport is not made."""
        slot = Slot("cptransport.first-use", (PartSpec("token", (8,), torch.uint8),))
        with torch.no_grad():
            self.stage(slot)["token"].fill_(self.rank)
        self.publish(slot)
        tokens = [self.fetch(slot, "token", source=rank) for rank in range(self.world_size)]
        self.barrier()
        torch.cuda.synchronize(self.device)
        error = self._reported()
        if error is None:
            wrong = [rank for rank, token in enumerate(tokens) if not token.eq(rank).all()]
            if wrong:
                error = TransportError(f"the memory of ranks {wrong} does not hold what they wrote")
        texts = self.control.exchange(str(error or ""), f"{self.name}: first use")
        failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text]
        if failed:  # on all ranks as what breaks a transport: some may still wait
            raise PeerFailedError("; ".join(failed)) from error
        self.control.staged = False
        del self._generations[slot.name]
        self._sent.clear()
        self._arrived.clear()
        self._messages = 0

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        slot = current.slot
        state = self._state(slot.name)
        offsets, total = layout(slot)
        capture = capture_id(self.device)
        if state.region is None or total > state.capacity:
            if capture:
                raise TransportError(
                    f"slot {slot.name!r} must be staged once with these shapes before it is captured"
                )
            self._grow(state, slot, total)
        if not capture:
            state.captured.capture = 0  # whatever is captured next begins anew
        turns = state.captured if capture else state.eager
        precedes = turns is state.last and turns.capture == capture
        if self._by_barrier and precedes and retired is not None and retired.to is None:
            self._meet(state.index, self._step(retired), count=False)
        state.last = turns
        buffer, depth, waits = turns.take(capture, self._others)
        self._signals.stage(
            self._counters,
            self._board,
            self._boards,
            self._error,
            slot=state.index,
            rank=self.rank,
            releases=self._released(retired, capture > 0),
            waits=waits,
            depth=depth,
            timeout_ns=self._timeout_ns,
        )
        base = buffer * state.capacity
        state.placed = {name: base + offset for name, offset in offsets.items()}
        assert state.region is not None
        return {
            part.name: view(state.region.local, state.placed[part.name], part)
            for part in slot.parts
        }

    def _released(self, retired: Generation | None, capturing: bool) -> int:
        """Ranks to tell that this one no longer reads its last generation, as bits."""
        if retired is None or capturing:  # a graph's replays follow anything
            return self._others
        free = [part.name for part in retired.slot.parts if part.routes is None]
        if self._by_barrier and not free:
            return 0
        untaken = 0  # whose message this rank could have taken and did not
        for source in range(self.world_size):
            if any((name, source) not in retired.taken for name in free):
                untaken |= 1 << source
        return self._others & ~untaken

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        state = self._state(current.slot.name)
        targets, owing = 0, 0
        for part in current.slot.parts:
            for rank in range(self.world_size):
                if self._moves(part, self.rank, rank, to):
                    targets |= 1 << rank
                    owing |= 1 << rank if part.routes is None else 0
        state.last.awaits(owing if self._by_barrier else targets)
        if self._by_barrier:
            self._meet(state.index, self._step(current), count=False)
        elif targets:
            self._signals.publish(
                self._counters,
                self._boards,
                slot=state.index,
                rank=self.rank,
                targets=targets,
                step=self._step(current),
            )

    def _barrier(self) -> None:
        self._meet(_BARRIER_SLOT, 0, count=True)

    def _meet(self, index: int, step: int, *, count: bool) -> None:
        self._signals.barrier(
            self._counters,
            self._board,
            self._boards,
            self._error,
            slot=index,
            rank=self.rank,
            everyone=self._everyone,
            step=step,
            timeout_ns=self._timeout_ns,
            count=count,
        )

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        return {
            (part.name, source): self._copy_out(current, part, source) for part, source in wanted
        }

    def _copy_out(self, current: Generation, part: PartSpec, source: int) -> Tensor:
        """Copy what the routes move of a source's part into memory of this rank."""
        state = self._state(current.slot.name)
        target = self._received_buffer(current, part, source)
        line = target.reshape(-1).view(torch.uint8)
        assert state.regions is not None
        for start, nbytes in byte_spans(part, part.rows(source, self.rank)):
            self._signals.fetch(
                self._counters,
                self._board,
                state.regions,
                self._error,
                line[start : start + nbytes],
                slot=state.index,
                source=source,
                offset=state.placed[part.name] + start,
                step=self._step(current),
                timeout_ns=self._timeout_ns,
            )
        return target

    def _gather(
        self, current: Generation, names: Sequence[str], absent: Sequence[tuple[PartSpec, int]]
    ) -> Gathered:
        state = self._state(current.slot.name)
        sources = {name: [s for part, s in absent if part.name == name] for name in names}
        waited_for = reduce(or_, (1 << source for _, source in absent), 0)
        table = torch.empty(
            (len(names), self._boards.numel()), dtype=torch.int64, device=self.device
        )
        assert state.regions is not None
        most = self._signals.TABLE_PARTS
        for first in range(0, len(names), most):
            some = names[first : first + most]
            self._signals.locate(
                self._counters,
                self._board,
                state.regions,
                self._error,
                table[first : first + len(some)],
                slot=state.index,
                sources=waited_for,
                offsets=[state.placed[name] for name in some],
                present=[
                    reduce(or_, (1 << s for s in sources[name]), 1 << self.rank) for name in some
                ],
                nan_address=self._nans.data_ptr(),
                step=self._step(current),
                timeout_ns=self._timeout_ns,
            )
        return InPlace(
            {name: [self.rank, *sources[name]] for name in names},
            {name: table[i, : self.world_size] for i, name in enumerate(names)},
            partial(self._gathered_tensor, current),
            aligned=state.aligned,
            linked=self._linked,
        )

    def _gathered_tensor(self, current: Generation, part: str, source: int) -> Tensor:
        """Return one part of what ``gather`` brought, a peer's copied here."""
        if source == self.rank:
            return current.staged[part]
        spec = current.slot.part(part)
        if (part, source) in current.received:
            return current.received[part, source]
        if self._generations.get(current.slot.name) is not current:
            raise GenerationError(
                self._where(current) + ": what was gathered is gone since the next stage"
            )
        with self._verb():
            self._obtain(current, [(spec, source)])
            return current.received[part, source]

    def _step(self, current: Generation) -> int:
        return current.step % (1 << self._signals.STEP_BITS)

    def _reported(self) -> BaseException | None:
        code, index, generation, *_ = self._error_view
        if code == 0:
            return None
        try:
            self.control.check()  # a peer that left a record says more than a missing flag
        except PeerFailedError as error:
            return error
        peer = abs(code) - 1
        name = next((n for n, state in self._states.items() if state.index == index), None)
        place = f"slot {name!r}, generation {generation}" if name is not None else "barrier"
        if code < 0:
            return TransportError(
                f"rank {self.rank}: {place}: rank {peer} published it in another op step than this rank takes "
                "it in: some rank left a forward or a backward out (see join_backward)"
            )
        return TransportTimeoutError(
            f"rank {self.rank}: {place}: waited {self.timeout_s:g} s on the device for rank {peer}",
            peer=peer,
            slot=name,
            generation=generation if name is not None else None,
            waited_s=self.timeout_s,
            missing=[peer],
        )

    def _interrupt(self) -> None:
        _give_up(self._error)

    def _drain(self) -> None:
        torch.cuda.synchronize(self.device)  # our waits end

    def _close(self, broken: bool) -> None:
        self._watch.stop()
        try:
            if not broken:
                self.control.exchange("", f"{self.name}: closing")
                regions = [state.region for state in self._states.values()]
                for region in (*regions, *self._captured_regions, self._board_region):
                    if region is not None:
                        self._provider.free(region)
        except (PeerFailedError, TransportTimeoutError):
            broken = True
        finally:
            if broken:
                _kept.append(self._error)
            self._provider.close(broken)
            self._states.clear()
            self._received_memory.clear()
            self._captured_memory.clear()

    def _state(self, name: str) -> _SlotState:
        if name not in self._states:
            index = _FIRST_SLOT + len(self._states)
            if index >= _SLOTS:
                raise TransportError(f"more than {_SLOTS - _FIRST_SLOT} slots on one transport")
            self._states[name] = _SlotState(index)
        return self._states[name]

    def _grow(self, state: _SlotState, slot: Slot, total: int) -> None:
        """Give a slot a larger region, on all ranks."""
        torch.cuda.synchronize(self.device)
        self.control.exchange("", f"{self.name}: growing slot {slot.name!r}")
        old, state.region, state.capacity = state.region, None, 0
        if old is not None and state.captured.taken:
            assert state.regions is not None
            self._captured_regions.append(old)
            self._captured_memory.append(state.regions)
        elif old is not None:
            self._provider.free(old)
        region = self._provider.allocate(2 * _DEPTH * total)
        state.region, state.capacity, state.regions = region, total, self._on_device(region)
        state.aligned = not any(address % 16 for address in region.addresses)
        if total > self._nans.numel():
            self._captured_memory.append(self._nans)
            self._nans = torch.full((total,), 0xFF, dtype=torch.uint8, device=self.device)
        torch.cuda.synchronize(self.device)
        self.control.exchange("", f"{self.name}: slot {slot.name!r} has grown")

    def _on_device(self, region: PeerRegion) -> Tensor:
        """Addresses of a region on the device, one lane per rank; lanes of no rank hold this rank's."""
        lanes = self._signals.lanes(self.world_size)
        own = region.addresses[self.rank]
        table = [*region.addresses, *[own] * (lanes - self.world_size)]
        return torch.tensor(table, dtype=torch.int64).to(self.device)

    def _received_buffer(self, current: Generation, part: PartSpec, source: int) -> Tensor:
        capturing = torch.cuda.is_current_stream_capturing()
        kind = "captured" if capturing else "odd" if current.number % 2 else "even"
        key = (current.slot.name, part.name, source, kind)
        memory = self._received_memory.get(key)
        if memory is None or memory.numel() < part.nbytes:
            if memory is not None and capturing:
                self._captured_memory.append(memory)
            elif memory is not None:
                still_used(memory)
            memory = torch.empty(part.nbytes, dtype=torch.uint8, device=self.device)
            self._received_memory[key] = memory
        return view(memory, 0, part)


def _waits(error: Tensor) -> bool:
    """Whether a kernel has waited since this was last asked."""
    word = ctypes.c_int64.from_address(error.data_ptr() + 32)
    found, word.value = bool(word.value), 0
    return found


def _give_up(error: Tensor) -> None:
    """Tell kernels to wait no longer."""
    ctypes.c_int64.from_address(error.data_ptr() + 24).value = 1


def still_used(memory: Tensor) -> None:
    """Keep memory that may be freed soon until the current stream has done its work so far."""
    memory.record_stream(torch.cuda.current_stream(memory.device))
