# SPDX-License-Identifier: Apache-2.0
"""What hosts tell each other beside NCCL: who has asked for what, who waits for what, what each has sent,
who is there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cptransport.backend import LimitedCalls

__all__ = ["Notes"]

#: How long a call from the watchdog's thread may last: its own clock must go on.
_LIMIT_S = 0.3

T = TypeVar("T")


class Notes:
    """Short notes from host to host, through the group's store.

    Args:
        store: a ``torch.distributed`` store that exactly the transport's ranks share.
        rank: this rank.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._expected: dict[tuple[str, int], list[int]] = {}
        self._calls = LimitedCalls("cpt-nccl-notes")

    def expect(self, slot: str, generation: int, destinations: Sequence[int]) -> None:
        """Remember whom a generation went to."""
        self._expected[slot, generation] = list(destinations)

    def took(self, slot: str, generation: int, source: int) -> None:
        """Say that this rank has asked for a source's parts."""
        self._store.set(f"took/{slot}/{source}/{self._rank}", str(generation))

    def untaken(self, slot: str, generation: int) -> list[int]:
        """Return the destinations of a generation that have not asked for it yet."""
        waiting = self._expected.get((slot, generation), [])
        keys = {rank: f"took/{slot}/{self._rank}/{rank}" for rank in waiting}
        left = [
            rank
            for rank, key in keys.items()
            if not self._store.check([key]) or int(self._store.get(key)) < generation
        ]
        self._expected[slot, generation] = left
        if not left:
            self._expected.pop((slot, generation), None)
        return left

    def waits(self, work: str) -> None:
        """Say that this rank has come to a piece of work and waits for others there."""
        self._limited(lambda: self._store.set(f"waits/{work}/{self._rank}", ""), None)

    def absent(self, work: str, peers: Sequence[int]) -> list[int]:
        """Return the peers that have not said that of the same work; none where no answer came."""

        def look() -> list[int]:
            return [rank for rank in peers if not self._store.check([f"waits/{work}/{rank}"])]

        return self._limited(look, [])

    def sign(self, what: str, text: str) -> None:
        """Give a sign of life, in place of the one before."""
        self._limited(lambda: self._store.set(f"sign/{what}/{self._rank}", text), None)

    def signs(self, what: str, ranks: Sequence[int]) -> list[str]:
        """Return the last sign of each rank; empty where none or no answer."""
        return self._read([f"sign/{what}/{rank}" for rank in ranks])

    def tell_order(self, text: str) -> None:
        """Say what this rank has sent so far, in place of what it said before."""
        self._limited(lambda: self._store.set(f"order/{self._rank}", text), None)

    def orders(self, world_size: int) -> list[str]:
        """Return what every rank last said of that, by rank; empty where nothing or no answer."""
        return self._read([f"order/{rank}" for rank in range(world_size)])

    def _read(self, keys: Sequence[str]) -> list[str]:
        def look() -> list[str]:
            store = self._store
            return [store.get(key).decode() if store.check([key]) else "" for key in keys]

        return self._limited(look, [""] * len(keys))

    def _limited(self, call: Callable[[], T], otherwise: T) -> T:
        """Call the store; give up at the limit, which another thread's call before it may have once more."""
        with contextlib.suppress(RuntimeError):  # the store is gone; the control plane says so
            return next(iter(self._calls(call, _LIMIT_S, patience_s=_LIMIT_S)), otherwise)
        return otherwise
