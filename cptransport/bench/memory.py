# SPDX-License-Identifier: Apache-2.0
"""How much memory one call adds at its peak."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["describe", "peak_bytes"]

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def describe(device: torch.device) -> str:
    """Say what ``peak_bytes`` measures there."""
    if device.type == "cuda":
        return "peak of the caching allocator during one iteration, above what was held before it"
    return "peak resident memory of the process during one iteration, above that before it"


def peak_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Run a call and return the peak of memory above what was held before; None where it cannot be known.

    Args:
        call: run once; its result is dropped before this returns.
        device: on CPU the resident memory of the process counts (Linux only).
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        torch.cuda.synchronize()
        return int(torch.cuda.max_memory_allocated() - before)
    if not _start_over():
        call()
        return None
    held = _kibibytes("VmRSS")
    call()
    return max(0, _kibibytes("VmHWM") - held) * 1024


def _start_over() -> bool:
    """Return freed memory to the system, so that its reuse counts, and forget the old peak."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        _RESET.write_text("5", encoding="ascii")
    except (OSError, AttributeError):
        return False
    return True


def _kibibytes(field: str) -> int:
    found = re.search(rf"^{field}:\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    return int(found.group(1)) if found else 0
