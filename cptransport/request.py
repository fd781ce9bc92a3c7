# SPDX-License-Identifier: Apache-2.0
"""What one rank asks for when a transport is made: arguments, environment and device, parsed strictly."""

from __future__ import annotations

import contextlib
import platform
import uuid
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from cptransport import env, registry
from cptransport.agreement import Ranks
from cptransport.cuda_driver import with_index
from cptransport.errors import BackendError, BackendNotFoundError
from cptransport.transport import TRANSPORT_API_VERSION

__all__ = ["Request", "asked_for", "device_of", "make_request"]


@dataclass(frozen=True)
class Request:
    """What a rank tells the others first.

    Attributes:
        asked: as the user wrote it.
        backend: what that stands for at this world size.
        strict, timeout_s: of this rank.
        device_type: of this rank's device.
        host: tells hosts apart.
        versions: of what all ranks must have alike.
        nonce: rank 0's names what the ranks make together.
    """

    asked: str
    backend: str
    strict: bool
    timeout_s: float
    device_type: str
    host: str
    versions: str
    nonce: str


def asked_for(backend: str | None) -> tuple[str, str]:
    """Return the name asked for and its source; an empty argument is none.

    Raises:
        BackendNotFoundError: the argument is no text.
    """
    if backend is not None and not isinstance(backend, str):
        raise BackendNotFoundError(f"backend must be a name, got {backend!r}")
    return env.text(env.COMM_BACKEND, (backend or "").strip() or None)


def make_request(
    ranks: Ranks, asked: str, strict: bool, timeout_s: float, device: torch.device
) -> Request:
    """Collect what the others must know.

    Raises:
        BackendNotFoundError, BackendConflictError: of the name asked for.
        EnvVarError: strict, and the environment has an unknown ``CULA_CP_*`` name.
    """
    registry.check_environment(strict=strict)
    return Request(
        asked=asked,
        backend=_resolve(asked, ranks.world_size),
        strict=strict,
        timeout_s=timeout_s,
        device_type=device.type,
        host=_host(),
        versions=f"cptransport {registry.installed_version(registry.CORE)}, "
        f"transport API {TRANSPORT_API_VERSION}",
        nonce=uuid.uuid4().hex,
    )


def _resolve(asked: str, world_size: int) -> str:
    """Return the backend that a name stands for, ``auto`` for itself."""
    if asked == registry.AUTO:
        return asked
    registry.find_backend(asked)
    if asked != registry.NVSHMEM:
        return asked
    backend = "nvshmem_signal" if world_size <= 2 else "nvshmem_barrier"
    registry.find_backend(backend)
    return backend


def device_of(ranks: Ranks, device: torch.device | str | int | None) -> torch.device:
    """Return the device of this rank's summaries; see ``create_transport``.

    Raises:
        BackendError: torch knows no such device.
    """
    if device is None:
        if ranks.world is not None:
            return ranks.world.device(ranks.rank)
        device = "cuda" if torch.cuda.is_available() and _has_cuda_backend(ranks.group) else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise BackendError(f"device {device!r} is not valid: {error}") from error
    if found.type != "cuda" or not torch.cuda.is_available():
        return found
    found = with_index(found)
    if not 0 <= found.index < torch.cuda.device_count():  # torch wraps large ones into the negative
        raise BackendError(
            f"device {device!r}: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return found


def _has_cuda_backend(group: Any) -> bool:
    """Whether the group talks through CUDA; gloo merely accepts CUDA tensors."""
    if group is None:
        return False
    backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))
    return backends.get("cuda", "gloo") != "gloo"


def _host() -> str:
    """Return a text that differs between hosts and is the same in all containers of one."""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return platform.node()
