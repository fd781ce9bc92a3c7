# SPDX-License-Identifier: Apache-2.0
"""Signs of life of ranks that connect: slow is not dead.

NCCL takes as long to connect as the machines need, and says nothing of a peer that ended meanwhile. So
every rank that connects says now and then that it does, and one that has said nothing for a while is
gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cptransport_nccl.notes import Notes

__all__ = ["Pulse"]

#: How often a rank says that it is there, and how long it must have said nothing to be gone.
_BEAT_S, _SILENT_S = 0.2, 1.0

_CONNECTED = "connected"


class Pulse:
    """Signs of life of the ranks that connect one communicator.

    Args:
        notes: what hosts tell each other.
        name: of the communicator, alike on all ranks.
        peers: the other ranks.
    """

    def __init__(self, notes: Notes, name: str, peers: Sequence[int]) -> None:
        self._notes = notes
        self._name = name
        self._peers = peers
        self._count = 0
        self._next = time.monotonic()
        #: Ranks that had said nothing for a while when ``listen`` last returned.
        self.silent: list[int] = []
        #: Whether this rank needs nothing more.
        self.over = False

    def beat(self) -> None:
        """Say that this rank is there, if it is time to."""
        if time.monotonic() >= self._next:
            self._count += 1
            self._notes.sign(self._name, str(self._count))
            self._next = time.monotonic() + _BEAT_S

    def connected(self) -> None:
        """Say that this rank needs nothing more."""
        self.over = True
        self._notes.sign(self._name, _CONNECTED)

    def listen(self, arrived: Callable[[float], bool]) -> list[int]:
        """Find out who is ``silent`` while waiting on; nobody is if what is waited for arrived."""
        self.silent = []
        before = self._notes.signs(self._name, self._peers)
        end = time.monotonic() + _SILENT_S
        while time.monotonic() < end:
            if arrived(_BEAT_S / 4):
                return []
        after = self._notes.signs(self._name, self._peers)
        self.silent = [
            rank
            for rank, old, new in zip(self._peers, before, after, strict=True)
            if old == new != _CONNECTED
        ]
        return self.silent
