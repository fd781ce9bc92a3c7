# SPDX-License-Identifier: Apache-2.0
"""Signs of life of ranks that connect: slow is not dead.

NCCL takes as long to connect as the machines need, and says nothing of a peer that ended meanwhile. So
every rank that connects says now and then that it does, and one that has said nothing for a while is
gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from cptransport.errors import TransportTimeoutError
from cptransport_nccl.notes import Notes

__all__ = ["CONNECT_S", "Pulse"]

#: How long connecting may take at least, whatever the limit of waits for a peer's data is: NCCL starts
#: threads, searches the topology and pins memory, which takes seconds where processes share a GPU.
CONNECT_S = 30.0

#: How often a rank says that it is there, and how long it must have said nothing to be gone.
_BEAT_S, _SILENT_S = 0.2, 1.0

_CONNECTED = "connected"


class Pulse:
    """Signs of life of the ranks that connect one communicator.

    Args:
        notes: what hosts tell each other.
        name: of the communicator, alike on all ranks.
        peers: the other ranks.
        wait: waits on the host with a deadline, as ``TransportBase._wait``.
    """

    def __init__(
        self, notes: Notes, name: str, peers: Sequence[int], wait: Callable[..., None]
    ) -> None:
        self._notes = notes
        self._name = name
        self._peers = peers
        self._host_wait = wait
        self._count = 0
        self._next = time.monotonic()
        #: Ranks that had said nothing for a while when they were last listened to.
        self._silent: list[int] = []

    def wait(self, arrived: Callable[[float], bool], what: str) -> None:
        """Wait for the peers to connect: as long as the limit, and up to ``CONNECT_S`` while all are there."""

        def beating(seconds: float) -> bool:
            self._beat()
            return arrived(seconds)

        def missing() -> list[int]:
            return self._listen(beating) or list(self._peers)

        start = time.monotonic()
        while True:
            try:
                self._host_wait(beating, what, missing=missing)
                return
            except TransportTimeoutError:
                if self._silent or time.monotonic() - start > CONNECT_S:
                    raise

    def _beat(self) -> None:
        """Say that this rank is there, if it is time to."""
        if time.monotonic() >= self._next:
            self._count += 1
            self._notes.sign(self._name, str(self._count))
            self._next = time.monotonic() + _BEAT_S

    def connected(self) -> None:
        """Say that this rank needs nothing more."""
        self._notes.sign(self._name, _CONNECTED)

    def _listen(self, arrived: Callable[[float], bool]) -> list[int]:
        """Find out who is silent while waiting on; nobody is if what is waited for arrived."""
        self._silent = []
        before = self._notes.signs(self._name, self._peers)
        end = time.monotonic() + _SILENT_S
        while time.monotonic() < end:
            if arrived(_BEAT_S / 4):
                return []
        after = self._notes.signs(self._name, self._peers)
        self._silent = [
            rank
            for rank, old, new in zip(self._peers, before, after, strict=True)
            if old == new != _CONNECTED
        ]
        return self._silent
