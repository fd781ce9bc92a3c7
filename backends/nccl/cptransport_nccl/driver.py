# SPDX-License-Identifier: Apache-2.0
"""The CUDA driver calls on streams that torch does not have."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

__all__ = ["fill", "write"]


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    driver.cuStreamWriteValue64_v2.argtypes = [pointer, number, number, ctypes.c_uint]
    driver.cuMemsetD8Async.argtypes = [number, ctypes.c_ubyte, ctypes.c_size_t, pointer]
    for call in (driver.cuStreamWriteValue64_v2, driver.cuMemsetD8Async):
        call.restype = ctypes.c_int
    return driver


def write(stream: int, address: int, value: int) -> None:
    """Write 8 bytes to pinned memory when the stream gets there."""
    _check(_driver().cuStreamWriteValue64_v2(stream, address, value, 0), "cuStreamWriteValue64")


def fill(stream: int, address: int, nbytes: int) -> None:
    """Set all bits of device memory when the stream gets there, which is NaN in every float type."""
    _check(_driver().cuMemsetD8Async(address, 0xFF, nbytes, stream), "cuMemsetD8Async")


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")
