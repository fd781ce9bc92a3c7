# SPDX-License-Identifier: Apache-2.0
"""What the two NVSHMEM backends share. Importing this loads no NVSHMEM."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist

from cptransport.backend import (
    MAX_RANKS,
    ControlPlane,
    OneSidedTransport,
    group_store,
    with_index,
)
from cptransport.errors import BackendUnavailableError, TransportError
from cptransport.transport import Capabilities
from cptransport_nvshmem_runtime.library import load_library

__all__ = ["__version__", "advice", "create", "missing"]

#: Set by ``cptransport launch --share-gpu``: how many ranks share the device.
_SHARING = "CPTRANSPORT_RANKS_PER_DEVICE"

try:
    __version__ = version("cptransport-nvshmem-runtime")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def missing(device: torch.device) -> str | None:
    """Say what this process lacks first for NVSHMEM on a device; initialises nothing.

    Args:
        device: where the summaries live.

    Returns:
        The reason as one line, or None when nothing is missing.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if find_spec("nvshmem") is None:
        return (
            "nvshmem4py is not installed: pip install 'cptransport-nvshmem-runtime[cu13]' "
            "(or [cu12], for CUDA 12)"
        )
    if find_spec("triton") is None:
        return "Triton is not installed: its kernels carry the signals"
    return load_library()


def advice(connections: int) -> list[str]:
    """Say what in the environment is not as NVSHMEM wants it here, one line each.

    Args:
        connections: value of ``CUDA_DEVICE_MAX_CONNECTIONS`` with which the backend was measured.
    """
    wanted = {
        "NVSHMEM_DISABLE_CUDA_VMM": (
            "1",
            "peers map symmetric memory without the virtual memory API",
        ),
        "CUDA_DEVICE_MAX_CONNECTIONS": (
            str(connections),
            "kernels start in the order of their launch",
        ),
    }
    ranks = os.environ.get(_SHARING, "")
    if ranks.isdigit() and int(ranks) > 1:
        wanted["NVSHMEM_DISABLE_NVLS"] = ("1", "multicast objects are for GPUs of one rank each")
    lines = [
        f"set {name}={value}: {why}"
        for name, (value, why) in wanted.items()
        if os.environ.get(name) != value
    ]
    return lines + (_mps_advice(int(ranks)) if ranks.isdigit() else [])


def _mps_advice(ranks: int) -> list[str]:
    """Say what ranks that share a GPU lack of MPS."""
    if ranks == 1:
        return []
    if "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        return [f"start MPS: {ranks} ranks share one GPU, and take turns on it without"]
    share = os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")
    try:
        fits = float(share) * ranks <= 100
    except ValueError:
        fits = False
    if fits:
        return []
    return [
        f"set CUDA_MPS_ACTIVE_THREAD_PERCENTAGE={100 // ranks}: the shares of {ranks} ranks must not add up "
        "to more than 100"
    ]


def create(
    name: str,
    group: Any,
    device: Any,
    timeout_s: float,
    capabilities: Capabilities,
    *,
    barrier: bool,
) -> OneSidedTransport:
    """Make a transport on symmetric memory; collective over the group.

    Args:
        name: of the backend.
        group, device, timeout_s: as ``BackendSpec.create``.
        capabilities: of the backend.
        barrier: order by one barrier per exchange rather than by signals.

    Raises:
        BackendUnavailableError: this process lacks what NVSHMEM needs; or, alike on all ranks: too
            many ranks, NVSHMEM does not start or serves others, the heap is too small, or peers'
            memory is not addressable.
    """
    device = torch.device(device)
    reason = missing(device)
    if reason is not None:
        raise BackendUnavailableError(reason)
    from cptransport_nvshmem_runtime.runtime import acquire

    device = with_index(device)
    world_size = dist.get_world_size(group)
    if world_size > MAX_RANKS:
        raise BackendUnavailableError(f"serves up to {MAX_RANKS} ranks, the group has {world_size}")
    control = ControlPlane(
        group_store(group, "control"), dist.get_rank(group), world_size, timeout_s
    )
    memory = acquire(group, control, device)
    try:
        return OneSidedTransport(
            name,
            device=device,
            control=control,
            timeout_s=timeout_s,
            capabilities=capabilities,
            memory=memory,
            barrier=barrier,
        )
    except BaseException as error:
        # Memory is refused on all ranks together; anything else may be this rank's alone.
        memory.close(broken=type(error) is not TransportError)
        if isinstance(error, TransportError):
            raise BackendUnavailableError(f"{name}: {error}") from error
        raise
