# SPDX-License-Identifier: Apache-2.0
"""The environment of ranks that share one GPU.

NCCL takes two ranks on one GPU for a mistake unless they seem to be on different hosts; it then goes
through sockets, so nothing that is timed this way says anything about NVLink or a network. MPS lets
the ranks' kernels run side by side: without it the GPU switches between processes every few
milliseconds, right but slow, and NVSHMEM does not run at all.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["MARKER", "banner", "daemon_environment", "ranks_per_device", "sharing_environment"]

#: How many ranks share the device; set for every rank that does.
MARKER = "CPTRANSPORT_RANKS_PER_DEVICE"

#: Whoever set these knows the machine better.
_DEFAULTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    # Multicast objects are for GPUs of one rank each.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_NUM_THREADS": "1",
}


def sharing_environment(
    ranks: int, given: Mapping[str, str] | None = None, *, mps: bool = False
) -> dict[str, str]:
    """Return what must be set for ranks that share the first visible GPU.

    Args:
        ranks: how many.
        given: the environment that this is added to; None: this process's.
        mps: whether they go through an MPS daemon with ``daemon_environment``.

    Returns:
        Variables to set; ``{rank}`` in a value stands for the rank.
    """
    given = os.environ if given is None else given
    needed = {
        MARKER: str(ranks),
        "NCCL_HOSTID": "cptransport-rank{rank}",
        # Each rank sees one device; torchrun's local rank would be an index of a device it lacks.
        "LOCAL_RANK": "0",
        # More than 100 in all is refused by NVSHMEM.
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(max(1, 100 // ranks)),
    }
    device = _first_device(given)
    if device:
        # The daemon numbers its devices anew; names it leaves alone.
        needed["CUDA_VISIBLE_DEVICES"] = "0" if mps and device.isdigit() else device
    needed.update({name: value for name, value in _DEFAULTS.items() if not given.get(name)})
    return needed


def daemon_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return what must be set for the MPS daemon of the first visible GPU."""
    device = _first_device(os.environ if given is None else given)
    return {"CUDA_VISIBLE_DEVICES": device} if device else {}


def ranks_per_device() -> int:
    """Return how many ranks share this rank's device."""
    text = os.environ.get(MARKER, "")
    return int(text) if text.isdigit() else 1


def banner(ranks: int | None = None) -> str | None:
    """Return what every report of ranks that share a device must say; None: they do not.

    Args:
        ranks: how many; None: ``ranks_per_device()``.
    """
    count = ranks_per_device() if ranks is None else ranks
    if count == 1:
        return None
    return (
        f"{count} ranks share one GPU: times compare transports with each other "
        "and are no NVLink or network figures"
    )


def _first_device(given: Mapping[str, str]) -> str:
    return given.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
