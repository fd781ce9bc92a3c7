# SPDX-License-Identifier: Apache-2.0
"""What the two NVSHMEM backends share: so far, what this process lacks for NVSHMEM."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch

__all__ = ["__version__", "missing"]

try:
    __version__ = version("cptransport-nvshmem-runtime")
except PackageNotFoundError:  # on PYTHONPATH, not installed
    __version__ = "0+unknown"


def missing(device: torch.device) -> str | None:
    """Say what this process lacks first for NVSHMEM on a device, without importing NVSHMEM.

    Args:
        device: where the summaries live.

    Returns:
        The reason as one line, or None when nothing is missing.
    """
    if device.type != "cuda":
        return f"needs a CUDA device, not {device}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if find_spec("nvshmem") is None:
        return (
            "nvshmem4py is not installed: pip install 'cptransport-nvshmem-runtime[cu13]' "
            "(or [cu12], for CUDA 12)"
        )
    return None
