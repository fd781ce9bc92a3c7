# SPDX-License-Identifier: Apache-2.0
"""What a payload must be, recomputed anywhere from (rank, slot, generation, part, index); never asks a transport."""

from __future__ import annotations

import functools
import zlib

import torch
from torch import Tensor

from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["DTYPES", "assert_bytes", "bytes_of", "fill", "payload", "spoil"]

#: Every dtype that a payload may have.
DTYPES: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.complex64,
)

_PERIOD = 65521  # a prime: no block of a power of two repeats


def payload(part: PartSpec, *, rank: int, slot: str, generation: int) -> Tensor:
    """Return the part that a rank publishes: pseudo-random bytes, NaN patterns among them.

    Args:
        part: shape and dtype.
        rank: who publishes.
        slot: name of the slot.
        generation: its generation.

    Returns:
        A CPU tensor like the part.
    """
    start = zlib.crc32(f"{rank}/{slot}/{generation}/{part.name}".encode()) % _PERIOD
    noise = _noise()
    data = noise.repeat(2 + part.nbytes // _PERIOD)[start : start + part.nbytes].clone()
    if part.dtype == torch.bool:
        data &= 1
    return data.view(part.dtype).view(part.shape)


@functools.cache
def _noise() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 251, (_PERIOD,), dtype=torch.uint8, generator=generator)


def bytes_of(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes in order, on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def fill(transport: BoundaryTransport, slot: Slot, generation: int) -> None:
    """Stage a slot and write this rank's payload of that generation into it."""
    staged = transport.stage(slot)
    for part in slot.parts:
        value = payload(part, rank=transport.rank, slot=slot.name, generation=generation)
        staged[part.name].copy_(value)


def spoil(tensor: Tensor) -> None:
    """Overwrite a tensor with bytes that no payload has."""
    with torch.no_grad():
        if tensor.numel() and tensor.is_contiguous():
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            else:
                tensor.reshape(-1).view(torch.uint8).fill_(0xFF)


def assert_bytes(
    actual: Tensor, part: PartSpec, *, rank: int, slot: str, generation: int, row: int | None = None
) -> None:
    """Check a received part, or one row of it, byte for byte.

    Raises:
        AssertionError: it differs; the message says whose payload of which generation it is, if
            any.
    """
    where = f"slot {slot!r}, part {part.name!r}, generation {generation}, source {rank}, row {row}"
    assert actual.shape == torch.Size(part.shape), f"{where}: shape {tuple(actual.shape)}"
    assert actual.dtype == part.dtype, f"{where}: dtype {actual.dtype}"

    def matches(source: int, number: int) -> bool:
        expected = payload(part, rank=source, slot=slot, generation=number)
        got = actual
        if row is not None:
            got, expected = got[row], expected[row]
        return torch.equal(bytes_of(got), bytes_of(expected))

    if matches(rank, generation):
        return
    for number in range(max(1, generation - 4), generation + 3):
        for source in range(8):
            if matches(source, number):
                raise AssertionError(
                    f"{where}: got the payload of rank {source}, generation {number}"
                )
    expected = payload(part, rank=rank, slot=slot, generation=generation)
    got, right = bytes_of(actual), bytes_of(expected)
    if row is not None:
        got, right = bytes_of(actual[row]), bytes_of(expected[row])
    wrong = (got != right).nonzero().reshape(-1)
    raise AssertionError(
        f"{where}: {wrong.numel()} of {right.numel()} bytes differ, from byte {wrong[0].item()}: "
        f"got {got[wrong[:8]].tolist()}, expected {right[wrong[:8]].tolist()}"
    )
