# SPDX-License-Identifier: Apache-2.0
"""``posix_shm``: every rank writes into memory that all ranks of the host map, and readers look at it in place.

Files in /dev/shm, named alike by all ranks, since all stage the same slots in the same order::

    TOKEN.barrier              int64 [world_size]       barriers that each rank has entered
    TOKEN.SLOT.RANK            int64 [5 + 2 world_size] flags, written by that rank alone:
        0                      generation that it staged last; this also releases the one before
        1 + g % 2              g, once published
        3 + g % 2              bit mask of the destinations of g's parts without routes
        5 + 2 source + g % 2   g * 2**20 + parts without routes that it took from that source
    TOKEN.SLOT.RANK.g%2.SIZE   its staged parts

A flag is written after what it announces. x86-64 keeps stores in order, and loads too, so a reader
that sees the flag sees the payload; another machine would need fences. Whoever maps flags first
creates them (all zero: nothing happened yet); parts are created by their owner alone, before it
publishes.
"""

from __future__ import annotations

import atexit
import glob
import os
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.backend import ControlPlane, Generation, TransportBase, group_store
from cptransport.errors import BackendUnavailableError, PeerFailedError
from cptransport.transport import PartSpec, Slot
from cptransport_posix_shm import BACKEND

_ALIGN = 64
_PARTS = 1 << 20  # more parts than any slot has


class SharedMemoryTransport(TransportBase):
    """One rank's end; see the module docstring.

    Args:
        token: common start of all file names.
        control: the control plane.
        timeout_s: limit of every wait.
    """

    def __init__(self, token: str, control: ControlPlane, timeout_s: float) -> None:
        super().__init__(
            BACKEND.name,
            device=torch.device("cpu"),
            control=control,
            timeout_s=timeout_s,
            capabilities=BACKEND.capabilities,
        )
        self._token = token
        self._unlink = partial(_unlink, token)
        atexit.register(self._unlink)  # for a transport that was not closed
        self._maps: dict[str, Tensor] = {}
        self._slots: dict[str, int] = {}
        self._sizes: dict[tuple[str, int], int] = {}  # (slot, g % 2) -> bytes, alike on all ranks
        self._published: dict[tuple[str, int], tuple[Slot, Sequence[int]]] = {}
        self._arrivals = self._numbers("barrier", self.world_size)

    # ---------------------------------------------------------------------------------------- hooks

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        slot, number = current.slot, current.number
        self._slots.setdefault(slot.name, len(self._slots))
        self._flags(slot, self.rank)[0] = number
        self._await_release(current)
        return {part.name: self._part(slot, number, part, self.rank) for part in slot.parts}

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        flags, number = self._flags(current.slot, self.rank), current.number
        self._published[current.slot.name, number] = current.slot, to
        flags[3 + number % 2] = sum(1 << rank for rank in to)
        flags[1 + number % 2] = number

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        slot, number = current.slot, current.number
        mine = self._flags(slot, self.rank)
        received = {}
        for part, source in wanted:
            theirs = self._flags(slot, source)

            def arrived(part: PartSpec = part, theirs: Tensor = theirs) -> bool:
                if theirs[1 + number % 2] != number:
                    return False
                return part.routes is not None or bool(theirs[3 + number % 2] >> self.rank & 1)

            self._wait(
                _until(arrived),
                f"part {part.name!r} did not come",
                current=current,
                missing=lambda source=source: [source],
            )
            received[part.name, source] = self._part(slot, number, part, source)
            if part.routes is None:
                taken = mine[5 + 2 * source + number % 2 :]
                taken[0] = max(int(taken[0]), number * _PARTS) + 1
        return received

    def _barrier(self) -> None:
        self._arrivals[self.rank] += 1
        mine = int(self._arrivals[self.rank])

        def missing() -> list[int]:
            return [rank for rank, count in enumerate(self._arrivals.tolist()) if count < mine]

        self._wait(_until(lambda: not missing()), "barrier", missing=missing)

    def _close(self, broken: bool) -> None:
        try:
            if not broken:
                self._barrier()  # a peer may still read what was published
        except PeerFailedError:
            pass  # it reads no more
        finally:
            self._unlink()  # mappings live as long as their tensors
            atexit.unregister(self._unlink)
            self._maps.clear()

    # ------------------------------------------------------------------------------------ internals

    def _await_release(self, current: Generation) -> None:
        """Wait until every destination of g-2 has taken it and staged g-1, then size the buffer of g."""
        slot, number = current.slot, current.number
        published = self._published.pop((slot.name, number - 2), None)

        def holders() -> list[int]:
            old, to = published or (slot, ())
            held = []
            for rank in range(self.world_size):
                parts = [part for part in old.parts if self._moves(part, self.rank, rank, to)]
                due = (number - 2) * _PARTS + sum(part.routes is None for part in parts)
                flags = self._flags(slot, rank)
                taken = int(flags[5 + 2 * self.rank + number % 2])
                untaken = due % _PARTS and taken < due
                if parts and (untaken or flags[0] < number - 1):
                    held.append(rank)
            return held

        if published:
            what = f"generation {number - 2} was not released"
            self._wait(_until(lambda: not holders()), what, current=current, missing=holders)
        size = sum(_aligned(part.nbytes) for part in slot.parts)
        small = self._sizes.get((slot.name, number % 2), 0)
        if size > small:
            self._sizes[slot.name, number % 2] = size
            with suppress(FileNotFoundError):  # nobody needs the smaller one any more
                os.unlink(self._path(slot, self.rank, number, small))

    def _part(self, slot: Slot, number: int, part: PartSpec, rank: int) -> Tensor:
        """A rank's staged part of a generation, in shared memory."""
        if not part.nbytes:
            return torch.empty(part.shape, dtype=part.dtype)
        size = self._sizes[slot.name, number % 2]
        name = f"{self._slots[slot.name]}.{rank}.{number % 2}"
        memory = self._maps.get(name)
        if memory is None or memory.numel() < size:
            path = self._path(slot, rank, number, size)
            try:
                file = os.open(path, os.O_RDWR | (os.O_CREAT if rank == self.rank else 0), 0o600)
            except FileNotFoundError as error:
                self.control.check()  # who left, and why, is on record more often than not
                raise PeerFailedError(
                    f"rank {rank} left and took its memory along", peer=rank
                ) from error
            # The open file, not its name: a name could by now stand for nothing, and would be made
            # anew.
            memory = torch.from_file(
                f"/proc/self/fd/{file}", shared=True, size=size, dtype=torch.uint8
            )
            os.close(file)
            self._maps[name] = memory
        before = slot.parts[: slot.parts.index(part)]
        start = sum(_aligned(other.nbytes) for other in before)
        return memory[start : start + part.nbytes].view(part.dtype).view(part.shape)

    def _path(self, slot: Slot, rank: int, number: int, size: int) -> str:
        return f"/dev/shm/{self._token}.{self._slots[slot.name]}.{rank}.{number % 2}.{size}"

    def _flags(self, slot: Slot, rank: int) -> Tensor:
        return self._numbers(f"{self._slots[slot.name]}.{rank}", 5 + 2 * self.world_size)

    def _numbers(self, name: str, count: int) -> Tensor:
        """Map a file of int64, making it if need be."""
        if name not in self._maps:
            path = f"/dev/shm/{self._token}.{name}"
            self._maps[name] = torch.from_file(path, shared=True, size=count, dtype=torch.int64)
        return self._maps[name]


