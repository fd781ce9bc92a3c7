# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang for ever, given up after a while; those of a group's store do when its host is stopped."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["BackgroundCall", "LimitedCalls"]

_EXIT_S = 1.0  # how long the end of the process waits for an answer that was given up

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """A call that begins at once, on a thread of its own.

    Args:
        call: what to call.
        name: of the thread.
    """

    def __init__(self, call: Callable[[], T], name: str) -> None:
        self._call = call
        self._answers: list[T] = []
        self._errors: list[Exception] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._call())
        except Exception as error:  # raised by ``answer``
            self._errors.append(error)

    def ended(self, seconds: float) -> bool:
        """Wait for so long; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def answer(self) -> T:
        """Return what it returned, or raise what it raised; when it has ended."""
        if self._errors:
            raise self._errors[0]
        return self._answers[0]

    def give_up(self) -> None:
        """Have the end of the process wait for it a while: one that ended in the midst of that would abort it."""
        atexit.register(self._thread.join, _EXIT_S)


class LimitedCalls:
    """Calls of one thing, each on a thread of its own, one at a time.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: BackgroundCall[Any] | None = None

    def __call__(
        self, call: Callable[[], T], limit_s: float, *, patience_s: float = 0.0
    ) -> tuple[T, ...]:
        """Return what the call returned, alone in a tuple; empty: no answer came.

        Args:
            call: goes on when its limit has passed.
            limit_s: how long to wait for it.
            patience_s: how long to wait first for one before it that had no answer yet; without
                one, this call is not made.

        Raises:
            Exception: what the call raised.
        """
        if self._last is not None and not self._last.ended(patience_s):
            return ()
        self._last = this = BackgroundCall(call, self._name)
        if this.ended(limit_s):
            return (this.answer(),)
        this.give_up()
        return ()
