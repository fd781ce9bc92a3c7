# SPDX-License-Identifier: Apache-2.0
"""``nvshmem.bindings`` over files in shared memory: NVSHMEM for processes without a GPU.

As NVSHMEM 3.4.5 and nvshmem4py 0.4.1 do it where that matters to their user: one heap per PE, of a
size fixed by ``NVSHMEM_SYMMETRIC_SIZE`` when it starts; ``malloc`` gives all PEs the same offset, meets
them all, and returns 0 where the heap is full; ``free`` and finalisation meet all PEs too, and all
such meetings last for ever; initialisation keeps a pointer to the unique id, counts its callers, and
reports success also when it could not set up a heap; a call too early, a wrong pointer or sizes that
differ between PEs end the process. A process that was PE 0 once and is not now leaves an error on the
thread that finalises it, and an initialisation on a thread with one ends the process.

Variables: ``FAKE_NVSHMEM_FOLDER`` (of the files), ``FAKE_NVSHMEM_NO_HEAP=PE`` (that PE only
bootstraps), ``FAKE_NVSHMEM_APART=PE`` (it is not addressable from others), ``FAKE_NVSHMEM_STATUS=N``
(what ``init_status`` says once it runs).
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import sys
import threading
import time
import uuid
from typing import NoReturn

import numpy as np

uniqueid_dtype = np.dtype([("version", np.int32), ("internal", np.int8, (124,))], align=True)
_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}
_ALIGNMENT = 512

#: What was called, for tests.
calls: list[str] = []


class NVSHMEMError(Exception):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__(f"Status code {status}")


class Flags(enum.IntEnum):
    INIT_WITH_UNIQUEID = 8


class Init_status(enum.IntEnum):  # noqa: N801
    STATUS_NOT_INITIALIZED = 0
    STATUS_IS_BOOTSTRAPPED = 1
    STATUS_IS_INITIALIZED = 2
    STATUS_LIMITED_MPG = 3
    STATUS_FULL_MPG = 4
    STATUS_INVALID = 32767


class uniqueid:  # noqa: N801
    def __init__(self) -> None:
        self._data = np.empty(1, dtype=uniqueid_dtype).view(np.recarray)

    @property
    def ptr(self) -> int:
        return int(self._data.ctypes.data)

    @staticmethod
    def from_data(data: np.ndarray) -> uniqueid:
        if data.ndim != 1 or data.dtype != uniqueid_dtype:
            raise ValueError("data array must be 1D of dtype uniqueid_dtype")
        made = uniqueid.__new__(uniqueid)
        made._data = data.view(np.recarray)
        return made


class InitAttr:
    def __init__(self) -> None:
        self._data = np.empty(144, dtype=np.int8)

    @property
    def ptr(self) -> int:
        return int(self._data.ctypes.data)


class _Memory:
    """A file in shared memory, mapped."""

    def __init__(self, name: str, nbytes: int) -> None:
        self.path = os.path.join(os.environ["FAKE_NVSHMEM_FOLDER"], name)
        descriptor = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        os.ftruncate(descriptor, nbytes)
        self._map = mmap.mmap(descriptor, nbytes)
        os.close(descriptor)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def close(self) -> None:
        self._map.close()


class _World:
    """The PEs of one initialisation, as one of them sees them."""

    def __init__(self, session: str, pe: int, pes: int) -> None:
        self.session, self.pe, self.pes = session, pe, pes
        self.table = _Memory(f"{session}-table", 4096)
        self.met = 0
        self.size = _size(os.environ.get("NVSHMEM_SYMMETRIC_SIZE", "1G"))
        self.heaps: list[_Memory] = []
        self.used: dict[int, int] = {}  # offset -> bytes

    def cell(self, row: int, pe: int) -> ctypes.c_int64:
        return ctypes.c_int64.from_address(self.table.base + 8 * (64 * row + pe))

    def meet(self) -> None:
        self.met += 1
        self.cell(0, self.pe).value = self.met
        while any(self.cell(0, pe).value < self.met for pe in range(self.pes)):
            time.sleep(0.0002)

    def open_heaps(self) -> None:
        names = [f"{self.session}-heap{pe}" for pe in range(self.pes)]
        self.heaps = [_Memory(name, self.size) for name in names]

    def close(self) -> None:
        self.meet()
        for memory in (self.table, *self.heaps):
            memory.close()
            if self.pe == 0:
                os.unlink(memory.path)

    def place(self, nbytes: int) -> int | None:
        """First fit; alike on all PEs, since they ask for the same."""
        start = 0
        for offset in sorted(self.used):
            if offset - start >= nbytes:
                break
            start = offset + self.used[offset]
        return start if start + nbytes <= self.size else None


_arguments: dict[int, tuple[int, int, int]] = {}  # attributes -> PE, PEs, address of the id
_world: _World | None = None
_heap = False
_callers = 0
_led = False
_last_error = threading.local()


def _size(text: str) -> int:
    unit = text[-1].lower()
    return int(float(text[:-1]) * 2 ** _UNITS[unit]) if unit in _UNITS else int(text)


def _exit(why: str) -> NoReturn:
    print(f"fake NVSHMEM: {why}", file=sys.stderr, flush=True)
    os._exit(255)


def _running(what: str) -> _World:
    calls.append(what)
    if _world is None or not _heap:
        _exit(f"{what} called before nvshmem_init")
    return _world


def get_uniqueid(address: int) -> None:
    calls.append("get_uniqueid")
    token = uuid.uuid4().hex.encode()
    ctypes.memmove(address, b"\1\0\0\0" + token.ljust(124, b"\0"), 128)


def set_attr_uniqueid_args(pe: int, pes: int, identity: int, attributes: int) -> None:
    _arguments[attributes] = (pe, pes, identity)


def hostlib_init_attr(flags: int, attributes: int) -> None:
    global _world, _heap, _callers, _led
    calls.append("hostlib_init_attr")
    pe, pes, identity = _arguments.pop(attributes)
    if flags != Flags.INIT_WITH_UNIQUEID or not 0 <= pe < pes:
        raise NVSHMEMError(7)
    _callers += 1
    if _world is not None:
        return
    token = ctypes.string_at(identity + 4, 32).decode()
    if hasattr(_last_error, "text"):
        _exit(_last_error.text)
    _led = _led or pe == 0
    _world = _World(f"nvshmem-{token}", pe, pes)
    _world.meet()
    _heap = os.environ.get("FAKE_NVSHMEM_NO_HEAP") != str(pe)
    if _heap:
        _world.open_heaps()


def hostlib_finalize() -> None:
    global _world, _heap, _callers
    world = _running("hostlib_finalize")
    _callers -= 1
    if _callers:
        return
    world.close()
    if _led and world.pe != 0:
        _last_error.text = "cuda failed with invalid argument"
    _world, _heap = None, False


def init_status() -> int:
    if _world is None:
        return Init_status.STATUS_NOT_INITIALIZED
    if not _heap:
        return Init_status.STATUS_IS_BOOTSTRAPPED
    return int(os.environ.get("FAKE_NVSHMEM_STATUS", Init_status.STATUS_IS_INITIALIZED))


def my_pe() -> int:
    return _running("my_pe").pe


def n_pes() -> int:
    return _running("n_pes").pes


def malloc(nbytes: int) -> int:
    world = _running("malloc")
    needed = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
    world.cell(1, world.pe).value = nbytes
    world.meet()
    if any(world.cell(1, pe).value != nbytes for pe in range(world.pes)):
        _exit("PEs asked for different sizes")
    offset = world.place(needed)
    if offset is None:
        return 0
    world.used[offset] = needed
    ctypes.memset(world.heaps[world.pe].base + offset, 0xA5, needed)
    return world.heaps[world.pe].base + offset


def free(address: int) -> None:
    world = _running("free")
    world.meet()
    if world.used.pop(address - world.heaps[world.pe].base, None) is None:
        _exit(f"free of {address:#x}, which malloc did not give")


def ptr(address: int, pe: int) -> int:
    world = _running("ptr")
    offset = address - world.heaps[world.pe].base
    if not 0 <= offset < world.size:
        return 0
    if pe != world.pe and os.environ.get("FAKE_NVSHMEM_APART") == str(pe):
        return 0
    return world.heaps[pe].base + offset
