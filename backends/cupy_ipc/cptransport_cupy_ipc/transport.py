# SPDX-License-Identifier: Apache-2.0
"""The ``cupy_ipc`` transport: peers read each other's memory on one host; all the protocol is ``OneSidedTransport``."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cupy.cuda import runtime

from cptransport.backend import (
    MAX_RANKS,
    ControlPlane,
    OneSidedTransport,
    group_store,
    with_index,
)
from cptransport.errors import BackendUnavailableError, TransportError
from cptransport_cupy_ipc import CAPABILITIES
from cptransport_cupy_ipc.memory import IpcMemory

__all__ = ["create"]


def create(group: Any, device: Any, timeout_s: float, **options: Any) -> OneSidedTransport:
    """Make the transport of a group; collective.

    Raises:
        BackendUnavailableError: alike on all ranks: they are on different hosts, some GPU has no peer
            access or is hidden, torch uses expandable segments, too many ranks, or no memory.
    """
    device = with_index(torch.device(device))
    torch.cuda.init()
    torch.cuda.synchronize(device)
    control = ControlPlane(
        group_store(group, "control"), dist.get_rank(group), dist.get_world_size(group), timeout_s
    )
    mine = json.dumps([_host(), str(torch.cuda.get_device_properties(device).uuid)])
    places = [json.loads(text) for text in control.exchange(mine, "cupy_ipc: places of the ranks")]
    problems = control.exchange(_problem(places, device), "cupy_ipc: peer access")
    for rank, problem in enumerate(problems):
        if problem:
            raise BackendUnavailableError(f"cupy_ipc on rank {rank}: {problem}")
    memory = IpcMemory(control, device)
    try:
        return OneSidedTransport(
            "cupy_ipc",
            device=device,
            control=control,
            timeout_s=timeout_s,
            capabilities=CAPABILITIES,
            memory=memory,
        )
    except TransportError as error:
        raise BackendUnavailableError(f"cupy_ipc: {error}") from error


def _problem(places: list[list[str]], device: torch.device) -> str:
    """Why this rank cannot read its peers' memory, or nothing."""
    if len(places) > MAX_RANKS:
        return f"serves up to {MAX_RANKS} ranks, the group has {len(places)}"
    hosts = sorted({host for host, _ in places})
    if len(hosts) > 1:
        return f"CUDA IPC works within one host; the ranks are on {len(hosts)}"
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(name, "").replace(" ", "").lower():
            return f"CUDA IPC is not served beside torch's expandable segments; take them out of {name}"
    here = {
        str(torch.cuda.get_device_properties(i).uuid): i for i in range(torch.cuda.device_count())
    }
    for rank, (_, uuid) in enumerate(places):
        peer = here.get(uuid)
        if peer is None:
            return f"the GPU of rank {rank} is hidden from this process (CUDA_VISIBLE_DEVICES)"
        if peer != device.index and not runtime.deviceCanAccessPeer(device.index, peer):
            return f"no peer access from {device} to the GPU of rank {rank}"
    return ""


def _host() -> str:
    """This host, apart from others of the same name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}"
