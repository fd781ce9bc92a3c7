# SPDX-License-Identifier: Apache-2.0
"""Contract tests: every wait ends, says for whom it waited, and a rank that fails takes nobody with it silently."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cptransport.errors import (
    PeerFailedError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from cptransport.testing.contract_base import GRACE_S, ContractTests, Figures, clause
from cptransport.testing.contract_bytes import exchange_all
from cptransport.testing.contract_order import complete, settle
from cptransport.testing.oracle import fill
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["WaitsContract"]

_PART = PartSpec("x", (1000,), torch.float32)
_SLOT = Slot("waited", (_PART,))
_EXIT = 17


def _failing(
    transport: BoundaryTransport, verb: Callable[[], object]
) -> tuple[TransportError, float]:
    """Run a verb that must raise (or whose device wait must be reported), and return the error and the seconds."""
    start = time.monotonic()
    with pytest.raises((TransportTimeoutError, PeerFailedError)) as caught:
        complete(transport, verb)
    return caught.value, time.monotonic() - start


def _only_close_works(transport: BoundaryTransport, limit_s: float) -> None:
    for verb in (
        lambda: transport.stage(_SLOT),
        lambda: transport.publish(_SLOT),
        lambda: transport.fetch(_SLOT, "x", source=0),
        transport.barrier,
        transport.check,
    ):
        with pytest.raises(TransportError):
            verb()
    start = time.monotonic()
    transport.close()
    assert time.monotonic() - start < limit_s + GRACE_S, "close() took too long"
    with pytest.raises(TransportClosedError):
        transport.check()


def _silent_peer(ranks: Ranks, limit_s: float, verb: str, silent: int) -> None:
    """One rank does not come; the others must be told who, where and for how long they waited."""
    transport = ranks.create(timeout_s=limit_s)
    exchange_all(transport, _SLOT, 1)
    generation = 2
    if ranks.rank == silent:
        fill(transport, _SLOT, generation)
        for peer in range(ranks.world_size):
            if peer != silent:
                ranks.ask(f"raised/{peer}")
        error, _ = _failing(transport, lambda: exchange_all(transport, _SLOT, 3))
        assert isinstance(error, PeerFailedError), error
        _only_close_works(transport, limit_s)
        return
    fill(transport, _SLOT, generation)
    if verb == "barrier":
        error, waited = _failing(transport, transport.barrier)
    elif not transport.capabilities.pairwise:
        error, waited = _failing(transport, lambda: _publish_and_gather(transport))
    else:
        transport.publish(_SLOT)
        wait: Callable[[], object] = lambda: transport.gather(_SLOT)  # noqa: E731
        if verb == "fetch":
            wait = lambda: transport.fetch(_SLOT, "x", source=silent)  # noqa: E731
        error, waited = _failing(transport, wait)
    ranks.tell(f"raised/{ranks.rank}", str(error))
    assert waited < limit_s + GRACE_S, f"raised after {waited:.2f} s"
    if isinstance(error, PeerFailedError):  # another survivor was told first, and reported it
        assert ranks.world_size > 2, error
        assert "TransportTimeoutError" in str(error)
    else:
        assert isinstance(error, TransportTimeoutError)
        assert waited >= 0.8 * limit_s
        assert error.waited_s is not None
        assert 0.8 * limit_s <= error.waited_s <= limit_s + GRACE_S
        assert error.missing == (silent,), error
        assert str(silent) in str(error)
        if verb != "barrier":
            assert (error.slot, error.generation) == ("waited", generation)
            assert error.peer == silent
            for word in ("waited", str(generation), f"{error.waited_s:.0f}"[:1]):
                assert word in str(error)
    _only_close_works(transport, limit_s)


def _publish_and_gather(transport: BoundaryTransport) -> None:
    transport.publish(_SLOT)
    transport.gather(_SLOT)


def _slow_peer(ranks: Ranks, limit_s: float) -> None:
    transport = ranks.create(timeout_s=limit_s)
    for generation in (1, 2):
        if ranks.rank == generation % ranks.world_size:
            time.sleep(limit_s / 2)
        exchange_all(transport, _SLOT, generation)
    if ranks.rank == 0:
        time.sleep(limit_s / 2)
    transport.barrier()


def _never_taken(ranks: Ranks, limit_s: float) -> None:
    """Without routes, rank 1 never takes what rank 0 sends: a timeout at rank 0's stage two generations later."""
    transport = ranks.create(timeout_s=limit_s)
    for _ in range(2):
        transport.stage(_SLOT)
        transport.publish(_SLOT, to=[1] if ranks.rank == 0 else [])
    if ranks.rank == 0:
        error, waited = _failing(transport, lambda: transport.stage(_SLOT))
        assert waited < limit_s + GRACE_S
        assert isinstance(error, TransportTimeoutError), error
        assert (error.peer, error.slot, error.missing) == (1, "waited", (1,))
        assert "generation" in str(error)
        ranks.tell("raised", "")
    else:
        ranks.ask("raised")
        time.sleep(0.1)
        error, _ = _failing(transport, transport.barrier)
        assert isinstance(error, PeerFailedError)
        assert "TransportTimeoutError" in str(error)
    _only_close_works(transport, limit_s)


