# SPDX-License-Identifier: Apache-2.0
"""Tables of addresses on the device, for kernels that read peers' memory."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from cptransport.cuda_driver import exclusive_stream, relaxed_capture

__all__ = ["address_table"]

#: What captured graphs read, for as long as the process lives: nobody knows when the last one ends.
_captured: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}


def address_table(
    addresses: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream | None = None
) -> Tensor:
    """Return addresses as an int64 ``[len(addresses)]`` tensor on a device.

    Buffers come in pairs, so the same few tables return for ever, and each is uploaded once: on a
    stream of its own, since a copy on the current one would hold the host up until what is there has
    ended, a wait for a peer perhaps. Inside a capture that is outside the graph, and the table stays.

    Args:
        device: with an index, if it is a CUDA device.
        stream: that reads the table, and all that follow it; None: the current one.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        key = (addresses, device)
        if key not in _captured:
            _captured[key] = _upload(addresses, device)
        return _captured[key]
    return _cached(addresses, device, stream)


@lru_cache(maxsize=1024)
def _cached(
    addresses: tuple[int, ...], device: torch.device, stream: torch.cuda.Stream | None
) -> Tensor:
    table = _upload(addresses, device)
    if device.type == "cuda":
        # What is dropped here may still be read there.
        table.record_stream(stream or torch.cuda.current_stream(device))
    return table


def _upload(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    table = torch.tensor(addresses, dtype=torch.int64)
    if device.type != "cuda":
        return table.to(device)
    with relaxed_capture(), torch.cuda.stream(_uploads(device)):
        return table.to(device)


@lru_cache
def _uploads(device: torch.device) -> torch.cuda.Stream:
    return exclusive_stream(device)
