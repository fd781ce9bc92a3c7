# SPDX-License-Identifier: Apache-2.0
"""Notices that ranks used slots in different orders, which NCCL itself does not.

Messages of two ranks on one communicator match in the order in which each end issues them, whatever
they are. The rule is therefore: what two ranks have to say to each other through slots with routes,
both issue in one order (one program on all ranks does). A rank that breaks it, by leaving a backward
out, say, would be given another slot's bytes without a word. So every rank keeps, per peer and
direction, how many messages it issued and a checksum of which ones; the ranks compare these through
the group's store now and then, and once more when they close.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections import deque
from collections.abc import Iterable, Sequence

__all__ = ["Order"]

_REMEMBERED = 4096
_TOLD = 16


class _Line:
    """Messages issued in one direction between this rank and a peer."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: deque[int] = deque([0], maxlen=_REMEMBERED)  # after the last messages

    def add(self, what: bytes) -> None:
        self._sums.append(zlib.crc32(what, self._sums[-1]))
        self._count += 1

    def told(self) -> list[int]:
        """Return the count, and the sums after the last messages, newest first."""
        newest = range(1, min(_TOLD, len(self._sums)) + 1)
        return [self._count, *(self._sums[-i] for i in newest)]

    def contradicts(self, told: Sequence[int]) -> bool:
        """Whether the other end issued other messages; False where the two know no common point."""
        count, *sums = told
        for number, theirs in enumerate(sums):
            back = self._count - (count - number)
            if 0 <= back < len(self._sums):
                return self._sums[-1 - back] != theirs
        return False


class Order:
    """What this rank has issued to and from every peer.

    Args:
        rank, world_size: of the transport.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._sent = [_Line() for _ in range(world_size)]
        self._received = [_Line() for _ in range(world_size)]
        self._lock = threading.Lock()  # a watchdog's thread compares

    def issued(self, slot: str, step: int, to: Iterable[int], of: Iterable[int]) -> None:
        """Note one group: sends to some ranks, receives of others.

        Args:
            slot: its name.
            step: op call that staged the generation, alike on all ranks.
            to, of: ranks.
        """
        what = f"{slot}/{step}".encode()
        with self._lock:
            for peer in to:
                self._sent[peer].add(what)
            for peer in of:
                self._received[peer].add(what)

    def text(self) -> str:
        """Return what this rank has issued, for its peers."""
        with self._lock:
            lines = zip(self._sent, self._received, strict=True)
            return json.dumps([[sent.told(), received.told()] for sent, received in lines])

    def strays(self, texts: Iterable[str]) -> list[int]:
        """Return the peers whose messages are not those that this rank issued with them.

        Args:
            texts: of all ranks, by rank; empty where not known.
        """
        found = []
        for peer, text in enumerate(texts):
            if text and peer != self._rank:
                sent, received = json.loads(text)[self._rank]
                with self._lock:
                    if self._received[peer].contradicts(sent) or self._sent[peer].contradicts(
                        received
                    ):
                        found.append(peer)
        return found