def _unlink(token: str) -> None:
    """Remove all files of a transport, those of ranks that died too."""
    for path in glob.glob(f"/dev/shm/{token}.*"):
        with suppress(FileNotFoundError):
            os.unlink(path)


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _until(condition: Callable[[], bool]) -> Callable[[float], bool]:
    """Make of a condition what ``TransportBase._wait`` takes: wait so many seconds, say whether it holds."""

    def arrived(seconds: float) -> bool:
        end, pause = time.monotonic() + seconds, 0.0
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(pause)  # at first only lets others run
            pause = min(pause + 2e-5, 1e-3)
        return True

    return arrived


def create(group: Any, timeout_s: float) -> SharedMemoryTransport:
    """Make this rank's transport.

    Raises:
        BackendUnavailableError: the ranks are on different hosts; on all ranks alike.

    Collective: over the group.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    control = ControlPlane(group_store(group, "posix_shm"), rank, world_size, timeout_s)
    token = f"cpt-{uuid.uuid4().hex}"
    mine = f"{socket.gethostname()} {token}"
    hosts, tokens = zip(
        *(text.split() for text in control.exchange(mine, "posix_shm")), strict=True
    )
    if world_size > 62:
        raise BackendUnavailableError("posix_shm serves up to 62 ranks: a mask must fit into int64")
    if len(set(hosts)) > 1:
        raise BackendUnavailableError(
            f"posix_shm serves one host; the ranks are on {sorted(set(hosts))}"
        )
    return SharedMemoryTransport(tokens[0], control, timeout_s)
