# SPDX-License-Identifier: Apache-2.0
"""Warnings that point at the user's line, however deep inside the library they arise."""

from __future__ import annotations

import sys
import threading
import warnings

__all__ = ["warn", "warn_once"]

_PACKAGE = __name__.partition(".")[0]
_given: set[str] = set()
_lock = threading.Lock()


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the nearest caller that is not of this package."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def warn_once(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn likewise, once per process and text."""
    with _lock:
        if message in _given:
            return
        _given.add(message)
    warn(message, category)
