# SPDX-License-Identifier: Apache-2.0
"""What transports need of CUDA and torch has no name for, most of it the driver's."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch

__all__ = [
    "allocation_start",
    "capture_id",
    "exclusive_stream",
    "relaxed_capture",
    "release_stream",
    "with_index",
    "write_value",
]

_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1

#: Streams of earlier owners, by device.
_idle: defaultdict[torch.device, list[torch.cuda.Stream]] = defaultdict(list)


@lru_cache(maxsize=1)
def _library() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    pointer, uint, uint64, size = ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_size_t
    library.cuStreamCreate.argtypes = [ctypes.POINTER(pointer), uint]
    library.cuStreamWriteValue64_v2.argtypes = [pointer, uint64, uint64, uint]
    library.cuMemGetAddressRange_v2.argtypes = [
        ctypes.POINTER(uint64),
        ctypes.POINTER(size),
        uint64,
    ]
    library.cuStreamGetCaptureInfo_v2.argtypes = [
        pointer,
        ctypes.POINTER(ctypes.c_int),
        ctypes.POINTER(uint64),
        *[pointer] * 3,
    ]
    library.cuThreadExchangeStreamCaptureMode.argtypes = [ctypes.POINTER(ctypes.c_int)]
    return library


def _call(name: str, *args: Any) -> None:
    code = getattr(_library(), name)(*args)
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")


def with_index(device: torch.device) -> torch.device:
    """Return a device with its index: that of the current one where a CUDA device has none."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def exclusive_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream that nobody else has.

    torch hands the same 32 streams out over and over, so on one of those another's kernel may be
    waiting, or a capture under way. It does not wait for the legacy default stream, nor that for it.

    Args:
        device: with an index.
    """
    with suppress(IndexError):
        return _idle[device].pop()
    handle = ctypes.c_void_p()
    with torch.cuda.device(device):
        torch.cuda.current_stream(device)  # then there is a context
        _call("cuStreamCreate", ctypes.byref(handle), _STREAM_NON_BLOCKING)
    assert handle.value is not None
    return torch.cuda.ExternalStream(handle.value, device=device)


def release_stream(stream: torch.cuda.Stream) -> None:
    """Let another owner have a stream; one that still has work, or has failed, is never used again.

    None is destroyed: torch may yet wait for what was on it.
    """
    with suppress(RuntimeError):  # the device's, which this is no place to report
        if stream.query():
            _idle[stream.device].append(stream)


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Let this thread allocate, copy and wait on streams that capture nothing, while another one does."""
    mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def capture_id(device: torch.device) -> int:
    """Return the number of the capture that the current stream is in, which no other one has; 0: it is in none.

    Args:
        device: with an index.
    """
    if not torch.cuda.is_current_stream_capturing():
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    stream = torch._C._cuda_getCurrentRawStream(device.index)
    given = (ctypes.byref(status), ctypes.byref(number), None, None, None)
    _call("cuStreamGetCaptureInfo_v2", stream, *given)
    return number.value


def write_value(stream: int, address: int, value: int) -> None:
    """Write 8 bytes to pinned memory when the stream gets there.

    Args:
        stream: its handle.
    """
    _call("cuStreamWriteValue64_v2", stream, address, value, 0)


def allocation_start(address: int) -> int:
    """Return the address where the allocation begins that holds an address of device memory."""
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    _call("cuMemGetAddressRange_v2", ctypes.byref(start), ctypes.byref(size), address)
    return start.value
