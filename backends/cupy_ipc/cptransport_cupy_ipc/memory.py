# SPDX-License-Identifier: Apache-2.0
"""Device memory that the ranks of one host map from each other, through CUDA IPC.

Memory comes from ``cupy.cuda.runtime.malloc``, never from a pool. A handle names the driver's whole
allocation, which may hold several of ours, so the offset travels with it, and a handle is opened
once per process however many regions lie in it.

Order of freeing: every rank unmaps what it opened, all ranks meet, every rank frees its own. After
a death nothing is freed that a peer may still map.
"""

from __future__ import annotations

import ctypes
import json
from functools import lru_cache
from typing import Any

import torch
from cupy.cuda import memory as cupy_memory
from cupy.cuda import runtime

from cptransport.backend import ControlPlane, PeerRegion
from cptransport.errors import TransportError

__all__ = ["IpcMemory"]

#: At least the driver's granularity, so that regions seldom share an allocation.
_GRANULARITY = 2 << 20


@lru_cache(maxsize=1)
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    find = driver.cuMemGetAddressRange_v2
    find.argtypes = [
        ctypes.POINTER(ctypes.c_uint64),
        ctypes.POINTER(ctypes.c_size_t),
        ctypes.c_uint64,
    ]
    find.restype = ctypes.c_int
    return driver


def _allocation_start(address: int) -> int:
    start, size = ctypes.c_uint64(), ctypes.c_size_t()
    code = _driver().cuMemGetAddressRange_v2(ctypes.byref(start), ctypes.byref(size), address)
    if code:
        raise TransportError(f"cuMemGetAddressRange failed with CUDA error {code}")
    return int(start.value)


class IpcMemory:
    """A ``PeerMemory`` of CUDA IPC.

    Args:
        control: the transport's control plane; handles travel on it.
        device: this rank's device.
    """

    def __init__(self, control: ControlPlane, device: torch.device) -> None:
        self._control = control
        self._device = device
        self._opened: dict[bytes, tuple[int, int]] = {}  # handle -> (address here, users)

    def allocate(self, nbytes: int) -> PeerRegion:
        """See ``PeerMemory.allocate``."""
        size = -(-max(nbytes, 1) // _GRANULARITY) * _GRANULARITY
        address, mine = 0, ""
        try:
            with torch.cuda.device(self._device):
                address = runtime.malloc(size)
                start = _allocation_start(address)
                handle = runtime.ipcGetMemHandle(address)
            mine = json.dumps([bytes(handle).hex(), address - start, ""])
        except (RuntimeError, TransportError) as error:
            mine = json.dumps(["", 0, f"{size} bytes: {error}"])
        offers = [json.loads(text) for text in self._control.exchange(mine, "CUDA IPC handles")]
        self._agree([failure for _, _, failure in offers], address)
        addresses, handles, failure = [], [], ""
        for rank, (handle_hex, offset, _) in enumerate(offers):
            if rank == self._control.rank:
                addresses.append(address)
                continue
            handle = bytes.fromhex(handle_hex)
            try:
                addresses.append(self._open(handle) + offset)
                handles.append(handle)
            except RuntimeError as error:
                failure = f"cannot map memory of rank {rank}: {error}"
                break
        try:
            self._agree(self._control.exchange(failure, "CUDA IPC mapping"), 0)
        except TransportError:
            for handle in handles:
                self._shut(handle)
            self._control.exchange("", "CUDA IPC unmapping")
            runtime.free(address)
            raise
        return PeerRegion(
            self._tensor(address, nbytes), tuple(addresses), (address, tuple(handles))
        )

    def free(self, region: PeerRegion) -> None:
        """See ``PeerMemory.free``."""
        address, handles = region.handle
        with torch.cuda.device(self._device):
            for handle in handles:
                self._shut(handle)
            self._control.exchange("", "CUDA IPC unmapping")
            runtime.free(address)

    def close(self, broken: bool) -> None:
        """See ``PeerMemory.close``."""
        self._opened.clear()

    def _agree(self, failures: list[str], address: int) -> None:
        """Raise alike on all ranks when some rank failed."""
        for rank, failure in enumerate(failures):
            if failure:
                if address:
                    runtime.free(address)
                raise TransportError(f"CUDA IPC memory on rank {rank}: {failure}")

    def _open(self, handle: bytes) -> int:
        address, users = self._opened.get(handle, (0, 0))
        if users == 0:
            with torch.cuda.device(self._device):
                address = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        self._opened[handle] = (address, users + 1)
        return address

    def _shut(self, handle: bytes) -> None:
        address, users = self._opened[handle]
        if users > 1:
            self._opened[handle] = (address, users - 1)
        else:
            del self._opened[handle]
            runtime.ipcCloseMemHandle(address)

    def _tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """View memory as a uint8 tensor; whoever holds it must not outlive the region."""
        import cupy

        index = self._device.index
        owner = cupy_memory.UnownedMemory(address, max(nbytes, 1), self, index)
        array = cupy.ndarray(
            (nbytes,), dtype=cupy.uint8, memptr=cupy_memory.MemoryPointer(owner, 0)
        )
        return torch.as_tensor(array, device=self._device)
