# SPDX-License-Identifier: Apache-2.0
"""What one-sided transports need of ``torch.cuda`` and of the kernels, on the host.

``put_in_place`` gives it to ``OneSidedTransport`` and to the modules of a backend; everything else of
them is real. For rank processes of tests alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import host_signals
import torch

import cptransport.onesided
import cptransport_kernels


class Cuda:
    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def init(self) -> None:
        pass

    def synchronize(self, device: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        return False

    def get_device_properties(self, device: Any) -> Any:
        return SimpleNamespace(uuid="GPU-0")


class _Pinned:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def pin_memory(self) -> torch.Tensor:
        return self._tensor


class _Torch:
    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *args: Any) -> torch.device:
        return torch.device("cpu") if args[0] == "cuda" else torch.device(*args)

    def zeros(self, *args: Any, **kwargs: Any) -> Any:
        made = torch.zeros(*args, **kwargs)
        return made if "device" in kwargs else _Pinned(made)


def bytes_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def put_in_place(*modules: Any, cuda: Cuda | None = None) -> None:
    """Replace torch and ``bytes_at`` in the modules, and the kernels for everybody."""
    cptransport_kernels.signals = host_signals
    sys.modules["cptransport_kernels.signals"] = host_signals
    onesided: Any = cptransport.onesided
    onesided.still_used = lambda memory: None
    onesided.capture_id = lambda device: 0
    for module in (onesided, *modules):
        module.torch = _Torch(cuda or Cuda())
        if hasattr(module, "bytes_at"):
            module.bytes_at = bytes_at
