# SPDX-License-Identifier: Apache-2.0
"""One rank alone: a transport that replays what its peers once sent, so that local cost is measured without them.

Record what comes to a rank in a run of all ranks, then run that rank by itself, as often as wanted::

    results, recordings = record(step, 4)            # step(transport) on 4 ranks, in threads
    interior = RecordedTransport(recordings[2])
    step(interior)                                   # the bits that rank 2 got, and no waiting

The replaying run must issue the same verbs in the same order. It may do so again and again: a
slot's generation g replays its recorded generation ``(g - 1) mod n + 1``. Every buffer is made when
the transport is made and keeps its address, so verbs neither allocate nor touch the host, and a
CUDA graph may hold them. Counters count what the routes say, as with real peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from cptransport.base import Generation, TransportBase
from cptransport.control import ControlPlane
from cptransport.errors import TransportError
from cptransport.transport import (
    BoundaryTransport,
    Capabilities,
    Gathered,
    PartSpec,
    Slot,
    TransportStats,
)
from cptransport.transports import threads

__all__ = ["RecordedTransport", "Recording", "RecordingTransport", "record"]

T = TypeVar("T")

_CAPABILITIES = Capabilities(
    device_types=("cpu", "cuda"), cuda_graph=True, shared_device=True, in_place=True
)

Parts = dict[tuple[str, int], Tensor]  # (part, source) -> what came


@dataclass
class Recording:
    """What came to one rank.

    Attributes:
        rank, world_size: whose recording it is.
        generations: slot name -> its generations in order, each the slot as staged and what came of
            it, ``(part, source) -> tensor``. Rows that no route moved are unspecified.
    """

    rank: int
    world_size: int
    generations: dict[str, list[tuple[Slot, Parts]]] = field(default_factory=dict)

    def to(self, device: torch.device | str) -> Recording:
        """Return the recording with its tensors on a device."""
        moved = {
            name: [(slot, {key: t.to(device) for key, t in parts.items()}) for slot, parts in many]
            for name, many in self.generations.items()
        }
        return replace(self, generations=moved)


class RecordingTransport:
    """Pass every verb on to a transport, and keep copies of what it hands out.

    Args:
        transport: any; it stays the caller's to close.
    """

    def __init__(self, transport: BoundaryTransport) -> None:
        self._transport = transport
        self.name = transport.name
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.device = transport.device
        self.capabilities = transport.capabilities
        self.selection = transport.selection
        self.recording = Recording(transport.rank, transport.world_size)

    def __getattr__(self, name: str) -> Any:
        # What ops look for beyond the protocol: the control plane, strict, abandon.
        return getattr(self._transport, name)

    def stage(self, slot: Slot) -> Mapping[str, Tensor]:
        """Open a generation, also of the recording."""
        staged = self._transport.stage(slot)
        self.recording.generations.setdefault(slot.name, []).append((slot, {}))
        return staged

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        """Pass on."""
        self._transport.publish(slot, to=to)

    def fetch(self, slot: Slot, part: str, *, source: int) -> Tensor:
        """Fetch and keep a copy."""
        tensor = self._transport.fetch(slot, part, source=source)
        self._keep(slot, part, source, tensor)
        return tensor

    def gather(self, slot: Slot, *, parts: Mapping[str, Sequence[int]] | None = None) -> Gathered:
        """Gather and keep copies."""
        gathered = self._transport.gather(slot, parts=parts)
        for part in slot.parts:
            for source in gathered.sources(part.name):
                self._keep(slot, part.name, source, gathered.tensor(part.name, source))
        return gathered

    def barrier(self) -> None:
        """Pass on."""
        self._transport.barrier()

    def stats(self) -> TransportStats:
        """Pass on."""
        return self._transport.stats()

    def check(self) -> None:
        """Pass on."""
        self._transport.check()

    def close(self) -> None:
        """Pass on."""
        self._transport.close()

    def _keep(self, slot: Slot, part: str, source: int, tensor: Tensor) -> None:
        if source != self.rank:
            _, parts = self.recording.generations[slot.name][-1]
            parts[part, source] = tensor.detach().clone()


class _Alone(ControlPlane):
    """A control plane without peers: they never fail, and answer what this rank says."""

    def report(self, error: BaseException, *, fatal: bool) -> None:
        """Tell nobody."""

    def check(self) -> None:
        """Hear nothing."""

    def settle(self) -> None:
        """Wait for nobody."""

    def exchange(self, value: str, what: str) -> list[str]:
        """Return the value as everybody's."""
        return [value] * self.world_size

    def note(self, key: str, value: str) -> None:
        """Leave no note: there is nobody to read it."""

    def notes(self, key: str) -> list[str]:
        """Find nobody's note."""
        return [""] * self.world_size


