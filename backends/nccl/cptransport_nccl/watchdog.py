# SPDX-License-Identifier: Apache-2.0
"""Ends waits inside NCCL: a host thread that watches work on communication streams, and calls into NCCL, and
aborts what passed its deadline.

Progress of a stream is a number in pinned memory that the stream itself writes after each piece of
work, so the thread makes no CUDA call that a graph capture elsewhere in the process would forbid.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from cptransport.backend import write_value

__all__ = ["Watchdog", "Work", "work_name"]

_POLL_S = 0.05
_LOOK_S = 1.0


@dataclass(frozen=True)
class Work:
    """One group of operations on the stream, or the call that issues it.

    Attributes:
        number: 1, 2, ..., in stream order; 0 for a call.
        slot, generation: what it belongs to; no slot for a barrier, whose generation counts them.
        peers: ranks that it waits for.
        started: host time when it was issued.
    """

    number: int
    slot: str | None
    generation: int
    peers: tuple[int, ...]
    started: float

    @property
    def name(self) -> str:
        """The same on all ranks that take part."""
        return work_name(self.slot, self.generation)


def work_name(slot: str | None, generation: int) -> str:
    """Name the work of a generation, or of a barrier, alike on all ranks."""
    return f"{slot or ''}/{generation}"


class _Lane:
    """One stream: how much was issued on it, how much is done, what is pending."""

    def __init__(self) -> None:
        self.issued = 0
        self.pending: deque[Work] = deque()
        self._progress = torch.zeros(1, dtype=torch.int64).pin_memory()
        self.address = self._progress.data_ptr()
        self._view = ctypes.c_int64.from_address(self.address)

    def oldest(self) -> Work | None:
        """Forget what is done; return the first that is not."""
        while self.pending and self.pending[0].number <= self._view.value:
            self.pending.popleft()
        return self.pending[0] if self.pending else None


class Watchdog:
    """Watches the communication streams of one transport.

    Args:
        timeout_s: limit of each piece of work.
        failed: asked with the oldest pending work: an error of peers or of a communicator, or None.
        late: called on the thread with work that has used half of its time.
        expired: called on the thread with the oldest work and the error (None: the deadline
            passed). Afterwards the thread ends.
        look: called on the thread now and then while there is work.
    """

    def __init__(
        self,
        timeout_s: float,
        failed: Callable[[Work], BaseException | None],
        late: Callable[[Work], None],
        expired: Callable[[Work, BaseException | None], None],
        look: Callable[[], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._failed = failed
        self._late = late
        self._expired = expired
        self._look = look
        self._looked = time.monotonic()
        self._lanes: dict[int, _Lane] = {}
        self._calls: list[Work] = []
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._main, name="cpt-nccl-watchdog", daemon=True)
        self._thread.start()

    def watch(self, stream: int, slot: str | None, generation: int, peers: tuple[int, ...]) -> None:
        """Watch what was issued on the stream so far."""
        lane = self._lanes.get(stream) or self._lanes.setdefault(stream, _Lane())
        lane.issued += 1
        write_value(stream, lane.address, lane.issued)
        lane.pending.append(Work(lane.issued, slot, generation, peers, time.monotonic()))
        self._wake.set()

    @contextmanager
    def call(self, slot: str | None, generation: int, peers: tuple[int, ...]) -> Iterator[None]:
        """Watch what the host does inside: NCCL may hold it up, as on a stream that has no room."""
        work = Work(0, slot, generation, peers, time.monotonic())
        self._calls.append(work)
        self._wake.set()
        try:
            yield
        finally:
            self._calls.remove(work)

    def stop(self) -> None:
        """End the thread; what is pending is no longer watched."""
        self._stopped = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        told: Work | None = None
        while not self._stopped:
            self._wake.wait()
            self._wake.clear()
            self._look_around()
            while not self._stopped and (oldest := self._oldest()) is not None:
                waited = time.monotonic() - oldest.started
                asks = waited > min(2 * _POLL_S, self._timeout_s / 4)
                error = self._failed(oldest) if asks else None
                if error is not None or waited > self._timeout_s:
                    self._stopped = True
                    self._expired(oldest, error)
                    return
                if waited > self._timeout_s / 2 and told is not oldest:
                    told = oldest
                    self._late(oldest)
                time.sleep(min(_POLL_S, self._timeout_s / 8))
                self._look_around()

    def _look_around(self) -> None:
        if time.monotonic() - self._looked > _LOOK_S:
            self._looked = time.monotonic()
            self._look()

    def _oldest(self) -> Work | None:
        """Return what has been pending longest, on any stream or on the host."""
        found = [work for lane in tuple(self._lanes.values()) if (work := lane.oldest())]
        found += tuple(self._calls)
        return min(found, key=lambda work: work.started, default=None)
