# SPDX-License-Identifier: Apache-2.0
"""Who has asked for what was sent without routes; NCCL itself does not tell a sender."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Takes"]


class Takes:
    """Who has asked for what was sent without routes, told from host to host.

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
        self._store.set(f"{slot}/{source}/{self._rank}", str(generation))

    def missing(self, slot: str, generation: int) -> list[int]:
        """Return the destinations of a generation that have not asked for it yet."""
        waiting = self._expected.get((slot, generation), [])
        keys = {rank: f"{slot}/{self._rank}/{rank}" for rank in waiting}
        left = [
            rank
            for rank, key in keys.items()
            if not self._store.check([key]) or int(self._store.get(key)) < generation
        ]
        self._expected[slot, generation] = left
        if not left:
            self._expected.pop((slot, generation), None)
        return left
