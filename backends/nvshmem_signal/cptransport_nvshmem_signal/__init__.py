# SPDX-License-Identifier: Apache-2.0
"""Backend ``nvshmem_signal``: the descriptor; its transport is not implemented yet."""

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
    __version__ = version("cptransport-nvshmem-signal")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def _why_not(device: torch.device) -> str:
    return (
        missing(device)
        or f"cptransport-nvshmem-signal {__version__} does not implement its transport yet"
    )


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(device)


def _create(group: Any, device: torch.device, timeout_s: float, **options: Any) -> NoReturn:
    raise BackendUnavailableError(_why_not(device))


BACKEND = BackendSpec(
    name="nvshmem_signal",
    api_version=1,
    summary="NVSHMEM: summaries in symmetric memory, published by signals",
    capabilities=Capabilities(device_types=("cuda",), cross_host=True),
    probe=_probe,
    create=_create,
    install="pip install 'cptransport-nvshmem-signal[cu13]' (or [cu12], for CUDA 12)",
)