class RecordedTransport(TransportBase):
    """Replay a recording as if all peers had published long ago; see the module docstring.

    Args:
        recording: from ``RecordingTransport`` or ``record``. It may be replayed by several
            transports at once; they read its tensors in place.
        device: where tensors live; None: where the recording's are.

    Raises:
        TransportError: ``stage`` of a slot that was not recorded or not with these parts; ``fetch``
            or ``gather`` of what was not taken when it was recorded.
    """

    def __init__(self, recording: Recording, device: torch.device | str | None = None) -> None:
        tensors = [
            tensor
            for many in recording.generations.values()
            for _, parts in many
            for tensor in parts.values()
        ]
        where = torch.device(device or (tensors[0].device if tensors else "cpu"))
        super().__init__(
            "recorded",
            device=where,
            control=_Alone(None, recording.rank, recording.world_size, 1.0),
            timeout_s=1.0,
            capabilities=_CAPABILITIES,
        )
        self._recorded = recording.to(where).generations
        self._buffers = {
            name: [_buffers(slot, where) for slot, _ in many]
            for name, many in self._recorded.items()
        }
        self._gathered: dict[tuple[Any, ...], Gathered] = {}  # by what was taken and when

    def _gather(
        self, current: Generation, names: Sequence[str], absent: Sequence[tuple[PartSpec, int]]
    ) -> Gathered:
        """Make the result of ``gather``; addresses never change, so it and its tables are made once."""
        have = tuple((part.name, source) for part, source in absent)
        key = (current.slot.name, self._index(current), tuple(names), have)
        found = self._gathered.get(key)
        if found is None:
            found = self._gathered[key] = super()._gather(current, names, absent)
        return found

    def _index(self, current: Generation) -> int:
        return (current.number - 1) % len(self._recorded[current.slot.name])

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        if current.slot.name not in self._recorded:
            raise TransportError(
                f"slot {current.slot.name!r} was not recorded; recorded: {sorted(self._recorded)}"
            )
        index = self._index(current)
        expected, _ = self._recorded[current.slot.name][index]
        if expected != current.slot:
            raise TransportError(
                f"{self._where(current)} has other parts than its recorded generation {index + 1}: "
                f"{current.slot.parts} against {expected.parts}"
            )
        return self._buffers[current.slot.name][index]

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        pass

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        _, parts = self._recorded[current.slot.name][self._index(current)]
        missing = [
            (part.name, source) for part, source in wanted if (part.name, source) not in parts
        ]
        if missing:
            raise TransportError(
                f"{self._where(current)}: (part, source) {missing} was not recorded"
            )
        return {(part.name, source): parts[part.name, source] for part, source in wanted}

    def _barrier(self) -> None:
        pass

    def _close(self, broken: bool) -> None:
        self._gathered.clear()
        self._buffers.clear()


def _buffers(slot: Slot, device: torch.device) -> dict[str, Tensor]:
    return {p.name: torch.zeros(p.shape, dtype=p.dtype, device=device) for p in slot.parts}


def record(
    fn: Callable[[BoundaryTransport], T], world_size: int, *, device: str = "cpu"
) -> tuple[list[T], list[Recording]]:
    """Run ``fn(transport)`` on ranks that are threads, and record what comes to each.

    Args:
        fn: as in ``threads.run``. With all ranks on one CUDA device it must use the explicit
            forward and backward of an op: autograd runs the backwards of a device one after the
            other, and they wait for each other.
        world_size: ranks.
        device: ``"cpu"``; ``"cuda"`` with one device per rank; ``"cuda:0"``: all ranks on that one.

    Returns:
        What ``fn`` returned and what was recorded, both by rank.
    """

    def step(transport: threads.ThreadTransport) -> tuple[T, Recording]:
        recorder = RecordingTransport(transport)
        return fn(recorder), recorder.recording

    if device != "cpu":
        # Threads that need CUDA's linear algebra for the first time at once make torch raise.
        torch.linalg.inv(torch.ones(1, 1, device=device))
    both = threads.run(step, world_size, device=device)
    return [result for result, _ in both], [recording for _, recording in both]
