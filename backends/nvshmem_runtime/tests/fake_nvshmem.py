# SPDX-License-Identifier: Apache-2.0
"""The two NVSHMEM backends on the CPU, for ranks that are processes: ``fake_nvshmem:SIGNAL`` and ``:BARRIER``.

Real are the backends' own code, the runtime and ``OneSidedTransport``; stand-ins are the bindings, the
kernels and the few calls of ``torch.cuda``. Importing this puts them in place.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import types
from dataclasses import replace
from typing import Any

import fake_bindings
import host_signals
import torch

import cptransport.onesided
import cptransport_kernels
import cptransport_nvshmem_barrier
import cptransport_nvshmem_runtime
import cptransport_nvshmem_runtime.runtime
import cptransport_nvshmem_signal
from cptransport.backend import BackendSpec


class _Cuda:
    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def synchronize(self, device: Any) -> None:
        pass

    def current_device(self) -> int:
        return 0

    def is_current_stream_capturing(self) -> bool:
        return False


class _Pinned:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def pin_memory(self) -> torch.Tensor:
        return self._tensor


class _Torch:
    cuda = _Cuda()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *args: Any) -> torch.device:
        return torch.device("cpu") if args[0] == "cuda" else torch.device(*args)

    def zeros(self, *args: Any, **kwargs: Any) -> Any:
        made = torch.zeros(*args, **kwargs)
        return made if "device" in kwargs else _Pinned(made)


def _line(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.uint8)


def _put_in_place() -> None:
    nvshmem = types.ModuleType("nvshmem")
    nvshmem.bindings = fake_bindings  # type: ignore[attr-defined]
    sys.modules.update({"nvshmem": nvshmem, "nvshmem.bindings": fake_bindings})
    cptransport_kernels.signals = host_signals
    sys.modules["cptransport_kernels.signals"] = host_signals  # type: ignore[assignment]
    runtime: Any = cptransport_nvshmem_runtime.runtime
    runtime.bindings = lambda: fake_bindings
    runtime._line = _line
    package: Any = cptransport_nvshmem_runtime
    package.missing = lambda device: None
    onesided: Any = cptransport.onesided
    onesided.still_used = lambda memory: None
    runtime.torch = package.torch = onesided.torch = _Torch()


def _on_cpu(spec: BackendSpec) -> BackendSpec:
    claims = replace(spec.capabilities, device_types=("cpu",), cuda_graph=False)

    def create(group: Any, device: Any, timeout_s: float, **options: Any) -> Any:
        made: Any = spec.create(group, torch.device("cpu"), timeout_s, **options)
        made.capabilities = claims
        return made

    return replace(
        spec, capabilities=claims, probe=lambda group, device: None, create=create, advice=None
    )


_put_in_place()
SIGNAL = _on_cpu(cptransport_nvshmem_signal.BACKEND)
BARRIER = _on_cpu(cptransport_nvshmem_barrier.BACKEND)
