# SPDX-License-Identifier: Apache-2.0
"""The control plane: records of errors, agreement, and what they mean at each step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from cptransport.control import ControlPlane, wait_until
from cptransport.errors import PeerFailedError, TransportTimeoutError


def planes(count: int, timeout_s: float = 5.0) -> list[ControlPlane]:
    store = dist.HashStore()
    return [ControlPlane(store, rank, count, timeout_s) for rank in range(count)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run calls side by side; returns results, or the exception that was raised."""
    results: list[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def test_exchange_gives_texts_in_rank_order() -> None:
    a, b, c = planes(3)
    for turn in "xy":
        calls = [partial(p.exchange, f"{turn}{p.rank}", "census") for p in (a, b, c)]
        assert together(*calls) == [[f"{turn}0", f"{turn}1", f"{turn}2"]] * 3


def test_exchange_names_who_is_missing() -> None:
    a, b, _ = planes(3, timeout_s=0.3)
    start = time.monotonic()
    first, second = together(lambda: a.exchange("", "census"), lambda: b.exchange("", "census"))
    assert time.monotonic() - start < 2.0
    for error in (first, second):
        assert isinstance(error, TransportTimeoutError)
        assert error.missing == (2,)
        assert error.peer == 2
        assert "census" in str(error)


def test_exchange_ends_when_a_peer_reports_an_error() -> None:
    a, b = planes(2)
    b.leave(ValueError("cannot"))
    with pytest.raises(PeerFailedError, match=r"rank 1 failed: ValueError: cannot") as caught:
        a.exchange("", "census")
    assert caught.value.peer == 1


def test_a_record_of_a_later_step_is_not_ours_yet() -> None:
    a, b = planes(2)
    for plane in (a, b):
        plane.begin_step()
    b.begin_step()
    b.report(ValueError("later"), fatal=True)
    a.check()
    a.begin_step()
    with pytest.raises(PeerFailedError, match="later"):
        a.check()


def test_a_record_of_an_earlier_step_stays() -> None:
    a, b = planes(2)
    a.begin_step()
    b.begin_step()
    b.report(ValueError("earlier"), fatal=False)
    a.begin_step()
    with pytest.raises(PeerFailedError, match="earlier"):
        a.check()


def test_a_rank_that_left_concerns_every_step() -> None:
    a, b = planes(2)
    b.begin_step()
    b.begin_step()
    b.leave(KeyError("gone"))
    with pytest.raises(PeerFailedError, match="gone"):
        a.check()
    assert b.step == 2


def test_only_the_first_error_of_a_step_is_reported() -> None:
    a, b = planes(2)
    a.begin_step()
    b.begin_step()
    b.report(ValueError("cause"), fatal=False)
    b.report(ValueError("consequence"), fatal=True)
    with pytest.raises(PeerFailedError, match="cause"):
        a.check()


def test_a_record_that_was_counted_and_never_written_is_not_waited_for() -> None:
    a, b = planes(2)
    b._store.add("records", 1)  # and dies here
    start = time.monotonic()
    a.check()
    b.leave(ValueError("the next one"))
    with pytest.raises(PeerFailedError, match="the next one"):
        a.check()
    assert time.monotonic() - start < 1.0


def test_all_ranks_raising_in_one_step_settle() -> None:
    group = planes(3)
    for rank, plane in enumerate(group):
        plane.begin_step()
        plane.report(ValueError(f"own {rank}"), fatal=False)
    for plane in group:
        plane.begin_step()
    assert together(*[plane.settle for plane in group]) == [None] * 3
    for plane in group:
        plane.check()


def test_settling_ends_when_a_peer_did_not_raise() -> None:
    a, b = planes(2, timeout_s=0.3)
    a.begin_step()
    b.begin_step()
    a.report(ValueError("alone"), fatal=False)
    a.begin_step()
    with pytest.raises(TransportTimeoutError) as caught:
        a.settle()
    assert caught.value.missing == (1,)
    with pytest.raises(PeerFailedError, match="alone"):
        b.check()


def test_settling_ends_when_a_peer_broke_in_that_step() -> None:
    a, b = planes(2)
    a.begin_step()
    b.begin_step()
    a.report(ValueError("before staging"), fatal=False)
    b.report(ValueError("after staging"), fatal=True)
    a.begin_step()
    start = time.monotonic()
    with pytest.raises(PeerFailedError, match="after staging"):
        a.settle()
    assert time.monotonic() - start < 2.0


def test_one_rank_alone_reports_to_nobody() -> None:
    plane = ControlPlane(None, 0, 1, 1.0)
    plane.begin_step()
    plane.report(ValueError("x"), fatal=True)
    plane.check()
    plane.settle()


class _Gone:
    """A store whose host has died."""

    def __getattr__(self, name: str) -> Any:
        def fail(*args: Any) -> None:
            raise RuntimeError("Connection reset by peer")

        return fail


def test_a_store_that_is_gone_is_a_peer_failure_and_reporting_never_raises() -> None:
    plane = ControlPlane(_Gone(), 0, 2, 1.0)
    plane.report(ValueError("x"), fatal=True)
    with pytest.raises(PeerFailedError, match="store is gone"):
        plane.check()
    with pytest.raises(PeerFailedError, match="store is gone"):
        plane.exchange("", "census")


def test_notes_are_replaced_and_empty_where_nothing_was_left() -> None:
    a, b, _ = planes(3)
    a.note("place", "1")
    a.note("place", "2")
    b.note("place", "7")
    b.note("other", "x")
    assert a.notes("place") == ["2", "7", ""]


def test_a_wait_ends_by_arrival_by_deadline_or_by_a_peer() -> None:
    a, b = planes(2)

    def describe(waited: float) -> TransportTimeoutError:
        return TransportTimeoutError("late", waited_s=waited)

    def wait(arrived: Callable[[float], bool], timeout_s: float) -> float:
        return wait_until(arrived, control=a, timeout_s=timeout_s, describe=describe)

    def never(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    assert wait(lambda seconds: True, 1.0) < 0.5
    with pytest.raises(TransportTimeoutError) as caught:
        wait(never, 0.2)
    assert caught.value.waited_s is not None
    assert 0.2 <= caught.value.waited_s < 1.0
    b.leave(ValueError("away"))
    start = time.monotonic()
    with pytest.raises(PeerFailedError, match="away"):
        wait(never, 10.0)
    assert time.monotonic() - start < 2.0
