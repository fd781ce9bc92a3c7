# SPDX-License-Identifier: Apache-2.0
"""What hosts tell each other beside NCCL: who has asked for what, and who waits for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Notes"]


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
        self._store.set(f"waits/{work}/{self._rank}", "")

    def absent(self, work: str, peers: Sequence[int]) -> list[int]:
        """Return the peers that have not said that of the same work; all of them when all have."""
        left = [rank for rank in peers if not self._store.check([f"waits/{work}/{rank}"])]
        return left or list(peers)
