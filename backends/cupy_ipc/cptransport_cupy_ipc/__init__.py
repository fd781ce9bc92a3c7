# SPDX-License-Identifier: Apache-2.0
"""Backend ``cupy_ipc``: peers read each other's memory on one host. Importing this loads no CuPy."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from cptransport.backend import BackendSpec
from cptransport.errors import BackendUnavailableError
from cptransport.transport import BoundaryTransport, Capabilities

__all__ = ["BACKEND", "CAPABILITIES", "__version__"]

try:
    __version__ = version("cptransport-cupy-ipc")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"

CAPABILITIES = Capabilities(
    device_types=("cuda",), cuda_graph=True, shared_device=True, in_place=True
)
_INSTALL = "pip install 'cptransport-cupy-ipc[cu13]' (or [cu12], for CUDA 12)"


def _why_not(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if find_spec("cupy") is None:
        return f"CuPy is not installed: {_INSTALL}"
    if find_spec("triton") is None:
        return "Triton is not installed: its kernels carry the signals"
    return None


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(torch.device(device))


def _create(
    group: Any, device: torch.device, timeout_s: float, **options: Any
) -> BoundaryTransport:
    reason = _why_not(torch.device(device))
    if reason is not None:
        raise BackendUnavailableError(reason)
    from cptransport_cupy_ipc.transport import create

    return create(group, device, timeout_s, **options)


BACKEND = BackendSpec(
    name="cupy_ipc",
    api_version=1,
    summary="CUDA IPC through CuPy: peers' memory in place, one host",
    capabilities=CAPABILITIES,
    probe=_probe,
    create=_create,
    install=_INSTALL,
)
