# SPDX-License-Identifier: Apache-2.0
"""Backend ``cudnn_summary`` and engine ``cudnn``. Importing this loads no cuDNN.

The transport gathers summaries densely and needs no cuDNN; the engine computes KDA with cuDNN and
runs on any transport. Each is the other's best partner.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from cptransport.backend import BackendSpec, Variable
from cptransport.errors import BackendUnavailableError
from cptransport.transport import BoundaryTransport, Capabilities

__all__ = ["BACKEND", "__version__"]

try:
    __version__ = version("cptransport-cudnn-summary")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def _why_not(device: torch.device) -> str | None:
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    if device.type not in BACKEND.capabilities.device_types:
        return f"needs a CPU or CUDA device, not {device}"
    if find_spec("cptransport_nccl") is None:
        return "cptransport-nccl is not installed: pip install cptransport-nccl"
    if device.type == "cpu":
        available = torch.distributed.is_gloo_available()
        return None if available else "this torch was built without gloo"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not torch.distributed.is_nccl_available():
        return "this torch was built without NCCL"
    from cptransport_cudnn_summary.library import why_not_required

    return why_not_required()


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(torch.device(device))


def _create(
    group: Any, device: torch.device, timeout_s: float, **options: Any
) -> BoundaryTransport:
    reason = _why_not(torch.device(device))
    if reason is not None:
        raise BackendUnavailableError(reason)
    from cptransport_cudnn_summary.transport import create

    return create(group, device, timeout_s, **options)


def _details(device: torch.device) -> list[str]:
    from cptransport_cudnn_summary.library import describe

    return describe(torch.device(device))


BACKEND = BackendSpec(
    name="cudnn_summary",
    api_version=1,
    summary="typed all-gathers of summaries into one workspace, made for cuDNN's KDA",
    capabilities=Capabilities(
        device_types=("cpu", "cuda"), pairwise=False, cross_host=True, dense=True
    ),
    probe=_probe,
    create=_create,
    variables=(
        Variable(
            "CULA_CP_CUDNN_CONCAT",
            "auto",
            ("auto", "require", "off"),
            "cuDNN composes the summaries itself (its concatenated-summary API): where it can, or an "
            "error, or never",
        ),
        Variable(
            "CULA_CP_CUDNN_INTERIOR",
            "auto",
            ("auto", "summary", "identity", "triton"),
            "how engine cudnn summarises interior segments: cuDNN's summary ops, its forward from the "
            "identity, or the triton engine's forward; auto takes the first that serves",
        ),
    ),
    preferred_engine="cudnn",
    install="pip install 'cptransport-cudnn-summary[cu13]'",
    details=_details,
)
