# SPDX-License-Identifier: Apache-2.0
"""The control plane of one transport: who raised where, and agreement of ranks, over a key-value store.

No collective. Every op call, forward and backward alike, is one *step*; all ranks number their
steps alike. A rank that raises leaves a record ``(step, rank, text, fatal)``; others look for
records whenever a wait does not end at once:

* a record of my current or an earlier step in which I did not raise myself: ``PeerFailedError``;
* a record of a later step: ignored, the peer has given all that my step needs;
* I raised in that step too, before staging anything: the transport stays usable once *every* rank
  has (``settle``).

A ``fatal`` record (raised after staging, a wait that failed, a rank that left) means that the rank
will not go on.

The store answers over a connection that can hang for ever, when its host is stopped or gone without
a word; so every call of it has a limit (``ControlPlane._ask``).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from cptransport.errors import PeerFailedError, TransportError, TransportTimeoutError
from cptransport.limited import LimitedCalls

__all__ = ["POLL_S", "ControlPlane", "creating", "fresh", "group_store"]

#: How long a host wait sleeps before it looks for records of peers again.
POLL_S = 0.02

#: How long a wait lets the store answer before it looks at its own clock again, and a rank that
#: failed lets it take the record; together less than what a wait may last beyond its limit.
_LOOK_S, _RECORD_S = 0.4, 1.0

T = TypeVar("T")

_counters: dict[tuple[str, str], int] = {}
_counters_lock = threading.Lock()
_local = threading.local()  # .attempt: name and counters of the attempt that this thread is in


@dataclass(frozen=True)
class _Record:
    step: int
    rank: int
    text: str
    fatal: bool

    @property
    def follows(self) -> bool:
        """Whether the rank was itself told of a failure; the one that failed first says more."""
        return self.text.startswith(PeerFailedError.__name__)


@contextlib.contextmanager
def creating(attempt: str) -> Iterator[None]:
    """Count fresh keys anew, under a name that the ranks agreed on, while a backend makes its transport.

    Ranks whose attempt failed at different points would else count differently for ever.
    """
    before = getattr(_local, "attempt", None)
    _local.attempt = (attempt, {})
    try:
        yield
    finally:
        _local.attempt = before


def fresh(owner: str, purpose: str, counters: dict[tuple[str, str], int] = _counters) -> str:
    """Return a key prefix that is new for every call, and alike on ranks that call equally often."""
    attempt, counters = getattr(_local, "attempt", None) or ("", counters)
    with _counters_lock:
        count = counters[owner, purpose] = counters.get((owner, purpose), -1) + 1
    return "/".join(part for part in (attempt, purpose, str(count)) if part)


def group_store(group: Any, purpose: str) -> Any:
    """Return a store that only the members of a process group share, fresh for every call in the group's order.

    Args:
        group: a ``torch.distributed`` process group, or None for the default one.
        purpose: first part of the keys' prefix.

    Collective: no communication, but all members must call it equally often per purpose.
    """
    from torch.distributed import distributed_c10d as c10d

    group = group if group is not None else dist.group.WORLD
    store = client_of_our_own(c10d._get_process_group_store(group))
    key = fresh(c10d._get_process_group_name(group), purpose)
    return c10d.PrefixStore(f"cptransport/{key}", store)


def client_of_our_own(store: Any) -> Any:
    """Return a store of the same keys where no wait of torch's blocks ours; before torch 2.8 the same one."""
    return store.clone() if hasattr(store, "clone") else store


