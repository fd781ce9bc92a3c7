# SPDX-License-Identifier: Apache-2.0
"""Which versions are here of all that may take part; nothing is imported to find out, nothing fails."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

import cptransport

__all__ = ["versions"]

#: Name -> the distributions that may provide it, the first that is installed counts.
_DISTRIBUTIONS = {
    "triton": ("triton", "pytorch-triton", "triton-windows"),
    "nvshmem": ("nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"),
    "nvshmem4py": ("nvshmem4py-cu13", "nvshmem4py-cu12"),
    "cudnn": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    "cudnn_frontend": ("nvidia-cudnn-frontend",),
    "cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "fla": ("flash-linear-attention", "fla-core"),
    "mamba_ssm": ("mamba-ssm",),
}


def versions() -> dict[str, str | None]:
    """Return versions by name; None for what is not here.

    torch says which CUDA, NCCL and cuDNN libraries it uses; those count before installed packages.
    """
    found: dict[str, str | None] = {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cptransport": cptransport.__version__,
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
    }
    for name, distributions in _DISTRIBUTIONS.items():
        found[name] = next((v for v in map(_installed, distributions) if v), None)
    if (number := torch.backends.cudnn.version()) is not None:
        found["cudnn"] = f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return found


def _installed(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _nccl() -> str | None:
    if not (torch.distributed.is_available() and torch.distributed.is_nccl_available()):
        return None
    try:
        return ".".join(str(number) for number in torch.cuda.nccl.version())
    except (AttributeError, RuntimeError):
        return None
