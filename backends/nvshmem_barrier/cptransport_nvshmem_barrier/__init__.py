# SPDX-License-Identifier: Apache-2.0
"""Backend ``nvshmem_barrier``: symmetric memory, one barrier per exchange. Importing this loads no NVSHMEM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from cptransport.backend import BackendSpec
from cptransport.transport import BoundaryTransport, Capabilities
from cptransport_nvshmem_runtime import advice, create, missing

__all__ = ["BACKEND", "__version__"]

try:
    __version__ = version("cptransport-nvshmem-barrier")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"

_CAPABILITIES = Capabilities(
    device_types=("cuda",),
    pairwise=False,
    cuda_graph=True,
    shared_device=True,
    in_place=True,
    several_groups=False,
)


def _probe(group: Any, device: torch.device) -> str | None:
    return missing(torch.device(device))


def _create(
    group: Any, device: torch.device, timeout_s: float, **options: Any
) -> BoundaryTransport:
    return create("nvshmem_barrier", group, device, timeout_s, _CAPABILITIES, barrier=True)


def _advice(device: torch.device) -> list[str]:
    return advice(connections=2)


BACKEND = BackendSpec(
    name="nvshmem_barrier",
    api_version=1,
    summary="NVSHMEM: summaries in symmetric memory, one barrier per exchange",
    capabilities=_CAPABILITIES,
    probe=_probe,
    create=_create,
    advice=_advice,
    install="pip install 'cptransport-nvshmem-barrier[cu13]' (or [cu12], for CUDA 12)",
)