class ControlPlane:
    """Abort records and agreement of one transport.

    Args:
        store: a ``torch.distributed`` store that exactly the transport's ranks share, with a prefix
            of its own.
        rank: this rank in the group.
        world_size: ranks of the group.
        timeout_s: limit of its own waits.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.step = 0
        self.staged = False  # did this rank stage anything in the current step
        self.compared: set[tuple[str, str]] = set()  # kinds of calls and engines, once compared
        self._records: dict[tuple[int, int], _Record] = {}
        self._read = 0  # records counted so far
        self._unread: list[int] = []  # of these, not seen yet
        self._raised: dict[int, bool] = {}  # own records: step -> fatal
        self._unsettled: int | None = None
        self._agreements = 0
        self._refreshing = threading.Lock()
        self._calls = LimitedCalls("cpt-store")

    def begin_step(self) -> int:
        """Open the next step (an op's forward or backward) and return its number."""
        self.step += 1
        self.staged = False
        return self.step

    def report(self, error: BaseException, *, fatal: bool) -> None:
        """Leave a record that this rank raised in its current step; never raises."""
        if self.world_size == 1 or self._raised.get(self.step):
            return
        self._raised[self.step] = fatal
        if not fatal:
            self._unsettled = self.step
        text = f"{type(error).__name__}: {error}"
        record = json.dumps([self.step, self.rank, text, fatal])

        def leave() -> None:
            index = self._store.add("records", 1)
            self._store.set(f"record/{index}", record)

        with contextlib.suppress(TransportError):  # no store: peers see the connection close
            self._ask(leave, _RECORD_S)

    def leave(self, error: BaseException) -> None:
        """Leave a record that this rank will never take part again, whatever step its peers are in."""
        step, self.step = self.step, 0
        self._raised.pop(0, None)
        self.report(error, fatal=True)
        self.step = step

    def check(self) -> None:
        """Raise what peers have reported.

        Raises:
            PeerFailedError: a peer raised in a step that this rank is in or has passed, and this
                rank did not.
        """
        if self.world_size > 1:
            self._refresh()
            self._raise_reported()

    def check_on_this_thread(self) -> None:
        """The same for a thread that may hang: the store is asked without a limit."""
        if self.world_size > 1:
            with _store_errors():
                self._read_records()
            self._raise_reported()

    def _raise_reported(self) -> None:
        records = list(self._records.values())  # a look that was given up may still add some
        for record in sorted(records, key=lambda r: (r.step, r.follows, r.rank)):
            if record.step > self.step:
                continue
            if record.fatal or record.step not in self._raised:
                raise PeerFailedError(f"rank {record.rank} failed: {record.text}", peer=record.rank)

    def settle(self) -> None:
        """Before the first stage after an error of one's own: wait until every rank is known to have raised too.

        Raises:
            PeerFailedError: some rank raised later than that or broke.
            TransportTimeoutError: some rank did not raise in that step.
        """
        if self._unsettled is None:
            return
        step = self._unsettled

        def missing() -> list[int]:
            return [
                rank
                for rank in range(self.world_size)
                if rank != self.rank and (step, rank) not in self._records
            ]

        deadline = time.monotonic() + self.timeout_s
        while True:
            self.check()
            if not missing():
                break
            if time.monotonic() > deadline:
                raise TransportTimeoutError(
                    f"this rank raised an error of its own in step {step} but ranks {missing()} did not; waited "
                    f"{self.timeout_s:g} s",
                    waited_s=self.timeout_s,
                    missing=missing(),
                )
            time.sleep(POLL_S)
        self._unsettled = None

    def _refresh(self) -> None:
        with contextlib.suppress(TransportTimeoutError):  # whoever waits has a clock of its own
            self._ask(self._read_records, _LOOK_S)

    def _read_records(self) -> None:
        with self._refreshing:  # a backend's watchdog thread looks too
            count = self._store.add("records", 0)
            self._unread += range(self._read + 1, count + 1)
            self._read = count
            # A rank may have died between counting a record and writing it: never wait for one.
            for index in [i for i in self._unread if self._store.check([f"record/{i}"])]:
                self._unread.remove(index)
                self._remember(_Record(*json.loads(self._store.get(f"record/{index}"))))

    def _remember(self, record: _Record) -> None:
        """Keep a peer's record; of several in one step the first says the cause."""
        first = self._records.get((record.step, record.rank), record)
        if record.rank != self.rank:
            self._records[record.step, record.rank] = replace(
                first, fatal=first.fatal or record.fatal
            )

    def exchange(self, value: str, what: str) -> list[str]:
        """Give every rank every rank's text, in rank order.

        Args:
            value: this rank's text.
            what: what is exchanged, for the error message.

        Raises:
            PeerFailedError: a peer reported an error meanwhile.
            TransportTimeoutError: a rank did not arrive in time.

        Collective: over the transport's ranks, in the same order as other exchanges.
        """
        self._agreements += 1
        prefix = f"agree/{self._agreements}"

        def give() -> None:
            self._store.set(f"{prefix}/{self.rank}", value)
            # Whoever came to the last exchange had read all of the one before: keys do not pile up.
            self._store.delete_key(f"agree/{self._agreements - 2}/{self.rank}")

        self._ask(give, self.timeout_s)
        keys = [f"{prefix}/{rank}" for rank in range(self.world_size)]
        start = time.monotonic()
        pause = 0.0005
        for rank, key in enumerate(keys):
            while not self._has(key):
                try:
                    self.check()
                except PeerFailedError:
                    # A peer that raised what all texts together say left them all before.
                    if all(self._has(each) for each in keys):
                        break
                    raise
                waited = time.monotonic() - start
                if waited > self.timeout_s:
                    absent = [r for r in range(rank, self.world_size) if not self._has(keys[r])]
                    raise TransportTimeoutError(
                        f"{what}: ranks {absent} did not arrive within {waited:.1f} s",
                        peer=absent[0] if len(absent) == 1 else None,
                        waited_s=waited,
                        missing=absent,
                    )
                time.sleep(pause)
                pause = min(2 * pause, POLL_S)
        return self._ask(lambda: [self._store.get(key).decode() for key in keys], self.timeout_s)

    def note(self, key: str, value: str) -> None:
        """Leave a text of this rank under a key, in place of the one before."""
        self._ask(lambda: self._store.set(f"note/{key}/{self.rank}", value), self.timeout_s)

    def notes(self, key: str) -> list[str]:
        """Return what every rank last noted under a key, in rank order; empty where nothing or no answer."""
        names = [f"note/{key}/{rank}" for rank in range(self.world_size)]

        def read() -> list[str]:
            store = self._store
            return [store.get(name).decode() if store.check([name]) else "" for name in names]

        try:
            return self._ask(read, _LOOK_S)
        except TransportTimeoutError:
            return [""] * self.world_size

    def _has(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.check([key])), self.timeout_s)

    def _ask(self, call: Callable[[], T], limit_s: float) -> T:
        """Call the store on a thread of its own, since nothing ends a call that its host does not answer.

        Args:
            call: of the store; goes on when its limit has passed.
            limit_s: how long to wait for it, and first for one before it that had no answer yet.

        Raises:
            TransportTimeoutError: the store did not answer.
            PeerFailedError: the store is gone.
        """
        with _store_errors():
            answers = self._calls(call, limit_s, patience_s=limit_s)
        if not answers:
            raise TransportTimeoutError(
                f"the group's store did not answer for {limit_s:g} s; is the rank that hosts it stopped?",
                waited_s=limit_s,
            )
        return answers[0]


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """Map what a store raises: it lives with the rank that hosts it."""
    try:
        yield
    except Exception as error:
        raise PeerFailedError(
            f"the group's store is gone with the rank that hosted it: {error}"
        ) from error


def wait_until(
    arrived: Callable[[float], bool],
    *,
    control: ControlPlane,
    timeout_s: float,
    describe: Callable[[float], TransportTimeoutError],
) -> float:
    """Wait on the host until something arrived, a peer failed, or the deadline passed.

    Args:
        arrived: waits at most the given seconds and says whether it arrived.
        control: asked for peers' records between attempts.
        timeout_s: the deadline.
        describe: makes the error from the seconds waited.

    Returns:
        Seconds waited.

    Raises:
        PeerFailedError, TransportTimeoutError: see above.
    """
    start = time.monotonic()
    while not arrived(min(POLL_S, timeout_s)):
        control.check()
        waited = time.monotonic() - start
        if waited > timeout_s:
            raise describe(waited)
    return time.monotonic() - start


def require_group_member(rank: int) -> None:
    """Raise when this process is not in the group it was given."""
    if rank < 0:
        raise TransportError("this process is not a member of the group")
