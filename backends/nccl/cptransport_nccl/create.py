# SPDX-License-Identifier: Apache-2.0
"""Making the transport of a group: where the ranks are, ids of communicators, the control plane."""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
import torch.distributed as dist

from cptransport.backend import ControlPlane, group_store, with_index
from cptransport.errors import BackendUnavailableError, PeerFailedError
from cptransport_nccl.library import NcclError, unique_id
from cptransport_nccl.notes import Notes
from cptransport_nccl.pulse import CONNECT_S
from cptransport_nccl.transport import NcclTransport

__all__ = ["create"]


def create(
    group: Any,
    device: Any,
    timeout_s: float,
    kind: type[NcclTransport] = NcclTransport,
    **options: Any,
) -> NcclTransport:
    """Make the transport of a group; collective.

    Args:
        group, device, timeout_s: as ``BackendSpec.create``.
        kind: the class to make; backends may build on this one.

    Raises:
        BackendUnavailableError: two ranks share a GPU, or NCCL cannot connect them.
    """
    device = with_index(torch.device(device))
    torch.cuda.init()
    # Until all have connected, ranks wait for what the machines take, not for each other's data.
    patience_s = max(timeout_s, CONNECT_S)
    control = ControlPlane(
        group_store(group, "control"), dist.get_rank(group), dist.get_world_size(group), patience_s
    )
    places = control.exchange(_place(device), "nccl: devices of the ranks")
    shared = {p: [r for r, q in enumerate(places) if q == p] for p in places if places.count(p) > 1}
    if shared:
        ranks = next(iter(shared.values()))
        raise BackendUnavailableError(
            f"ranks {ranks} share one GPU, which NCCL refuses; give every rank a GPU of its own, or a "
            "NCCL_HOSTID of its own (with NCCL_SOCKET_IFNAME=lo NCCL_IB_DISABLE=1; slow, for tests), "
            "or use gloo or cupy_ipc"
        )

    def identity() -> bytes:
        mine = unique_id().hex() if control.rank == 0 else ""
        return bytes.fromhex(control.exchange(mine, "nccl: id of the communicator")[0])

    try:
        notes = Notes(group_store(group, "nccl notes"), control.rank)
        made = kind(control, device, timeout_s, identity, notes)
    except (NcclError, PeerFailedError) as error:
        raise BackendUnavailableError(f"NCCL could not connect the group: {error}") from error
    control.timeout_s = timeout_s
    return made


def _place(device: torch.device) -> str:
    host = os.environ.get("NCCL_HOSTID") or socket.gethostname()
    return f"{host}/{torch.cuda.get_device_properties(device).uuid}"
