# SPDX-License-Identifier: Apache-2.0
"""Descriptor of the backend ``posix_shm``; readable without loading the transport."""

from __future__ import annotations

import os
import platform
from typing import Any

from cptransport.backend import BackendSpec
from cptransport.transport import TRANSPORT_API_VERSION, Capabilities

__all__ = ["BACKEND"]


def _probe(group: Any, device: Any) -> str | None:
    if not os.access("/dev/shm", os.W_OK):
        return "/dev/shm is not there or not writable"
    if platform.machine() not in ("x86_64", "AMD64"):
        return "it relies on the store order of x86-64"
    return None


def _create(group: Any, device: Any, timeout_s: float, **options: Any) -> Any:
    from cptransport_posix_shm.transport import create

    return create(group, timeout_s)


BACKEND = BackendSpec(
    name="posix_shm",
    api_version=TRANSPORT_API_VERSION,
    summary="processes of one host over POSIX shared memory; peers read each other's memory in place",
    capabilities=Capabilities(device_types=("cpu",), in_place=True),
    probe=_probe,
    create=_create,
)
