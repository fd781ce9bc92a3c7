# SPDX-License-Identifier: Apache-2.0
"""Backend ``nccl``: NCCL on a communicator of its own. Importing this loads no NCCL."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from cptransport.backend import BackendSpec
from cptransport.errors import BackendUnavailableError
from cptransport.transport import BoundaryTransport, Capabilities

__all__ = ["BACKEND", "__version__"]

try:
    __version__ = version("cptransport-nccl")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def _why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return "this torch was built without NCCL"
    return None


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(torch.device(device))


def _create(
    group: Any, device: torch.device, timeout_s: float, **options: Any
) -> BoundaryTransport:
    reason = _why_not(torch.device(device))
    if reason is not None:
        raise BackendUnavailableError(reason)
    from cptransport_nccl.create import create

    return create(group, device, timeout_s, **options)


def _advice(device: torch.device) -> list[str]:
    found = []
    if os.environ.get("NCCL_COMM_BLOCKING", "") not in ("", "-1"):
        found.append(
            "NCCL_COMM_BLOCKING is set and overrides how communicators are made: with 0 each exchange takes the "
            "host longer, with 1 connecting waits for peers without a limit; unset it"
        )
    if os.environ.get("NCCL_COMM_SPLIT_SHARE_RESOURCES", "0") == "1":
        found.append(
            "NCCL_COMM_SPLIT_SHARE_RESOURCES=1 ties the ends of communicators together; unset it"
        )
    return found


BACKEND = BackendSpec(
    name="nccl",
    api_version=1,
    summary="NCCL on a communicator of its own; one GPU per rank, any number of hosts",
    capabilities=Capabilities(device_types=("cuda",), cuda_graph=True, cross_host=True),
    probe=_probe,
    create=_create,
    advice=_advice,
    install="pip install cptransport-nccl",
)
