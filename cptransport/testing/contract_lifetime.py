# SPDX-License-Identifier: Apache-2.0
"""Contract tests: creation, close in every state, and nothing that grows."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cptransport.errors import PeerFailedError, TransportClosedError, TransportTimeoutError
from cptransport.testing.contract_base import GRACE_S, ContractTests, Figures, clause
from cptransport.testing.contract_bytes import exchange_all
from cptransport.testing.contract_order import complete
from cptransport.testing.oracle import assert_bytes, fill
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["LifetimeContract"]

_PART = PartSpec("x", (300,), torch.float32)
_SLOT = Slot("living", (_PART,))


def _all_verbs_closed(transport: BoundaryTransport) -> None:
    verbs: list[Callable[[], object]] = [
        lambda: transport.stage(_SLOT),
        lambda: transport.publish(_SLOT),
        lambda: transport.fetch(_SLOT, "x", source=0),
        lambda: transport.gather(_SLOT),
        transport.barrier,
        transport.check,
    ]
    for verb in verbs:
        with pytest.raises(TransportClosedError):
            verb()


def _close_states(ranks: Ranks) -> None:
    """Close after each verb, twice, and use afterwards."""

    def staged(transport: BoundaryTransport) -> None:
        transport.stage(_SLOT)

    def published(transport: BoundaryTransport) -> None:
        fill(transport, _SLOT, 1)
        transport.publish(_SLOT, to=[ranks.rank])

    def taken(transport: BoundaryTransport) -> None:
        exchange_all(transport, _SLOT, 1)

    def staged_again(transport: BoundaryTransport) -> None:
        exchange_all(transport, _SLOT, 1)
        transport.stage(_SLOT)

    def fenced(transport: BoundaryTransport) -> None:
        transport.barrier()

    for bring in (lambda transport: None, staged, published, taken, staged_again, fenced):
        transport = ranks.create()
        bring(transport)
        transport.close()
        _all_verbs_closed(transport)
        transport.close()
        assert transport.stats().bytes_sent >= 0  # what was counted stays readable


def _close_while_read(ranks: Ranks, delay_s: float) -> None:
    """Rank 0 publishes and closes at once; the others take what it sent later."""
    transport = ranks.create()
    routes = frozenset((0, d) for d in range(1, ranks.world_size))
    part = PartSpec("x", (100_000,), torch.float32, routes)
    slot = Slot("last words", (part,))
    fill(transport, slot, 1)
    if ranks.rank == 0 or not transport.capabilities.pairwise:
        transport.publish(slot)
    if ranks.rank != 0:
        time.sleep(delay_s * ranks.rank / ranks.world_size)
        got = transport.fetch(slot, "x", source=0)
        assert_bytes(got, part, rank=0, slot=slot.name, generation=1)
    transport.close()


def _close_while_waited_for(ranks: Ranks, limit_s: float) -> None:
    """Rank 0 closes in place of publishing; whoever waits for it gets an error in time, and everybody can close."""
    transport = ranks.create(timeout_s=limit_s)
    exchange_all(transport, _SLOT, 1)
    start = time.monotonic()
    if ranks.rank != 0:
        with pytest.raises((TransportTimeoutError, PeerFailedError)):
            complete(transport, lambda: exchange_all(transport, _SLOT, 2))
    try:
        transport.close()
    except TransportTimeoutError:
        assert ranks.rank == 0  # the others have seen an error already
    assert time.monotonic() - start < 2 * (limit_s + GRACE_S)
    _all_verbs_closed(transport)
    transport.close()


#: Seconds before each look at what a process holds, until it holds no more than before: threads may
#: have been told to end, or be asking the store.
_PAUSES = (0.05, 0.2, 0.5, 1.0)


#: ``mallopt`` parameters of glibc, and the size from which freed memory goes back to the system at once.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GIVEN_BACK_BYTES = 128 << 10


def _give_back_what_is_freed() -> None:
    """Have malloc give large memory of every thread back when it is freed.

    Once a block of some MiB was freed, glibc keeps such blocks at the end of the arena of the thread that
    made them, up to 64 MiB in each, and ``malloc_trim`` gives back no arena's end but the main one's.
    A library that starts threads per transport then looks like a leak: NCCL's read the machine's
    topology into some MiB, in whichever arena a new thread is given.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _GIVEN_BACK_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _GIVEN_BACK_BYTES)


def _resident_kinds() -> str:
    with open("/proc/self/status") as stream:
        return ", ".join(" ".join(line.split()) for line in stream if line.startswith("Rss"))


