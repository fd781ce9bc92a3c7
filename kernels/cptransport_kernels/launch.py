# SPDX-License-Identifier: Apache-2.0
"""Launching kernels: counted, since the launches of an op are a promise that tests hold it to, and
cheap for the host.

Triton's own launch binds arguments by name, asks what it may specialise on, and looks the kernel up,
for every argument of every call. ``Bound`` has a kernel with its compile-time arguments, and keeps
what Triton compiled by the few properties of run-time arguments that matter; it then calls the
compiled kernel, as ``CompiledKernel.__getitem__`` allows, with addresses in place of tensors.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver

__all__ = ["Bound", "bind", "count_launches", "interpreted", "launch", "on_gpu", "processors"]

_counters: list[Counter[str]] = []
#: The interpreter replaces parts of ``triton.language`` while it runs a kernel: one at a time.
_interpreter = Lock()


#: Triton decides when it decorates the kernels, so what the variable says later does not matter.
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter, on CPU tensors."""
    return _INTERPRETED


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of a GPU's multiprocessors; 1 where kernels are interpreted."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_gpu(tensor: Tensor) -> bool:
    """Return whether kernels on this tensor are compiled."""
    return tensor.is_cuda and not interpreted()


class Bound:
    """A kernel with its compile-time arguments; make it with ``bind``.

    Args:
        kernel: whose run-time parameters come before its compile-time ones.
        constants: all compile-time arguments, and ``num_warps`` and ``num_stages``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.name = kernel.fn.__name__
        self.constants = constants
        self._tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        # The interpreter specialises nothing.
        flags = [getattr(p, "do_not_specialize", True) for p in getattr(kernel, "params", ())]
        self._specialised = frozenset(i for i, plain in enumerate(flags) if not plain)
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any) -> None:
        """Launch on the current stream; a grid with a zero launches nothing."""
        if 0 in grid:
            return
        for counter in _counters:
            counter[self.name] += 1
        if _INTERPRETED:
            with _interpreter:
                self.kernel[grid](*args, **self.constants)
            return
        active = driver.active
        device = active.get_current_device()
        values, kinds = self._split(args)
        key = (device, *kinds)
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self.kernel[grid](*args, **self.constants)
            return
        stream = active.get_current_stream(device)
        compiled[(*grid, 1, 1)[:3]](*values, *self._tail, stream=stream)

    def _split(self, args: tuple[Any, ...]) -> tuple[list[Any], list[Any]]:
        """Return what is passed for each argument, and what Triton would specialise on, or finer."""
        values: list[Any] = []
        kinds: list[Any] = []
        for index, value in enumerate(args):
            if isinstance(value, Tensor):
                address = value.data_ptr()
                # An address saves the driver's look-up; host memory needs it.
                values.append(address if value.is_cuda else value)
                kinds.append(value.dtype if address % 16 == 0 else (value.dtype, address % 16))
                continue
            values.append(value)
            if value.__class__ is not int:
                kinds.append(value.__class__)
            elif index in self._specialised:
                kinds.append((value.bit_length() // 32, value == 1, value % 16 == 0))
            else:
                kinds.append(value.bit_length() // 32)
        return values, kinds


_bound: dict[tuple[Any, ...], Bound] = {}


def bind(kernel: Any, **constants: Any) -> Bound:
    """Return a kernel with its compile-time arguments; the same object for the same arguments."""
    key = (kernel.fn, *constants.items())
    found = _bound.get(key)
    if found is None:
        found = _bound.setdefault(key, Bound(kernel, constants))
    return found


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch ``kernel`` on the current stream; a grid with a zero launches nothing."""
    bind(kernel, **meta)(grid, *args)


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
