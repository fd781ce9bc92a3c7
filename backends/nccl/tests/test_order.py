# SPDX-License-Identifier: Apache-2.0
"""Slots on one communicator: what happens when ranks use them in different orders."""

from __future__ import annotations

import time
from typing import Any

import torch

from cptransport.errors import PeerFailedError, TransportError
from cptransport.testing import Ranks
from cptransport.transport import PartSpec, Slot
from cptransport_nccl.order import Order

RANKS = 2
_PART = PartSpec("x", (4,), torch.float32, frozenset({(0, 1)}))
_A, _B = Slot("a", (_PART,)), Slot("b", (_PART,))


def _exchange(transport: Any, order: tuple[Slot, Slot], turn: int) -> list[float]:
    for slot, value in ((_A, 1.0), (_B, 2.0)):
        transport.stage(slot)["x"].fill_(value + 10 * turn)
    got = []
    for slot in order:
        if transport.rank == 0:
            transport.publish(slot)
        else:
            got.append(transport.fetch(slot, "x", source=0)[0].item())
    return got


def _in_one_order(ranks: Ranks, turns: int) -> list[float]:
    transport: Any = ranks.create()
    got: list[float] = []
    for turn in range(turns):
        got += _exchange(transport, (_A, _B) if turn % 2 else (_B, _A), turn)
    transport.close()
    return got


def test_one_order_whichever_it_is(run: Any) -> None:
    assert run(_in_one_order, turns=3)[1] == [2.0, 1.0, 11.0, 12.0, 22.0, 21.0]


def _in_two_orders(ranks: Ranks) -> list[Any]:
    transport: Any = ranks.create()
    got = _exchange(transport, (_A, _B) if ranks.rank == 0 else (_B, _A), 0)
    try:
        transport.close()
    except TransportError as error:
        return [got, str(error)]
    return [got, ""]


def test_two_orders_are_told_at_the_latest_when_the_transport_closes(run: Any) -> None:
    first, second = run(_in_two_orders)
    assert second[0] == [1.0, 2.0]  # of a where b was asked for, and the other way round
    assert "ranks [0] used slots in different orders" in second[1]
    assert "join_backward" in second[1]
    assert "ranks [1] used slots in different orders" in first[1]


def _long_in_two_orders(ranks: Ranks) -> str:
    """Nobody closes: the watchdog's look tells."""
    transport: Any = ranks.create()
    transport._watchdog._looked = 0.0
    ranks.sync()
    turn, end = 0, time.monotonic() + 30.0
    while time.monotonic() < end:
        turn += 1
        try:
            _exchange(transport, (_A, _B) if ranks.rank == 0 else (_B, _A), turn)
        except (TransportError, PeerFailedError) as error:
            return str(error)
        transport._watchdog._looked = min(transport._watchdog._looked, 0.0)
    return ""


def test_two_orders_are_told_meanwhile(run: Any) -> None:
    first, second = run(_long_in_two_orders)
    assert "used slots in different orders" in second
    assert "used slots in different orders" in first  # by rank 1's record


def _left_out(ranks: Ranks) -> str:
    """Rank 1 leaves an op call out, whose slot looks like the next one's."""
    transport: Any = ranks.create(timeout_s=2.0)
    for call, slot in enumerate((_A, _B, _A)):
        if call == 1 and ranks.rank == 1:
            continue
        transport.control.begin_step()
        transport.stage(slot)
        if ranks.rank == 0:
            transport.publish(slot)
        elif call == 0:
            transport.fetch(slot, "x", source=0)
    if ranks.rank == 1:
        transport.fetch(_A, "x", source=0)  # b's bytes
    try:
        transport.close()
    except TransportError as error:
        return str(error)
    return ""


def test_an_op_call_left_out_is_told(run: Any) -> None:
    said = run(_left_out)
    assert any("some rank left a forward or a backward out" in text for text in said), said


def _barrier_between(ranks: Ranks) -> list[float]:
    """Rank 0 publishes before the barrier, rank 1 takes after it: the barrier is behind no message."""
    transport: Any = ranks.create(timeout_s=5.0)
    got = []
    for turn in range(3):
        transport.stage(_A)["x"].fill_(turn)
        if ranks.rank == 0:
            transport.publish(_A)
        transport.barrier()
        if ranks.rank == 1:
            got.append(transport.fetch(_A, "x", source=0)[0].item())
    transport.close()
    return got


def test_a_barrier_is_not_behind_what_nobody_has_taken_yet(run: Any) -> None:
    assert run(_barrier_between)[1] == [0.0, 1.0, 2.0]


def test_sums_are_compared_where_both_ends_know_them() -> None:
    me, peer = Order(0, 2), Order(1, 2)
    for number in range(20):  # more than is told
        peer.issued("a", number, to=[0], of=[])
    assert me.strays(["", peer.text()]) == []  # it is far ahead
    for number in range(19):
        me.issued("a", number, to=[], of=[1])
    assert me.strays(["", peer.text()]) == []
    text = peer.text()
    me.issued("b", 19, to=[], of=[1])
    assert me.strays(["", text]) == [1]
    assert peer.strays([me.text(), ""]) == [0]
    assert me.strays(["", ""]) == []


def test_what_is_long_past_is_not_compared() -> None:
    me, peer = Order(0, 2), Order(1, 2)
    peer.issued("a", 1, to=[0], of=[])
    for number in range(5000):
        me.issued("b", number, to=[], of=[1])
    assert me.strays(["", peer.text()]) == []
