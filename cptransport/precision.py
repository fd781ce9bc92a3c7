# SPDX-License-Identifier: Apache-2.0
"""IEEE matrix products, whatever the caller's process allows.

Boundary states compose over many segments, so TF32 and autocast must not enter them. The matmul
precision is a setting of the whole process and ranks may be threads of one process: the first that
enters changes it, the last that leaves restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

__all__ = ["ieee_math"]

_backends: Any = torch.backends
#: Since torch 2.9 each library has its own setting, and reading the old one raises when a user
#: mixes both.
_PER_LIBRARY = hasattr(_backends, "fp32_precision")

_lock = threading.Lock()
_users = 0
_before: tuple[str, ...] = ()


def _exchange_precision(values: tuple[str, ...]) -> tuple[str, ...]:
    """Set the precision of fp32 matmuls and return what it was."""
    if not _PER_LIBRARY:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(values[0])
        return (before,)
    libraries = (_backends.cuda.matmul, _backends.mkldnn.matmul)
    previous = tuple(library.fp32_precision for library in libraries)
    for library, value in zip(libraries, values, strict=True):
        library.fp32_precision = value
    return previous


@contextmanager
def ieee_math(device_type: str) -> Iterator[None]:
    """Switch autocast (of this thread) and reduced-precision fp32 matmuls (of the process) off.

    Args:
        device_type: the device type whose autocast is switched off.
    """
    global _users, _before
    with _lock:
        if _users == 0:
            _before = _exchange_precision(("ieee", "ieee") if _PER_LIBRARY else ("highest",))
        _users += 1
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                _exchange_precision(_before)
