# SPDX-License-Identifier: Apache-2.0
"""Backend ``cudnn_summary``: the descriptor; its transport is not implemented yet."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import torch

from cptransport.backend import BackendSpec
from cptransport.errors import BackendUnavailableError
from cptransport.transport import Capabilities

__all__ = ["BACKEND", "__version__"]

try:
    __version__ = version("cptransport-cudnn-summary")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def _why_not(device: torch.device) -> str:
    # The transport is all-gathers of torch.distributed; cuDNN itself is what its engine needs.
    if not torch.distributed.is_available():
        return "this torch was built without torch.distributed"
    if device.type not in BACKEND.capabilities.device_types:
        return f"needs a CPU or CUDA device, not {device}"
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    return f"cptransport-cudnn-summary {__version__} does not implement its transport yet"


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(device)


def _create(group: Any, device: torch.device, timeout_s: float, **options: Any) -> NoReturn:
    raise BackendUnavailableError(_why_not(device))


BACKEND = BackendSpec(
    name="cudnn_summary",
    api_version=1,
    summary="typed all-gathers of summaries into one workspace, made for cuDNN's KDA",
    capabilities=Capabilities(device_types=("cpu", "cuda"), pairwise=False, cross_host=True),
    probe=_probe,
    create=_create,
    install="pip install 'cptransport-cudnn-summary[cu13]'",
)