def _handles() -> dict[str, int]:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # what malloc merely keeps is no leak
        ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as stream:
        resident = int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "file descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident bytes": resident,
    }


def _assert_no_growth(ranks: Ranks, work: Callable[[], None], **limits: int) -> None:
    """Run some work, all ranks together, and compare what the process holds before and after."""
    looks = ranks.processes or ranks.rank == 0  # one look per process, while nobody works
    ranks.sync()
    before = _handles() if looks else {}
    kinds = _resident_kinds() if looks else ""
    ranks.sync()
    work()
    ranks.sync()
    grown: dict[str, tuple[int, int]] = {}
    for pause in _PAUSES if looks else ():
        time.sleep(pause)
        after = _handles()
        grown = {
            name: (value, after[name])
            for name, value in before.items()
            if after[name] - value > limits[name.replace(" ", "_")]
        }
        if not grown:
            break
    ranks.sync()
    assert not grown, f"grew from, to: {grown}; from {kinds} to {_resident_kinds()}"


def _cycles(ranks: Ranks, cycles: int) -> None:
    """Create, use, close, many times: no handles, threads or memory are left behind."""
    part = PartSpec("x", (1 << 18,), torch.float32)  # 1 MiB, twice per rank and source
    slot = Slot("cycle", (part,))

    def cycle() -> None:
        transport = ranks.create()
        exchange_all(transport, slot, 1)
        exchange_all(transport, slot, 2)
        transport.close()
        ranks.forget(transport)

    def cycle_all() -> None:
        for _ in range(cycles):
            cycle()

    if ranks.processes:
        _give_back_what_is_freed()
    cycle_all()
    limit = cycles * ranks.world_size << 20  # a leak would be two to three times that
    _assert_no_growth(ranks, cycle_all, file_descriptors=2, threads=1, resident_bytes=limit)


def _rounds(ranks: Ranks, rounds: int) -> None:
    """Many generations of slots whose parts change: nothing grows."""
    transport = ranks.create()
    numbers = {"a": 0, "b": 0}

    def some(count: int) -> None:
        for turn in range(count):
            name = "ab"[turn % 2]
            numbers[name] += 1
            rows = 1 + turn % 5
            exchange_all(
                transport, Slot(name, (PartSpec("x", (rows, 512), torch.float32),)), numbers[name]
            )

    some(20)
    _assert_no_growth(
        ranks, lambda: some(rounds), file_descriptors=0, threads=0, resident_bytes=8 << 20
    )


def _again(ranks: Ranks) -> None:
    """A group serves a new transport after one that broke on it."""
    broken: Any = ranks.create(timeout_s=0.5)
    if ranks.rank == 0:
        with pytest.raises((TransportTimeoutError, PeerFailedError)):
            complete(broken, broken.barrier)
    else:
        time.sleep(0.8)
        with pytest.raises(PeerFailedError):
            complete(broken, broken.barrier)
    broken.close()
    transport = ranks.create()
    exchange_all(transport, _SLOT, 1)


class LifetimeContract(ContractTests):
    """Creation, closing, growth."""

    @clause("C32")
    def test_close_in_every_state(self, world_size: int) -> None:
        """Idempotent; verbs afterwards raise TransportClosedError; counters stay readable."""
        self.run(_close_states, world_size)

    @clause("C32", "C16", ranks=2)
    def test_close_while_a_peer_still_reads(self, world_size: int, figures: Figures) -> None:
        """What was published arrives although its sender has closed."""
        self.run(_close_while_read, world_size, delay_s=figures.delay_s)

    @clause("C32", "C28", ranks=2)
    def test_close_while_a_peer_waits(self, world_size: int) -> None:
        """The one that waits gets an error within the limit; everybody closes."""
        self.run(_close_while_waited_for, world_size, limit_s=1.0)

    @clause("C32")
    def test_create_and_close_leave_nothing_behind(self, world_size: int, figures: Figures) -> None:
        """File descriptors, threads, memory."""
        self.run(_cycles, world_size, watchdog_s=180.0, cycles=figures.cycles)

    @clause("C2", "C32")
    def test_many_rounds_without_growth(self, world_size: int, figures: Figures) -> None:
        """File descriptors, threads, memory."""
        self.run(_rounds, world_size, rounds=2 * figures.rounds)

    @clause("C28", "C36", ranks=2)
    def test_a_new_transport_after_a_broken_one(self, world_size: int) -> None:
        """A transport that broke does not spoil the group for the next one."""
        self.run(_again, world_size)
