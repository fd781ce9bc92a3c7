# SPDX-License-Identifier: Apache-2.0
"""Backend ``cupy_ipc``: the descriptor; its transport is not implemented yet."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NoReturn

import torch

from cptransport.backend import BackendSpec
from cptransport.errors import BackendUnavailableError
from cptransport.transport import Capabilities

__all__ = ["BACKEND", "__version__"]

try:
    __version__ = version("cptransport-cupy-ipc")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"

_INSTALL = "pip install 'cptransport-cupy-ipc[cu13]' (or [cu12], for CUDA 12)"


def _why_not(device: torch.device) -> str:
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if find_spec("cupy") is None:
        return f"CuPy is not installed: {_INSTALL}"
    return f"cptransport-cupy-ipc {__version__} does not implement its transport yet"


def _probe(group: Any, device: torch.device) -> str | None:
    return _why_not(device)


def _create(group: Any, device: torch.device, timeout_s: float, **options: Any) -> NoReturn:
    raise BackendUnavailableError(_why_not(device))


BACKEND = BackendSpec(
    name="cupy_ipc",
    api_version=1,
    summary="CUDA IPC through CuPy: peers' memory in place, one host",
    capabilities=Capabilities(device_types=("cuda",), shared_device=True, in_place=True),
    probe=_probe,
    create=_create,
    install=_INSTALL,
)
