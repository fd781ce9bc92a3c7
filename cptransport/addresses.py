# SPDX-License-Identifier: Apache-2.0
"""Tables of addresses on the device, for kernels that read peers' memory; also made while a graph is captured."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["address_table"]

#: ``CU_STREAM_CAPTURE_MODE_RELAXED`` of the CUDA driver API.
_RELAXED = 2
#: What captured graphs read, for as long as the process lives: nobody knows when the last one ends.
_captured: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def address_table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return addresses as an int64 ``[len(addresses)]`` tensor on a device.

    Buffers come in pairs, so the same few tables return for ever, and each is uploaded once. Inside
    a capture a new one is uploaded at once, outside the graph, and stays.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        key = (addresses, device)
        if key not in _captured:
            with _outside_capture(device):
                _captured[key] = _upload(addresses, device)
        return _captured[key]
    return _cached(addresses, device)


@lru_cache(maxsize=1024)
def _cached(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return _upload(addresses, device)


def _upload(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(addresses, dtype=torch.int64).to(device)


@contextmanager
def _outside_capture(device: torch.device) -> Iterator[None]:
    """Run on a stream that captures nothing; this thread may then allocate, copy and wait."""
    mode = ctypes.c_int(_RELAXED)
    _exchange(mode)
    try:
        with torch.cuda.stream(torch.cuda.Stream(device)):
            yield
    finally:
        _exchange(mode)


def _exchange(mode: ctypes.c_int) -> None:
    """Set this thread's capture mode; ``mode`` then holds the one before."""
    code = _driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    if code:
        raise RuntimeError(f"cuThreadExchangeStreamCaptureMode failed with CUDA error {code}")


@lru_cache(maxsize=1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")
