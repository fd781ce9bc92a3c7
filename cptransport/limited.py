# SPDX-License-Identifier: Apache-2.0
"""Calls that may hang for ever, given up after a while; those of a group's store do when its host is stopped."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["LimitedCalls"]

_EXIT_S = 1.0  # how long the end of the process waits for an answer that was given up

T = TypeVar("T")


class LimitedCalls:
    """Calls of one thing, each on a thread of its own, one at a time.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._last: threading.Thread | None = None

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
        answers: list[T] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                answers.append(call())
            except Exception as error:  # raised below
                errors.append(error)

        last = self._last
        if last is not None:
            last.join(patience_s)
            if last.is_alive():
                return ()
        thread = threading.Thread(target=run, name=self._name, daemon=True)
        thread.start()
        self._last = thread  # started: another thread may join it at once
        thread.join(limit_s)
        if thread.is_alive():  # an answer that comes while the interpreter ends would abort it
            atexit.register(thread.join, _EXIT_S)
            return ()
        if errors:
            raise errors[0]
        return (answers[0],)
