# SPDX-License-Identifier: Apache-2.0
"""What a communication stream does beside NCCL's work."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from cptransport.backend import address_table

__all__ = ["void", "write"]


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    driver.cuStreamWriteValue64_v2.argtypes = [pointer, number, number, ctypes.c_uint]
    driver.cuStreamWriteValue64_v2.restype = ctypes.c_int
    return driver


def write(stream: int, address: int, value: int) -> None:
    """Write 8 bytes to pinned memory when the stream gets there."""
    _check(_driver().cuStreamWriteValue64_v2(stream, address, value, 0), "cuStreamWriteValue64")


def void(stream: torch.cuda.Stream, ended: Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Make NaN of received memory if what should have filled it was ended; after that on the stream.

    Args:
        stream: that it was on.
        ended: pinned int64 ``[1]``, not 0 once it was.
        spans: (address, bytes) of the memory.
    """
    from cptransport_kernels.void import void as launch

    addresses, sizes = zip(*spans, strict=True)
    with torch.cuda.stream(stream):
        launch(ended, address_table((*addresses, *sizes), stream.device))


def _check(code: int, what: str) -> None:
    if code:
        raise RuntimeError(f"{what} failed with CUDA error {code}")
