# SPDX-License-Identifier: Apache-2.0
"""The few NCCL calls that the transport makes, on a communicator of its own.

``ctypes`` on the NCCL that torch has already loaded, so that there is one NCCL in the process.

The first communicator is non-blocking: making it, and splitting others off it, waits for peers, NCCL returns
"in progress", and the host waits with a deadline. What is issued goes to blocking ones: NCCL issues each
group of a non-blocking communicator from a thread that it makes for it, and waiting for that would take the
host several times as long as issuing the group does.

Source: the NCCL 2.18+ API reference, "Communicator creation and management" and "Point to point"; for who
waits where, ``group.cc`` and ``init.cc`` of 2.28.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from weakref import WeakSet

__all__ = ["Communicator", "NcclError", "Origin", "Wait", "join_within", "unique_id"]

#: ``wait(arrived, what)`` waits on the host with a deadline, see ``TransportBase``; may raise.
Wait = Callable[[Callable[[float], bool], str], None]

_SUCCESS, _IN_PROGRESS = 0, 7
#: Unhandled CUDA error, invalid argument, invalid usage: nobody else's doing.
_LOCAL = (1, 4, 5)
_UINT8, _SUM = 1, 0
_NON_BLOCKING, _BLOCKING = 0, 1
_UNDEFINED = -(2**31)
_CONFIG_MAGIC, _CONFIG_VERSION = 0xCAFEBEEF, 21800
_ID_BYTES = 128

#: How long ending a communicator waits for a call that is in it.
_CALL_S = 0.5
#: How long the interpreter's exit may wait for what NCCL has begun to end.
_EXIT_S = 1.0
#: Threads that end communicators.
_ending: WeakSet[threading.Thread] = WeakSet()


class NcclError(RuntimeError):
    """An NCCL call failed; the message has NCCL's own text.

    Attributes:
        local: whether no other rank can be the cause.
    """

    def __init__(self, text: str, code: int = _SUCCESS) -> None:
        super().__init__(text)
        self.local = code in _LOCAL


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * _ID_BYTES)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.18; newer libraries take it by its size and version."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    ]


@lru_cache(maxsize=1)
def _library() -> Any:
    nccl = ctypes.CDLL("libnccl.so.2")
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures: dict[str, list[Any]] = {
        "ncclGetUniqueId": [ctypes.POINTER(_UniqueId)],
        "ncclCommInitRankConfig": [
            ctypes.POINTER(pointer),
            integer,
            _UniqueId,
            integer,
            ctypes.POINTER(_Config),
        ],
        "ncclCommSplit": [
            pointer,
            integer,
            integer,
            ctypes.POINTER(pointer),
            ctypes.POINTER(_Config),
        ],
        "ncclCommGetAsyncError": [pointer, ctypes.POINTER(integer)],
        "ncclCommDestroy": [pointer],
        "ncclCommAbort": [pointer],
        "ncclGroupStart": [],
        "ncclGroupEnd": [],
        "ncclSend": [pointer, size, integer, integer, pointer, pointer],
        "ncclRecv": [pointer, size, integer, integer, pointer, pointer],
        "ncclAllGather": [pointer, pointer, size, integer, pointer, pointer],
        "ncclAllReduce": [pointer, pointer, size, integer, integer, pointer, pointer],
    }
    for name, arguments in signatures.items():
        function = getattr(nccl, name)
        function.argtypes, function.restype = arguments, integer
    nccl.ncclGetErrorString.argtypes, nccl.ncclGetErrorString.restype = [integer], ctypes.c_char_p
    nccl.ncclGetLastError.argtypes, nccl.ncclGetLastError.restype = [pointer], ctypes.c_char_p
    return nccl


def _config(blocking: int, channels: int | None) -> _Config:
    return _Config(
        size=ctypes.sizeof(_Config),
        magic=_CONFIG_MAGIC,
        version=_CONFIG_VERSION,
        blocking=blocking,
        cga_cluster_size=_UNDEFINED,
        min_ctas=_UNDEFINED,
        max_ctas=_UNDEFINED if channels is None else channels,
        net_name=None,
        split_share=_UNDEFINED,
    )


def unique_id() -> bytes:
    """Return a fresh id that all ranks of a new communicator must be given."""
    made = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(made)), None, "ncclGetUniqueId")
    return bytes(made)


def _check(code: int, handle: Any, what: str) -> None:
    if code not in (_SUCCESS, _IN_PROGRESS):
        library = _library()
        text = library.ncclGetErrorString(code).decode()
        last = library.ncclGetLastError(handle).decode().strip()
        raise NcclError(f"{what}: {text}" + (f" ({last})" if last else ""), code)


class _Ended:
    """A communicator of NCCL's and how it ends."""

    def __init__(self) -> None:
        self._handle = ctypes.c_void_p()
        # Held while it is looked at or taken away: the watchdog's thread aborts it.
        self._using = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()

    @property
    def alive(self) -> bool:
        """Whether it was neither aborted nor destroyed."""
        return bool(self._handle)

    def failure(self) -> str | None:
        """Return what went wrong in the background, or None."""
        found = self._state()
        if found in (_SUCCESS, _IN_PROGRESS):
            return None
        return str(_library().ncclGetErrorString(found).decode())

    def abort(self, held: object) -> threading.Thread | None:
        """Begin to end everything under way and free it, without the peers.

        Args:
            held: what NCCL may still write to; lives until it has ended.

        Returns:
            The thread that does; None: it was begun before. It can take for ever: freeing memory
            waits for all kernels of the device, so abort all communicators before you wait for one,
            and NCCL waits for all graphs that hold its work, such as the one being captured.
        """
        return self._take_away("ncclCommAbort", held)

    def destroy(self) -> threading.Thread | None:
        """Begin to free it, after all work on it has ended.

        Returns:
            The thread that does, without the peers; None: it was aborted. A thread of NCCL's looks only
            twice a second whether it is to end, so free all communicators before you wait for one. What it
            frees would break a capture of any thread.
        """
        return self._take_away("ncclCommDestroy", None)

    def _take_away(self, call: str, held: object) -> threading.Thread | None:
        with self._using:
            handle, self._handle = self._handle, ctypes.c_void_p()
        if not handle:
            return None

        def end(held: object) -> None:
            # What a call works on should not be freed under it; but it may be waiting for just that.
            self._idle.wait(_CALL_S)
            getattr(_library(), call)(handle)
            self._gone()

        thread = threading.Thread(target=end, args=(held,), name="cpt-nccl-end", daemon=True)
        thread.start()
        _ending.add(thread)
        return thread

    def _gone(self) -> None:
        """What is left to do when it has ended."""

    def _await(self, code: int, what: str, wait: Wait) -> None:
        """Wait until what a call began has ended."""
        _check(code, self._handle, what)
        wait(self._settled, what)
        problem = self.failure()
        if problem is not None:
            raise NcclError(f"{what}: {problem}")

    def _settled(self, seconds: float) -> bool:
        start = time.monotonic()
        while self._state() == _IN_PROGRESS:
            waited = time.monotonic() - start
            if waited > seconds:
                return False
            time.sleep(0.0002)
        if not self.alive:
            raise NcclError("the communicator was aborted")
        return True

    def _state(self) -> int:
        """Return NCCL's code for what is under way; success if there is nothing any more."""
        state = ctypes.c_int()
        with self._using:
            if not self._handle:
                return _SUCCESS
            code = int(_library().ncclCommGetAsyncError(self._handle, ctypes.byref(state)))
        return code if code not in (_SUCCESS, _IN_PROGRESS) else state.value


