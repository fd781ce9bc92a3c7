# SPDX-License-Identifier: Apache-2.0
"""Launching kernels, counted: how many launches an op costs is a promise that tests hold it to."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

from torch import Tensor

__all__ = ["count_launches", "interpreted", "launch", "on_gpu"]

_counters: list[Counter[str]] = []
#: The interpreter replaces parts of ``triton.language`` while it runs a kernel: one at a time.
_interpreter = Lock()


#: Triton decides when it decorates the kernels, so what the variable says later does not matter.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return _INTERPRETED


def on_gpu(tensor: Tensor) -> bool:
    """Return whether kernels on this tensor are compiled."""
    return tensor.is_cuda and not interpreted()


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch ``kernel`` on the current stream; a grid with a zero launches nothing."""
    if 0 in grid:
        return
    for counter in _counters:
        counter[kernel.fn.__name__] += 1
    with _interpreter if _INTERPRETED else nullcontext():
        kernel[grid](*args, **meta)


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Count launches of this package's kernels, by kernel name, while the context is open (one
    thread)."""
    counter: Counter[str] = Counter()
    _counters.append(counter)
    try:
        yield counter
    finally:
        # By identity: nested counters can be equal.
        _counters[:] = [c for c in _counters if c is not counter]
