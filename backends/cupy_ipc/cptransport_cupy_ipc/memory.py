# SPDX-License-Identifier: Apache-2.0
"""Device memory that the ranks of one host map from each other, through CUDA IPC.

Memory comes from ``cupy.cuda.runtime.malloc``, never from a pool. A handle names the driver's whole
allocation, which may hold several of ours, so the offset travels with it, and a handle is opened
once per process however many regions lie in it.

Order of freeing: every rank unmaps what it opened, all ranks meet, every rank frees its own. After
a death nothing is freed that a peer may still map.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from cupy.cuda import runtime

from cptransport.backend import ControlPlane, PeerRegion, allocation_start, bytes_at
from cptransport.errors import TransportError

__all__ = ["IpcMemory"]

#: At least the driver's granularity, so that regions seldom share an allocation.
_GRANULARITY = 2 << 20


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
            with self._here():
                address = runtime.malloc(size)
                start = allocation_start(address)
                handle = runtime.ipcGetMemHandle(address)
            mine = json.dumps([bytes(handle).hex(), address - start, ""])
        except RuntimeError as error:
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
        region = PeerRegion(torch.empty(0), tuple(addresses), (address, tuple(handles)))
        try:
            self._agree(self._control.exchange(failure, "CUDA IPC mapping"), 0)
        except TransportError as error:
            if type(error) is TransportError:  # else a peer is lost, and may map ours
                self.free(region)
            raise
        local = bytes_at(address, nbytes, self._device)
        return PeerRegion(local, region.addresses, region.handle)

    def free(self, region: PeerRegion) -> None:
        """See ``PeerMemory.free``."""
        address, handles = region.handle
        for handle in handles:
            self._shut(handle)
        self._control.exchange("", "CUDA IPC unmapping")
        with self._here():
            runtime.free(address)

    def close(self, broken: bool) -> None:
        """See ``PeerMemory.close``."""
        self._opened.clear()

    @contextmanager
    def _here(self) -> Iterator[None]:
        """Make this rank's device the current one, for CuPy's CUDA runtime as for torch's."""
        with torch.cuda.device(self._device):
            runtime.setDevice(self._device.index)
            yield

    def _agree(self, failures: list[str], address: int) -> None:
        """Raise alike on all ranks when some rank failed."""
        for rank, failure in enumerate(failures):
            if failure:
                if address:
                    with self._here():
                        runtime.free(address)
                raise TransportError(f"CUDA IPC memory on rank {rank}: {failure}")

    def _open(self, handle: bytes) -> int:
        address, users = self._opened.get(handle, (0, 0))
        if users == 0:
            with self._here():
                address = runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess)
        self._opened[handle] = (address, users + 1)
        return address

    def _shut(self, handle: bytes) -> None:
        address, users = self._opened[handle]
        if users > 1:
            self._opened[handle] = (address, users - 1)
        else:
            del self._opened[handle]
            with self._here():
                runtime.ipcCloseMemHandle(address)
