# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM in this process: initialised once, shared by every transport, finalised after the last.

NVSHMEM's processing elements (PEs) are exactly the ranks of one group: its allocations are
collective over all PEs, so a second group with other members cannot be served beside the first, and
is refused. What somebody else has initialised (nvshmem4py, torch's symmetric memory) is shared, and
left to them, if its PEs are the group's ranks in any order.

All ranks meet on the control plane right before each call of NVSHMEM that meets all PEs
(initialisation, ``malloc``, ``free``, finalisation), and the call itself has a limit too (``meeting``);
when it passes, NVSHMEM is lost to the process, never used nor finalised again. A transport that broke
frees nothing, since peers may still map the memory, and NVSHMEM is not finalised after one, since a
peer may be dead. If none is, the next transport of the group frees what was left, once all ranks have
come to it, and all is as before. Nothing here runs in a destructor.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from cptransport.backend import ControlPlane, PeerRegion, bytes_at
from cptransport.errors import (
    BackendUnavailableError,
    PeerFailedError,
    TransportError,
    TransportTimeoutError,
)
from cptransport_nvshmem_runtime.library import bindings
from cptransport_nvshmem_runtime.meeting import meet

__all__ = ["SymmetricMemory", "acquire"]

T = TypeVar("T")

_LIMITED = (
    "several ranks share a GPU without MPS, or CUDA_MPS_ACTIVE_THREAD_PERCENTAGE of those that do adds up "
    "to more than 100: they take turns on it, milliseconds each; start them by cptransport launch --share-gpu"
)


class _Process:
    """What this process knows of its NVSHMEM.

    Attributes:
        members: global ranks of the group that is served; None: nothing is initialised by us.
        users: transports that have not been closed.
        ours: whether we initialised it, and so finalise it.
        broke: whether a transport broke since all ranks last met; it is not finalised then.
        spent: why it cannot be used any more; empty: it can.
        made: allocations so far, alike on all PEs.
        left: of transports that broke, number of the allocation -> address here.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.members: tuple[int, ...] | None = None
        self.users = 0
        self.ours = False
        self.broke = False
        self.spent = ""
        self.made = 0
        self.left: dict[int, int] = {}

    def conflict(self, members: tuple[int, ...]) -> str:
        """Say why a group cannot be served; empty: it can."""
        if self.spent:
            return self.spent
        if self.members is not None and self.members != members:
            return (
                f"NVSHMEM already serves ranks {list(self.members)} in this process; it cannot serve "
                f"{list(members)} beside them"
            )
        return ""


_process = _Process()


def acquire(group: Any, control: ControlPlane, device: torch.device) -> SymmetricMemory:
    """Initialise NVSHMEM for a group, or share what is there.

    Raises:
        BackendUnavailableError: alike on all ranks: NVSHMEM serves other ranks already, lost a peer or
            failed before, or fails to start.
        TransportTimeoutError, PeerFailedError: a rank did not come, or ended meanwhile.

    Collective: over the group.
    """
    members = tuple(dist.get_process_group_ranks(group if group is not None else dist.group.WORLD))
    with _process.lock:
        try:
            _agree(control, _process.conflict(members), "NVSHMEM: who is served")
            if _process.members is None:
                _start(control, device)
                _process.members = members
            memory = SymmetricMemory(control, device)
            memory.free_what_is_left()
        except (TransportTimeoutError, PeerFailedError) as error:
            control.report(error, fatal=True)  # a rank that is still inside NVSHMEM looks for it
            raise
        _process.users += 1
    return memory


def _meet(call: Callable[[], T], what: str, control: ControlPlane, device: torch.device) -> T:
    """See ``meet``; a call that did not return in time loses NVSHMEM to this process."""
    try:
        return meet(call, what, control, device)
    except (TransportTimeoutError, PeerFailedError) as error:
        _process.spent = f"NVSHMEM was lost earlier in this process: {error}"
        raise


def _start(control: ControlPlane, device: torch.device) -> None:
    """Initialise NVSHMEM, unless somebody else has; all ranks alike."""
    problem, found = "", False
    try:
        library = bindings()
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # NVSHMEM takes the current context
        status, known = library.init_status(), library.Init_status
        found = known.STATUS_IS_INITIALIZED <= status < known.STATUS_INVALID
        if status == known.STATUS_IS_BOOTSTRAPPED:
            problem = "NVSHMEM was half initialised in this process before"
        elif found and library.n_pes() != control.world_size:
            problem = (
                f"NVSHMEM was initialised before, with {library.n_pes()} PEs; the group has "
                f"{control.world_size} ranks"
            )
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    _agree(control, problem, "NVSHMEM: what is there")
    there = [text == "True" for text in control.exchange(str(found), "NVSHMEM: who has it")]
    if all(there):
        _process.ours = False
        return
    if any(there):
        ranks = [rank for rank, each in enumerate(there) if each]
        raise BackendUnavailableError(f"NVSHMEM was initialised before, on ranks {ranks} alone")
    _initialise(library, control, device)


def _initialise(library: Any, control: ControlPlane, device: torch.device) -> None:
    """Initialise NVSHMEM with the group's ranks as PEs, by an id that rank 0 makes."""
    problem, mine = "", ""
    try:
        if control.rank == 0:
            identity = library.uniqueid()
            library.get_uniqueid(identity.ptr)
            mine = identity._data.tobytes().hex()
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    _agree(control, problem, "NVSHMEM: unique id")
    text = control.exchange(mine, "NVSHMEM: unique id of rank 0")[0]
    _process.spent = "NVSHMEM failed to start earlier in this process"  # until it has started
    try:
        raw = np.frombuffer(bytes.fromhex(text), dtype=library.uniqueid_dtype)
        identity = library.uniqueid.from_data(raw.copy())
        attributes = library.InitAttr()
        library.set_attr_uniqueid_args(
            control.rank, control.world_size, identity.ptr, attributes.ptr
        )

        def initialise() -> None:
            library.hostlib_init_attr(library.Flags.INIT_WITH_UNIQUEID, attributes.ptr)

        _meet(initialise, "initialisation", control, device)
        # It reports success also where it could set up nothing but the connections of its hosts.
        if library.init_status() < library.Init_status.STATUS_IS_INITIALIZED:
            problem = "NVSHMEM does not start; NVSHMEM_DEBUG=INFO says why"
    except (TransportTimeoutError, PeerFailedError):
        raise
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    _agree(control, problem, "NVSHMEM: initialisation")
    _process.spent, _process.ours = "", True
    if control.rank == 0 and library.init_status() == library.Init_status.STATUS_LIMITED_MPG:
        warnings.warn(_LIMITED, stacklevel=2)


def _agree(control: ControlPlane, problem: str, what: str) -> None:
    """Raise alike on all ranks when some rank has a problem."""
    failed = {rank: text for rank, text in enumerate(control.exchange(problem, what)) if text}
    if failed:
        raise BackendUnavailableError(
            "; ".join(f"rank {rank}: {text}" for rank, text in failed.items())
        )


class SymmetricMemory:
    """A ``PeerMemory`` on NVSHMEM's symmetric heap.

    Args:
        control: of the transport. device: of this rank.
    """

    def __init__(self, control: ControlPlane, device: torch.device) -> None:
        self._library = bindings()
        self._control = control
        self._device = device
        pes = control.exchange(str(self._library.my_pe()), "NVSHMEM: PE of every rank")
        self._pes = [int(pe) for pe in pes]
        self._numbers: dict[int, int] = {}  # address -> number of the allocation
        self._closed = False

    def allocate(self, nbytes: int) -> PeerRegion:
        """See ``PeerMemory.allocate``."""
        self._control.exchange("", "NVSHMEM: allocation")
        address = self._meet(lambda: self._library.malloc(max(nbytes, 1)), "malloc")
        _process.made += 1
        self._numbers[address] = _process.made
        addresses = [
            address if rank == self._control.rank else self._library.ptr(address, pe)
            for rank, pe in enumerate(self._pes)
            if address
        ]
        unreachable = [rank for rank, found in enumerate(addresses) if not found]
        texts = self._control.exchange(json.dumps([bool(address), unreachable]), "NVSHMEM: memory")
        found = [json.loads(text) for text in texts]
        lacking = [rank for rank, (got, _) in enumerate(found) if not got]
        if lacking:  # where others got some it stays: giving it back would take all ranks
            size = os.environ.get("NVSHMEM_SYMMETRIC_SIZE", "unset: 1G")
            raise TransportError(
                f"the symmetric heap of ranks {lacking} cannot hold {nbytes} more bytes; set "
                f"NVSHMEM_SYMMETRIC_SIZE ({size}) higher on all ranks before NVSHMEM starts"
            )
        apart = {rank: peers for rank, (_, peers) in enumerate(found) if peers}
        if apart:
            self.free(PeerRegion(torch.empty(0), (), address))
            raise TransportError(
                "; ".join(
                    f"the memory of ranks {peers} is not addressable from rank {rank}"
                    for rank, peers in apart.items()
                )
                + ": no NVLink or PCIe peer access between their GPUs"
            )
        return PeerRegion(bytes_at(address, nbytes, self._device), tuple(addresses), address)

    def free(self, region: PeerRegion) -> None:
        """See ``PeerMemory.free``."""
        self._control.exchange("", "NVSHMEM: freeing")
        self._free(region.handle)
        del self._numbers[region.handle]

    def free_what_is_left(self) -> None:
        """Free what transports that broke have left, where all ranks have done with them; collective."""
        torch.cuda.synchronize(self._device)  # their waits have ended, and so have their reads
        mine = json.dumps(sorted(_process.left))
        texts = self._control.exchange(mine, "NVSHMEM: what is left")
        left = [set(json.loads(text)) for text in texts]
        for number in sorted(set.intersection(*left)):
            self._free(_process.left.pop(number))
        if all(numbers == left[0] for numbers in left):
            _process.broke = False  # all live and nothing is left: as good as new

    def _free(self, address: int) -> None:
        self._meet(lambda: self._library.free(address), "free")

    def _meet(self, call: Callable[[], T], what: str) -> T:
        return _meet(call, what, self._control, self._device)

    def close(self, broken: bool) -> None:
        """See ``PeerMemory.close``; the last transport finalises NVSHMEM."""
        if self._closed:
            return
        self._closed = True
        with _process.lock:
            _process.users -= 1
            if broken:
                _process.broke = True
                _process.left.update({n: a for a, n in self._numbers.items() if a})
            if _process.users or _process.broke or _process.spent:
                return
            if _process.ours:
                try:
                    self._meet(self._library.hostlib_finalize, "finalisation")
                except (TransportTimeoutError, PeerFailedError):  # it is closed all the same
                    warnings.warn(_process.spent, stacklevel=2)
                    return
            _process.members = None