class Origin(_Ended):
    """The communicator that all others of a transport are split off; nothing is issued on it.

    Args:
        identity: from ``unique_id`` of one rank, the same on all.
        rank, world_size: position in it.

    Collective: over all its ranks, as ``split``. The current CUDA device must be this rank's.

    Making it only begins; ``complete`` waits for that.
    """

    def __init__(self, identity: bytes, rank: int, world_size: int) -> None:
        super().__init__()
        self._rank = rank
        self._last: Communicator | None = None
        self._begun = _library().ncclCommInitRankConfig(
            ctypes.byref(self._handle),
            world_size,
            _UniqueId.from_buffer_copy(identity),
            rank,
            ctypes.byref(_config(_NON_BLOCKING, 1)),
        )

    def complete(self, wait: Wait) -> None:
        """Wait until all ranks have made it; before its first use."""
        self._await(self._begun, "ncclCommInitRankConfig", wait)

    def split(self, channels: int | None, wait: Wait) -> Communicator:
        """Return a new communicator of the same ranks.

        Args:
            channels: the most that it may use; None: NCCL's choice. Every channel takes pinned host
                memory, connections and time to make.
            wait: as ``Wait`` says.
        """
        self._last = made = Communicator()
        self._idle.clear()
        try:
            code = _library().ncclCommSplit(
                self._handle,
                0,
                self._rank,
                ctypes.byref(made._handle),
                ctypes.byref(_config(_BLOCKING, channels)),
            )
        finally:
            self._idle.set()
        self._await(code, "ncclCommSplit", wait)
        return made

    def _gone(self) -> None:
        if self._last is not None:  # it may have been split off just before
            self._last.abort(None)


class Communicator(_Ended):
    """One NCCL communicator of this process, from ``Origin.split``.

    NCCL makes most connections in its first group.
    """

    @contextmanager
    def group(self) -> Iterator[None]:
        """Issue the calls inside as one operation.

        The first one of a communicator holds the host up until all ranks have come to theirs, or until
        it is aborted.
        """
        library = _library()
        self._idle.clear()
        try:
            _check(library.ncclGroupStart(), self._handle, "ncclGroupStart")
            try:
                yield
            finally:
                code = library.ncclGroupEnd()
            _check(code, self._handle, "ncclGroupEnd")
            if code == _IN_PROGRESS:  # NCCL_COMM_BLOCKING=0 makes it so
                self._await(code, "ncclGroupEnd", _for_ever)
        finally:
            self._idle.set()

    def send(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Send bytes to a rank; inside ``group``."""
        code = _library().ncclSend(address, nbytes, _UINT8, peer, self._handle, stream)
        _check(code, self._handle, "ncclSend")

    def receive(self, address: int, nbytes: int, peer: int, stream: int) -> None:
        """Receive bytes from a rank; inside ``group``."""
        code = _library().ncclRecv(address, nbytes, _UINT8, peer, self._handle, stream)
        _check(code, self._handle, "ncclRecv")

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Gather ``nbytes`` of every rank, rank-major, own included; inside ``group``."""
        code = _library().ncclAllGather(source, target, nbytes, _UINT8, self._handle, stream)
        _check(code, self._handle, "ncclAllGather")

    def all_reduce(self, address: int, nbytes: int, stream: int) -> None:
        """Add bytes over ranks, in place; inside ``group``. Used as a barrier."""
        code = _library().ncclAllReduce(
            address, address, nbytes, _UINT8, _SUM, self._handle, stream
        )
        _check(code, self._handle, "ncclAllReduce")


def _for_ever(arrived: Callable[[float], bool], what: str) -> None:
    while not arrived(1.0):
        pass


def join_within(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait for threads, for so long in all."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))


@atexit.register
def _leave() -> None:
    """Let aborts end the kernels before the process does; under MPS one that runs on would take others with it."""
    join_within(tuple(_ending), _EXIT_S)
