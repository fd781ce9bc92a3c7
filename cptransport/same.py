# SPDX-License-Identifier: Apache-2.0
"""``Same``: a cache key that stands for one object, not for its value."""

from __future__ import annotations

from typing import Any

__all__ = ["Same"]


class Same:
    """Equal to another of the same object.

    For caches of what is made of long tuples that live as long as a plan: to hash them at every
    call of an op would show. The object must not change, and its key keeps it alive.

    Args:
        it: the object.
    """

    __slots__ = ("it",)

    def __init__(self, it: Any) -> None:
        self.it = it

    def __hash__(self) -> int:
        return id(self.it)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.it is other.it
