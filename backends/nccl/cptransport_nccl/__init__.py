# SPDX-License-Identifier: Apache-2.0
"""Backend ``nccl``: the descriptor; its transport is not implemented yet."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

from cptransport.backend import BackendSpec
from cptransport.errors import BackendUnavailableError
from cptransport.transport import Capabilities

__all__ = ["BACKEND", "__version__"]

try:
    __version__ = version("cptransport-nccl")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def _why_not(device: torch.device) -> str:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "this torch was built without NCCL"
    return f"cptransport-nccl {__version__} does not implement its transport yet"


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(device)


def _create(group: Any, device: torch.device, timeout_s: float, **options: Any) -> NoReturn:
    raise BackendUnavailableError(_why_not(device))


BACKEND = BackendSpec(
    name="nccl",
    api_version=1,
    summary="NCCL on a communicator of its own; one GPU per rank, any number of hosts",
    capabilities=Capabilities(device_types=("cuda",), cross_host=True),
    probe=_probe,
    create=_create,
    install="pip install cptransport-nccl",
)
