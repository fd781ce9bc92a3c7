# SPDX-License-Identifier: Apache-2.0
"""Launching kernels: counted, since the launches of an op are a promise that tests hold it to, and
cheap for the host.

Triton's own launch binds arguments by name, asks what it may specialise on, and looks the kernel up,
for every argument of every call. ``Bound`` has a kernel with its compile-time arguments, and keeps
what Triton compiled by the few properties of run-time arguments that matter; it then calls the
compiled kernel, as ``CompiledKernel.__getitem__`` allows, with addresses in place of tensors.

What is read of each argument is most of what remains, tens of arguments for each of an op's launches.
So it is read by an expression that has them all by name, made once for the classes of the arguments,
and no loop in Python runs over them.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from math import gcd, hypot
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


_Values = tuple[Any, ...]
_Reader = Callable[..., tuple[_Values, ...]]


def _reader(classes: tuple[type, ...], specialised: frozenset[int]) -> _Reader:
    """Make a function that reads arguments of these classes.

    Args:
        classes: of all run-time arguments.
        specialised: positions of those whose value Triton may specialise on.

    Returns:
        A function of the arguments. It returns five tuples: the addresses of tensors, what is passed
        for all arguments, the dtypes of tensors, the specialised ints, and the other ints.
    """
    names = [f"x{i}" for i in range(len(classes))]
    tensors = [x for x, kind in zip(names, classes, strict=True) if issubclass(kind, Tensor)]
    ints = [i for i, kind in enumerate(classes) if kind is int]
    tuples: tuple[Iterable[str], ...] = (
        (f"at_{x} := {x}.data_ptr()" for x in tensors),
        # An address saves the driver's look-up; host memory needs it.
        (f"at_{x} if {x}.is_cuda else {x}" if x in tensors else x for x in names),
        (f"{x}.dtype" for x in tensors),
        (names[i] for i in ints if i in specialised),
        (names[i] for i in ints if i not in specialised),
    )
    parts = ("(" + "".join(f"({item}), " for item in items) + ")" for items in tuples)
    # The source depends on positions only.
    return eval(f"lambda {', '.join(names)}: ({', '.join(parts)})")


def _width(value: int) -> int:
    """Return 0, 1 or 2 for what Triton takes for an int32, an int64 or a uint64."""
    return (value if value >= 0 else ~value).bit_length() // 32


@lru_cache(maxsize=1024)
def _specialise(values: tuple[int, ...]) -> bytes:
    """Return what Triton specialises ints on, a byte each. They are strides mostly, and come again."""
    return bytes(_width(x) << 2 | (x == 1) << 1 | (x % 16 == 0) for x in values)


class Bound:
    """A kernel with its compile-time arguments; make it with ``bind``.

    Args:
        kernel: whose run-time parameters come before its compile-time ones.
        constants: all compile-time arguments, and Triton's options of a launch, as ``num_warps``.
    """

    def __init__(self, kernel: Any, constants: dict[str, Any]) -> None:
        self.kernel = kernel
        self.name = kernel.fn.__name__
        self.constants = constants
        self._tail = tuple(constants[name] for name in kernel.arg_names if name in constants)
        # The interpreter specialises nothing.
        flags = [getattr(p, "do_not_specialize", True) for p in getattr(kernel, "params", ())]
        self._specialised = frozenset(i for i, plain in enumerate(flags) if not plain)
        self._readers: dict[tuple[type, ...], _Reader] = {}
        self._compiled: dict[_Values, Any] = {}

    def __call__(self, grid: tuple[int, ...], *args: Any, stream: int | None = None) -> None:
        """Launch; a grid with a zero launches nothing.

        Args:
            grid, args: of the launch.
            stream: handle of a stream of the current device; None: the current stream. Making one
                current for a launch costs the host as much as the launch.
        """
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
            with _current(stream):
                self._compiled[key] = self.kernel[grid](*args, **self.constants)
            return
        if stream is None:
            stream = active.get_current_stream(device)
        compiled[(*grid, 1, 1)[:3]](*(values + self._tail), stream=stream)

    def _split(self, args: _Values) -> tuple[_Values, _Values]:
        """Return what is passed for each argument, and what Triton would specialise on, or finer.

        The latter takes few values however sizes and steps vary: launches are kept by it for ever.
        """
        classes = tuple(map(type, args))
        read = self._readers.get(classes)
        if read is None:
            # One for all threads: it stands for the classes.
            read = self._readers.setdefault(classes, _reader(classes, self._specialised))
        addresses, values, dtypes, specialised, others = read(*args)
        kinds = (
            read,
            dtypes,
            gcd(*addresses) % 16 == 0 or tuple(x % 16 == 0 for x in addresses),
            _specialise(specialised),
            # Their root of squares bounds them all, and its rounding stays far from 2**31.
            hypot(*others) < 2**30 or tuple(map(_width, others)),
        )
        return values, kinds


def _current(stream: int | None) -> AbstractContextManager[object]:
    """Make a stream the current one; None: leave that as it is."""
    return nullcontext() if stream is None else torch.cuda.stream(torch.cuda.ExternalStream(stream))


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
