# SPDX-License-Identifier: Apache-2.0
"""The two NVSHMEM backends on the CPU, for ranks that are processes: ``fake_nvshmem:SIGNAL`` and ``:BARRIER``.

Real are the backends' own code, the runtime and ``OneSidedTransport``; stand-ins are the bindings
(``fake_bindings``), the kernels and the few calls of ``torch.cuda``. Importing this puts them in place.
"""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import fake_bindings
import host_cuda
import torch

import cptransport_nvshmem_barrier
import cptransport_nvshmem_runtime
import cptransport_nvshmem_runtime.meeting
import cptransport_nvshmem_runtime.runtime
import cptransport_nvshmem_signal
from cptransport.backend import BackendSpec


def _put_in_place() -> None:
    nvshmem: Any = types.ModuleType("nvshmem")
    nvshmem.bindings = fake_bindings
    sys.modules.update({"nvshmem": nvshmem, "nvshmem.bindings": fake_bindings})
    package: Any = cptransport_nvshmem_runtime
    package.missing = lambda device: None
    package.runtime.bindings = lambda: fake_bindings
    host_cuda.put_in_place(package, package.meeting, package.runtime)


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
