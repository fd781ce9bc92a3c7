# SPDX-License-Identifier: Apache-2.0
"""nvshmem4py's bindings, and the NVSHMEM library that they call.

Only ``nvshmem.bindings`` is used: it needs NumPy and the library, while ``nvshmem.core`` also wants
``cuda.core`` and sets up logging on standard output. The bindings find the library by its name among
what the process has loaded, so it is loaded here first: torch's own copy if torch has loaded one,
else that of the wheel ``nvidia-nvshmem-cu*``, else whatever the dynamic linker finds.

Three calls are made without the bindings: those that meet all PEs and hold the interpreter's lock
meanwhile there (nvshmem4py 0.4.1), so that nothing else of the process would run while a rank is waited
for, no clock either.
"""

from __future__ import annotations

import ctypes
import os
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["bindings", "load_library"]

_NAME = "libnvshmem_host.so.3"


@lru_cache(maxsize=1)
def load_library() -> str | None:
    """Load NVSHMEM's host library into the process; return why that is not possible, or None."""
    problem = ""
    for name, mode in (
        (_NAME, os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL),
        *((str(path), ctypes.RTLD_GLOBAL) for path in _wheel_paths()),
        (_NAME, ctypes.RTLD_GLOBAL),
    ):
        try:
            ctypes.CDLL(name, mode=mode)
            return None
        except OSError as error:
            problem = str(error)
    return (
        f"NVSHMEM's library does not load ({problem}): pip install nvidia-nvshmem-cu13 "
        "(or nvidia-nvshmem-cu12, for CUDA 12)"
    )


def _wheel_paths() -> list[Path]:
    """Return where wheels of NVSHMEM put the library."""
    try:
        spec = find_spec("nvidia.nvshmem")
    except ModuleNotFoundError:  # no wheel of NVIDIA's at all
        return []
    folders = spec.submodule_search_locations if spec is not None else None
    paths = [Path(folder) / "lib" / _NAME for folder in folders or ()]
    return [path for path in paths if path.exists()]


class _Bindings:
    """Those of nvshmem4py, but for calls that hold the interpreter's lock while they meet all PEs.

    Args:
        module: ``nvshmem.bindings``.
        host: NVSHMEM's host library.
    """

    def __init__(self, module: Any, host: Any) -> None:
        self._module = module
        self._host = host
        host.nvshmem_malloc.argtypes = [ctypes.c_size_t]
        host.nvshmem_malloc.restype = ctypes.c_void_p
        host.nvshmem_free.argtypes = [ctypes.c_void_p]
        host.nvshmem_free.restype = host.nvshmemx_hostlib_finalize.restype = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def malloc(self, nbytes: int) -> int:
        """Return the address of symmetric memory; 0: the heap is full."""
        return self._host.nvshmem_malloc(nbytes) or 0

    def free(self, address: int) -> None:
        """Free what ``malloc`` gave."""
        self._host.nvshmem_free(address)

    def hostlib_finalize(self) -> None:
        """End NVSHMEM in this process, if nobody else has started it too."""
        self._host.nvshmemx_hostlib_finalize()


def bindings() -> Any:
    """Return the bindings, with the library loaded.

    Raises:
        RuntimeError: the library does not load.
        ImportError: the bindings do not.
    """
    problem = load_library()
    if problem is not None:
        raise RuntimeError(problem)
    from nvshmem import bindings as module

    return _Bindings(module, ctypes.CDLL(_NAME, mode=os.RTLD_NOLOAD | ctypes.RTLD_GLOBAL))
