# SPDX-License-Identifier: Apache-2.0
"""Backend ``nvshmem_barrier``: the descriptor; its transport is not implemented yet."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

from cptransport.backend import BackendSpec
from cptransport.errors import BackendUnavailableError
from cptransport.transport import Capabilities
from cptransport_nvshmem_runtime import missing

__all__ = ["BACKEND", "__version__"]

try:
    __version__ = version("cptransport-nvshmem-barrier")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def _why_not(device: torch.device) -> str:
    return (
        missing(device)
        or f"cptransport-nvshmem-barrier {__version__} does not implement its transport yet"
    )


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(device)


def _create(group: Any, device: torch.device, timeout_s: float, **options: Any) -> NoReturn:
    raise BackendUnavailableError(_why_not(device))


BACKEND = BackendSpec(
    name="nvshmem_barrier",
    api_version=1,
    summary="NVSHMEM: summaries in symmetric memory, one barrier per exchange",
    capabilities=Capabilities(
        device_types=("cuda",), pairwise=False, cross_host=True, in_place=True
    ),
    probe=_probe,
    create=_create,
    install="pip install 'cptransport-nvshmem-barrier[cu13]' (or [cu12], for CUDA 12)",
)