def _raise_inside(transport: Any) -> None:
    with transport:
        fill(transport, _SLOT, 2)
        raise ValueError("words of rank 1")


def _own_error(ranks: Ranks, limit_s: float, where: str) -> None:
    """Rank 1 raises in code of its own, outside every verb; the others read its words."""
    transport: Any = ranks.create(timeout_s=limit_s)
    exchange_all(transport, _SLOT, 1)
    ranks.sync()  # generation 1 has arrived everywhere
    if ranks.rank == 1:
        with pytest.raises(ValueError, match="words of rank 1"):
            _raise_inside(transport)
        return
    if where == "stage":
        error, waited = _failing(transport, lambda: _several_rounds(transport))
    elif where == "release":
        error, waited = _failing(transport, lambda: _sends(transport, to=[1]))
    else:
        error, waited = _failing(transport, transport.barrier)
    assert isinstance(error, PeerFailedError), error
    assert "ValueError: words of rank 1" in str(error)
    assert waited < limit_s + GRACE_S
    _only_close_works(transport, limit_s)


def _errors_before_staging(ranks: Ranks, limit_s: float) -> None:
    """Ops in which every rank raises before it stages leave the transport usable, others do not."""
    transport: Any = ranks.create(timeout_s=limit_s)
    for generation in range(1, 4):
        time.sleep(0.05 * ((ranks.rank + generation) % ranks.world_size))
        transport.control.begin_step()
        transport.abandon(ValueError(f"words of rank {ranks.rank}"))
        transport.control.begin_step()
        exchange_all(transport, _SLOT, generation)
    transport.control.begin_step()
    if ranks.rank == 1:
        transport.abandon(ValueError("words of rank 1 alone"))
        transport.control.begin_step()
    error, waited = _failing(transport, lambda: exchange_all(transport, _SLOT, 4))
    assert waited < limit_s + GRACE_S
    if ranks.rank != 1:
        assert isinstance(error, PeerFailedError), error
        assert "words of rank 1 alone" in str(error) or "PeerFailedError" in str(error)
    _only_close_works(transport, limit_s)


def _sends(transport: BoundaryTransport, to: list[int]) -> None:
    for generation in (2, 3, 4):
        fill(transport, _SLOT, generation)
        transport.publish(_SLOT, to=to)


def _several_rounds(transport: BoundaryTransport) -> None:
    for generation in (2, 3, 4):
        exchange_all(transport, _SLOT, generation)


