# SPDX-License-Identifier: Apache-2.0
"""The store of a group may stop answering (its host is stopped, or lost its power): waits end all the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from cptransport.control import ControlPlane, wait_until
from cptransport.errors import PeerFailedError, TransportTimeoutError
from cptransport.testing.contract_base import GRACE_S

LIMIT_S = 0.5


class Stopped:
    """A store whose host stops at will: calls hang, as they do on a TCPStore then."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.goes_on = threading.Event()
        self.goes_on.set()

    def __getattr__(self, name: str) -> object:
        def call(*arguments: object) -> object:
            self.goes_on.wait()
            return getattr(self.store, name)(*arguments)

        return call


@pytest.fixture
def store() -> Iterator[Stopped]:
    stopped = Stopped()
    yield stopped
    stopped.goes_on.set()


def timeout(waited: float) -> TransportTimeoutError:
    return TransportTimeoutError("rank 1 did not come", peer=1, waited_s=waited)


def test_a_wait_ends_though_the_store_does_not_answer(store: Stopped) -> None:
    control = ControlPlane(store, 0, 2, LIMIT_S)
    control.check()
    store.goes_on.clear()
    start = time.monotonic()
    with pytest.raises(TransportTimeoutError, match="rank 1 did not come") as caught:
        wait_until(
            lambda seconds: time.sleep(seconds) is not None,
            control=control,
            timeout_s=LIMIT_S,
            describe=timeout,
        )
    control.notes("barrier")
    control.report(caught.value, fatal=True)
    assert time.monotonic() - start < LIMIT_S + GRACE_S


def test_agreement_ends_though_the_store_does_not_answer(store: Stopped) -> None:
    control = ControlPlane(store, 0, 2, LIMIT_S)
    store.goes_on.clear()
    start = time.monotonic()
    with pytest.raises(TransportTimeoutError, match="store did not answer"):
        control.exchange("text", "what")
    assert time.monotonic() - start < LIMIT_S + GRACE_S


def test_records_are_read_once_the_store_answers_again(store: Stopped) -> None:
    """A look that was given up goes on; what it finds is not lost."""
    ranks = [ControlPlane(store, rank, 2, LIMIT_S) for rank in range(2)]
    for rank in ranks:
        rank.begin_step()
    ranks[1].report(ValueError("words of rank 1"), fatal=False)
    store.goes_on.clear()
    ranks[0].check()
    store.goes_on.set()
    while not ranks[0]._records:
        time.sleep(0.01)
    with pytest.raises(PeerFailedError, match="words of rank 1"):
        ranks[0].check()
