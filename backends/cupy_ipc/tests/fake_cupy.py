# SPDX-License-Identifier: Apache-2.0
"""The ``cupy_ipc`` backend on the CPU, for ranks that are processes: ``fake_cupy:BACKEND``.

Real are the backend's own code and ``OneSidedTransport``; stand-ins are the kernels, the few calls of
``torch.cuda``, and ``cupy.cuda.runtime`` over files in shared memory. As CUDA does it: ``malloc``
cuts its memory from allocations of the driver, a handle names such an allocation, opening one twice
gives the same address, and memory that somebody maps must not be freed (the process ends).

Variables: ``FAKE_CUPY_FOLDER`` (of the files), ``FAKE_CUPY_FAILS=CALL:RANK`` (that call fails there),
``FAKE_CUPY_NO_ACCESS=1`` (no peer access), ``FAKE_CUPY_HOST`` (name of this host), ``FAKE_CUPY_GPUS=N``
(how many this process sees; rank r has number r mod N).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import types
import uuid
from dataclasses import replace
from typing import Any

import host_cuda
import torch
import torch.distributed as dist

_DRIVER_BYTES = 8 << 20
_HEADER = 4096  # a cell per rank counts how often it maps it

#: What was called, for tests.
calls: list[str] = []


class CUDARuntimeError(RuntimeError):
    pass


class _Allocation:
    """A file in shared memory: what the driver allocates and handles name."""

    def __init__(self, name: str, nbytes: int = 0) -> None:
        self.name = name
        path = os.path.join(os.environ["FAKE_CUPY_FOLDER"], name)
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        if nbytes:
            os.ftruncate(descriptor, _HEADER + nbytes)
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        os.close(descriptor)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.start, self.nbytes = start + _HEADER, len(self._map) - _HEADER
        self.mapped = (ctypes.c_int64 * 64).from_address(start)  # by rank: no two add to one cell
        self.used: dict[int, int] = {}

    def close(self) -> None:
        self._map.close()


_own: list[_Allocation] = []
_opened: dict[bytes, list[Any]] = {}  # handle -> allocation, users


def _called(name: str) -> None:
    calls.append(name)
    if os.environ.get("FAKE_CUPY_FAILS") == f"{name}:{dist.get_rank()}":
        raise CUDARuntimeError(f"cudaErrorUnknown: {name}")


def _holder(address: int) -> _Allocation:
    return next(a for a in _own if a.start <= address < a.start + a.nbytes)


def malloc(size: int) -> int:
    _called("malloc")
    for allocation in _own:
        offset = max((at + count for at, count in allocation.used.items()), default=0)
        if offset + size <= allocation.nbytes:
            break
    else:
        allocation = _Allocation(uuid.uuid4().hex, max(size, _DRIVER_BYTES))
        _own.append(allocation)
        offset = 0
    allocation.used[offset] = size
    return allocation.start + offset


def free(address: int) -> None:
    _called("free")
    allocation = _holder(address)
    if any(allocation.mapped) and len(allocation.used) == 1:
        print("fake CuPy: freed while it is mapped", file=sys.stderr, flush=True)
        os._exit(255)
    del allocation.used[address - allocation.start]
    if not allocation.used:
        _own.remove(allocation)
        os.unlink(os.path.join(os.environ["FAKE_CUPY_FOLDER"], allocation.name))
        allocation.close()


def ipcGetMemHandle(address: int) -> bytes:
    _called("ipcGetMemHandle")
    return _holder(address).name.encode().ljust(64, b"\0")


def ipcOpenMemHandle(handle: bytes, flags: int) -> int:
    _called("ipcOpenMemHandle")
    entry = _opened.setdefault(handle, [None, 0])
    if entry[1] == 0:
        entry[0] = _Allocation(handle.rstrip(b"\0").decode())
        entry[0].mapped[dist.get_rank()] += 1
    entry[1] += 1
    return int(entry[0].start)


def ipcCloseMemHandle(address: int) -> None:
    _called("ipcCloseMemHandle")
    handle = next(h for h, (allocation, _) in _opened.items() if allocation.start == address)
    entry = _opened[handle]
    entry[1] -= 1
    if entry[1] == 0:
        entry[0].mapped[dist.get_rank()] -= 1
        entry[0].close()
        del _opened[handle]


class _Cuda(host_cuda.Cuda):
    def device_count(self) -> int:
        return int(os.environ.get("FAKE_CUPY_GPUS", "1"))

    def current_device(self) -> int:
        return dist.get_rank() % self.device_count()

    def get_device_properties(self, device: Any) -> Any:
        index = device if isinstance(device, int) else self.current_device()
        return types.SimpleNamespace(uuid=f"GPU-{index}")


def _put_in_place() -> None:
    runtime: Any = types.ModuleType("cupy.cuda.runtime")
    for function in (malloc, free, ipcGetMemHandle, ipcOpenMemHandle, ipcCloseMemHandle):
        setattr(runtime, function.__name__, function)
    runtime.cudaIpcMemLazyEnablePeerAccess = 1
    runtime.setDevice = lambda index: None
    runtime.deviceCanAccessPeer = lambda a, b: os.environ.get("FAKE_CUPY_NO_ACCESS") != "1"
    cuda: Any = types.ModuleType("cupy.cuda")
    cuda.runtime = runtime
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = cuda
    sys.modules.update({"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.runtime": runtime})

    import cptransport_cupy_ipc.memory as memory
    import cptransport_cupy_ipc.transport as transport

    host_cuda.put_in_place(memory, transport, cuda=_Cuda())
    places: Any = transport
    places._host = lambda: os.environ.get("FAKE_CUPY_HOST", "here")
    driver: Any = memory
    driver.allocation_start = lambda address: _holder(address).start


_put_in_place()

from cptransport_cupy_ipc import BACKEND as SPEC  # noqa: E402

_CLAIMS = replace(SPEC.capabilities, device_types=("cpu",), cuda_graph=False)


def _create(group: Any, device: Any, timeout_s: float, **options: Any) -> Any:
    from cptransport_cupy_ipc.transport import create

    made: Any = create(group, torch.device("cpu"), timeout_s, **options)
    made.capabilities = _CLAIMS
    return made


BACKEND = replace(SPEC, capabilities=_CLAIMS, probe=lambda group, device: None, create=_create)
