# SPDX-License-Identifier: Apache-2.0
"""How reports write values."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["byte_size", "command_line", "microseconds", "number", "plain"]


def command_line(argv: Sequence[str]) -> str:
    """Return the command line; a script is named by its file, `__main__.py` by its package."""
    if not argv:
        return ""
    script = Path(argv[0])
    name = f"python -m {script.parent.name}" if script.name == "__main__.py" else script.name
    return " ".join([name, *(shlex.quote(word) for word in argv[1:])])


def plain(value: Any) -> str:
    """Write a value of any scalar type."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def microseconds(value: float) -> str:
    """Write a time in microseconds."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def number(value: float | None) -> str:
    """Write a number with three digits, or nothing."""
    if value is None:
        return ""
    if isinstance(value, int) or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def byte_size(value: int | None) -> str:
    """Write a number of bytes, or nothing."""
    if value is None:
        return ""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value} B"
