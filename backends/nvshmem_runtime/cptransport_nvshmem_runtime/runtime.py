# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM in this process: initialised once, shared by every transport, finalised after the last.

NVSHMEM's processing elements (PEs) are exactly the ranks of one group: its allocations are
collective over all PEs, so a second group with other members cannot be served beside the first, and
is refused. PE and rank are kept apart all the same.

Nothing here runs in a destructor. After a peer died nothing is finalised or freed: peers may still
map the memory.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from cptransport.backend import ControlPlane, PeerRegion
from cptransport.errors import BackendUnavailableError, TransportError

__all__ = ["SymmetricMemory", "acquire"]

_lock = threading.Lock()
_members: tuple[int, ...] | None = None
_users = 0
_broken = False


class _Bytes:
    """Device memory as ``torch.as_tensor`` takes it without copying."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 2,
        }


def acquire(group: Any, control: ControlPlane, device: torch.device) -> SymmetricMemory:
    """Initialise NVSHMEM for a group, or share what is there.

    Raises:
        BackendUnavailableError: alike on all ranks: NVSHMEM serves other ranks already, failed
            before, or fails to start.

    Collective: over the group.
    """
    global _members, _users
    members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    with _lock:
        problem = _conflict(members)
        _agree(control, problem, "NVSHMEM: who is served")
        if _members is None:
            _start(control, device)
            _members = members
        _users += 1
    return SymmetricMemory(control, device)


def _conflict(members: tuple[int, ...]) -> str:
    if _broken:
        return "NVSHMEM lost a peer earlier in this process and cannot start again"
    if _members is not None and _members != members:
        return (
            f"NVSHMEM already serves ranks {list(_members)} in this process; it cannot serve "
            f"{list(members)} beside them"
        )
    return ""


def _start(control: ControlPlane, device: torch.device) -> None:
    import nvshmem.core as nvshmem
    from cuda.core import Device

    problem = ""
    try:
        torch.cuda.set_device(device)
        torch.cuda.synchronize(device)
        handle = Device(device.index)
        handle.set_current()
        uid = nvshmem.get_unique_id(empty=control.rank != 0)
        mine = bytes(uid._data.view(np.int8).tobytes()).hex() if control.rank == 0 else ""
    except Exception as error:
        problem, mine = f"{type(error).__name__}: {error}", ""
    _agree(control, problem, "NVSHMEM: unique id")
    text = control.exchange(mine, "NVSHMEM: unique id of rank 0")[0]
    try:
        if control.rank != 0:
            uid._data.view(np.int8)[:] = np.frombuffer(bytes.fromhex(text), dtype=np.int8)
        nvshmem.init(
            device=handle,
            uid=uid,
            rank=control.rank,
            nranks=control.world_size,
            initializer_method="uid",
        )
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    _agree(control, problem, "NVSHMEM: initialisation")


def _agree(control: ControlPlane, problem: str, what: str) -> None:
    """Raise alike on all ranks when some rank has a problem."""
    for rank, text in enumerate(control.exchange(problem, what)):
        if text:
            raise BackendUnavailableError(f"rank {rank}: {text}")


class SymmetricMemory:
    """A ``PeerMemory`` on NVSHMEM's symmetric heap.

    Args:
        control: of the transport. device: of this rank.
    """

    def __init__(self, control: ControlPlane, device: torch.device) -> None:
        from nvshmem.bindings import nvshmem as bindings

        self._bindings = bindings
        self._control = control
        self._device = device
        pes = control.exchange(str(bindings.my_pe()), "NVSHMEM: PE of every rank")
        self._pes = [int(pe) for pe in pes]

    def allocate(self, nbytes: int) -> PeerRegion:
        """See ``PeerMemory.allocate``."""
        size = max(nbytes, 1)
        address = self._bindings.malloc(size)
        addresses = []
        problem = ""
        if not address:
            problem = f"the symmetric heap cannot hold {size} more bytes; set NVSHMEM_SYMMETRIC_SIZE higher"
        else:
            addresses = [
                address if rank == self._control.rank else self._bindings.ptr(address, pe)
                for rank, pe in enumerate(self._pes)
            ]
            unreachable = [rank for rank, found in enumerate(addresses) if not found]
            if unreachable:
                problem = f"the memory of ranks {unreachable} is not addressable from here"
        problems = self._control.exchange(problem, "NVSHMEM: allocation")
        failed = {rank: text for rank, text in enumerate(problems) if text}
        if failed:
            if address and all("hold" not in text for text in failed.values()):
                self._bindings.free(address)
            raise TransportError("; ".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        local = torch.as_tensor(_Bytes(address, nbytes), device=self._device)
        return PeerRegion(local, tuple(addresses), address)

    def free(self, region: PeerRegion) -> None:
        """See ``PeerMemory.free``."""
        self._bindings.free(region.handle)

    def close(self, broken: bool) -> None:
        """See ``PeerMemory.close``; the last transport finalises NVSHMEM."""
        global _members, _users, _broken
        import nvshmem.core as nvshmem

        with _lock:
            _users -= 1
            _broken = _broken or broken
            if _users == 0 and not _broken:
                nvshmem.finalize()
                _members = None