def _death(ranks: Ranks, limit_s: float, where: str, victim: int) -> None:
    """One rank ends without a word; the others must raise within the limit, and close."""
    transport = ranks.create(timeout_s=limit_s)
    exchange_all(transport, _SLOT, 1)
    ranks.sync()  # generation 1 has arrived everywhere
    if ranks.rank == victim:
        _die(transport, where)
    if where in ("inside gather", "inside barrier"):
        time.sleep(0.6)  # the victim waits for this rank when it ends

    def verbs() -> None:
        if where == "inside barrier":
            transport.barrier()
        for generation in range(2, 8):  # what the victim published may still arrive
            exchange_all(transport, _SLOT, generation)

    start = time.monotonic()
    with pytest.raises((TransportTimeoutError, PeerFailedError)) as caught:
        complete(transport, verbs)
    waited = time.monotonic() - start
    assert waited < limit_s + GRACE_S, f"raised after {waited:.2f} s"
    # Addresses and places in gloo's source hold digits too; the victim must be named as a rank.
    words = re.sub(r"\[[^\]]*[./][^\]]*\](:\d+)?", "", str(caught.value))
    assert re.search(rf"\branks? [^a-z]*\b{victim}\b", words), caught.value
    _only_close_works(transport, limit_s)


def _leave(transport: BoundaryTransport) -> None:
    """End this process without a word; on CUDA with nothing running: under MPS that would take others with it."""
    settle(transport)
    os._exit(_EXIT)


def _die(transport: BoundaryTransport, where: str) -> None:
    if where.startswith("inside"):
        timer = threading.Timer(0.3, _leave, [transport])
        timer.start()
    if where == "inside barrier":
        transport.barrier()
        settle(transport)
    fill(transport, _SLOT, 2)
    if where == "between stage and publish":
        _leave(transport)
    transport.publish(_SLOT)
    if where == "between publish and fetch":
        _leave(transport)
    transport.gather(_SLOT)
    settle(transport)
    time.sleep(10)
    raise AssertionError("this rank should have ended inside the verb")


PLACES = (
    "between stage and publish",
    "between publish and fetch",
    "inside gather",
    "inside barrier",
)


class WaitsContract(ContractTests):
    """Waits that end."""

    @clause("C26", "C28", ranks=2)
    @pytest.mark.parametrize("verb", ["fetch", "gather", "barrier"])
    def test_a_silent_peer_is_named(self, world_size: int, verb: str) -> None:
        """TransportTimeoutError within the limit: peer, slot, generation, seconds, missing."""
        self.run(_silent_peer, world_size, limit_s=1.0, verb=verb, silent=world_size - 1)

    @clause("C27", ranks=2)
    def test_a_slow_peer_is_no_error(self, world_size: int, figures: Figures) -> None:
        """Late by half of the timeout."""
        self.run(_slow_peer, world_size, limit_s=max(1.5, 3 * figures.delay_s))

    @clause("C11", "C26", "C28", ranks=2)
    def test_a_message_that_is_never_taken(self, world_size: int) -> None:
        """A timeout at the sender's stage two generations later; the receiver then hears of it."""
        self.run(_never_taken, world_size, limit_s=1.0)

    @clause("C30", ranks=2)
    @pytest.mark.parametrize("where", ["stage", "release", "barrier"])
    def test_an_error_of_one_rank_reaches_the_others(self, world_size: int, where: str) -> None:
        """With its text, at their next wait."""
        self.run(_own_error, world_size, limit_s=5.0, where=where)

    @clause("C31", "C30", ranks=2)
    def test_errors_of_all_ranks_before_staging(self, world_size: int) -> None:
        """The transport stays usable if every rank raised in the op, and breaks if one did not."""
        self.run(_errors_before_staging, world_size, limit_s=2.0)

    @clause("C29", ranks=2, processes=True, largest=True)
    @pytest.mark.parametrize("where", PLACES)
    def test_a_death_ends_the_waits_of_the_others(self, world_size: int, where: str) -> None:
        """Error within the limit plus 2 s, close() returns, survivors exit with 0."""
        victim = world_size // 2
        self.run(_death, world_size, limit_s=2.0, where=where, victim=victim, exits={victim: _EXIT})
