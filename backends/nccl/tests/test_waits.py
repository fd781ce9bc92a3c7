# SPDX-License-Identifier: Apache-2.0
"""Waits inside NCCL, on the stand-in: who failed, what is handed out, how long connecting may take."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from cptransport.errors import (
    PeerFailedError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from cptransport.testing import Ranks
from cptransport.transport import PartSpec, Slot
from cptransport_nccl.library import NcclError

RANKS = 3
_EVERYWHERE = frozenset((s, d) for s in range(3) for d in range(3) if s != d)
_ROWS = frozenset({(2, 0, 1), (2, 0, 2), (2, 1), (0, 1), (1, 0), (0, 2), (1, 2)})
#: By name, and the rows that rank 0 gets of rank 2.
_SLOTS = {
    "all-gather": (Slot("all", (PartSpec("x", (4, 8), torch.float32, _EVERYWHERE),)), slice(4)),
    "rows": (Slot("rows", (PartSpec("x", (4, 8), torch.bfloat16, _ROWS),)), slice(1, 3)),
    "no routes": (Slot("free", (PartSpec("x", (4, 8), torch.float64),)), slice(4)),
}


def _generation(transport: Any, slot: Slot) -> torch.Tensor | None:
    """Exchange; rank 0 returns what it got of rank 2."""
    transport.stage(slot)["x"].fill_(1 + transport.rank)
    transport.publish(slot)
    got = None
    for source in range(3):
        if source != transport.rank:
            tensor = transport.fetch(slot, "x", source=source)
            got = tensor if source == 2 else got
    return got


def _after_one(ranks: Ranks, which: str, timeout_s: float) -> tuple[Any, Slot]:
    """Return a transport and a slot, one generation of which has arrived everywhere."""
    transport: Any = ranks.create(timeout_s=timeout_s)
    slot, _ = _SLOTS[which]
    _generation(transport, slot)
    ranks.sync()
    return transport, slot


def _generations(transport: Any, slot: Slot) -> None:
    """More than can end without a peer; what the watchdog has to say is said at the latest by the check."""
    for _ in range(2):
        _generation(transport, slot)
        transport.check()


def _never_arrived(ranks: Ranks, which: str) -> list[list[bool]]:
    """Rank 2 leaves generation 3 out: what rank 0 then has in the memory of generation 1."""
    transport: Any = ranks.create(timeout_s=1.0)
    slot, rows = _SLOTS[which]
    first = _generation(transport, slot)
    _generation(transport, slot)
    ranks.sync()
    if ranks.rank == 2:
        ranks.ask("raised")
        return []
    before = first[rows].isnan().any().item() if first is not None else None
    with pytest.raises((TransportTimeoutError, PeerFailedError)):
        _generations(transport, slot)
    if ranks.rank == 1:
        return []
    ranks.tell("raised", "")
    assert first is not None
    return [[before], first[rows].isnan().flatten().tolist()]


@pytest.mark.parametrize("which", sorted(_SLOTS))
def test_what_never_arrived_is_nan(run: Any, which: str) -> None:
    before, after = run(_never_arrived, which=which)[0]
    assert before == [False]
    assert all(after), after


def _until_it_raises(transport: Any) -> None:
    end = time.monotonic() + 5.0
    while time.monotonic() < end:
        transport.check()
        time.sleep(0.01)


def _vanish(ranks: Ranks, transport: Any, after_s: float, words: str = "") -> None:
    """End as the others see it; return when they have raised."""
    time.sleep(after_s)
    for lane in transport._lanes.values():
        lane.communicator.vanish()
    if words:
        time.sleep(0.4)  # the connection closed first
        transport.control.report(ValueError(words), fatal=True)
    for rank in (0, 2):
        ranks.ask(f"raised/{rank}")


def _one_vanishes(ranks: Ranks, words: bool) -> str:
    """Rank 1 ends while the others wait for it; NCCL says only that a connection closed."""
    transport, slot = _after_one(ranks, "no routes", timeout_s=8.0)
    if ranks.rank == 1:
        _vanish(ranks, transport, 0.3, "words of rank 1" if words else "")
        return ""
    start = time.monotonic()
    with pytest.raises(PeerFailedError) as caught:
        _generations(transport, slot)
    assert time.monotonic() - start < 4.0  # not by the limit
    ranks.tell(f"raised/{ranks.rank}", "")
    return str(caught.value)


def test_who_vanished_is_named(run: Any) -> None:
    for said in run(_one_vanishes, words=False)[::2]:
        assert "remote process exited; no word from rank 1" in said


def test_words_of_who_failed_come_before_those_of_nccl(run: Any) -> None:
    for said in run(_one_vanishes, words=True)[::2]:
        assert "ValueError: words of rank 1" in said


def _behind_another(ranks: Ranks) -> str:
    """Rank 1 ends; rank 0 waits for rank 2 alone, which waits for rank 1."""
    transport, slot = _after_one(ranks, "no routes", timeout_s=8.0)
    if ranks.rank == 1:
        _vanish(ranks, transport, 0.3)
        return ""
    transport.stage(slot)
    transport.publish(slot, to=[])
    transport.fetch(slot, "x", source={0: 2, 2: 1}[ranks.rank])
    with pytest.raises(PeerFailedError) as caught:
        _until_it_raises(transport)
    ranks.tell(f"raised/{ranks.rank}", "")
    return str(caught.value)


def test_who_vanished_is_named_by_who_waits_for_another(run: Any) -> None:
    for said in run(_behind_another)[::2]:
        assert "no word from rank 1" in said or "rank 2 failed" in said, said


def _beside_idle(ranks: Ranks) -> Any:
    """Rank 1 ends; rank 0 waits for it, and rank 2 for nobody."""
    transport: Any = ranks.create(timeout_s=8.0)
    slot = Slot("pair", (PartSpec("x", (2,), torch.float32, frozenset({(1, 0)})),))
    transport.stage(slot)
    if ranks.rank:
        if ranks.rank == 1:
            _vanish(ranks, transport, 0.0)
        ranks.ask("raised/0")
        ranks.tell(f"raised/{ranks.rank}", "")
        return None
    transport.fetch(slot, "x", source=1)
    with pytest.raises(PeerFailedError) as caught:
        _until_it_raises(transport)
    ranks.tell("raised/0", "")
    return caught.value.peer


def test_who_vanished_is_named_beside_ranks_that_wait_for_nobody(run: Any) -> None:
    assert run(_beside_idle)[0] == 1


def _own_fault(ranks: Ranks) -> str:
    """NCCL cannot issue rank 1's work, for a reason of that rank's own."""
    transport, slot = _after_one(ranks, "rows", timeout_s=8.0)
    if ranks.rank == 1:
        transport._lanes["routes"].communicator.fault = NcclError("ncclGroupEnd: bad CUDA", 1)
    start = time.monotonic()
    with pytest.raises(TransportError) as caught:
        _generations(transport, slot)
    assert time.monotonic() - start < 4.0
    with pytest.raises(TransportClosedError):
        transport.stage(slot)
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_fault_of_a_rank_s_own_is_no_peer_s(run: Any) -> None:
    first, second, third = run(_own_fault)
    assert second.startswith("TransportError: rank 1: slot 'rows', generation 2: ncclGroupEnd: bad")
    for said in (first, third):
        assert said.startswith("PeerFailedError")
        assert "bad CUDA" in said


def _vanishes_late(ranks: Ranks) -> tuple[str, float]:
    """Rank 1 ends without a word shortly before the others' limit."""
    transport, slot = _after_one(ranks, "all-gather", timeout_s=2.0)
    if ranks.rank == 1:
        _vanish(ranks, transport, 1.6)
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(PeerFailedError) as caught:
        _generations(transport, slot)
    waited = time.monotonic() - start
    ranks.tell(f"raised/{ranks.rank}", "")
    return str(caught.value), waited


def test_words_are_not_waited_for_beyond_the_limit(run: Any) -> None:
    for said, waited in run(_vanishes_late)[::2]:
        assert "no word from rank 1" in said
        assert 1.5 < waited < 2.5


def _slow_abort(ranks: Ranks) -> tuple[float, float, bool]:
    """Rank 2 does not come, and NCCL frees nothing for a while after it was aborted."""
    transport, slot = _after_one(ranks, "rows", timeout_s=1.0)
    if ranks.rank == 2:
        for rank in (0, 1):
            ranks.ask(f"raised/{rank}")
        return 0.0, 0.0, False
    start = time.monotonic()
    with pytest.raises((TransportTimeoutError, PeerFailedError)):
        _generations(transport, slot)
    raised = time.monotonic() - start
    ranks.tell(f"raised/{ranks.rank}", "")
    start = time.monotonic()
    transport.close()
    closed = time.monotonic() - start
    return raised, closed, transport.aborting and bool(transport._memory)


def test_an_abort_that_takes_long_holds_up_no_error(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fake_nccl  # on the path for the fixture's lifetime

    monkeypatch.setattr(fake_nccl, "aborting_s", 2.5)
    for raised, closed, kept in run(_slow_abort)[:2]:
        assert raised < 1.0 + 0.8
        assert 0.9 < closed < 1.0 + 0.8
        assert kept


def _held_up(ranks: Ranks) -> float:
    """NCCL holds rank 0's host up for ever in a call that issues work."""
    transport, slot = _after_one(ranks, "rows", timeout_s=1.0)
    if ranks.rank == 0:
        transport._lanes["routes"].communicator.held_up = True
    start = time.monotonic()
    with pytest.raises((TransportTimeoutError, PeerFailedError)):
        _generations(transport, slot)
    waited = time.monotonic() - start
    transport.close()
    return waited


def test_a_call_that_does_not_return_is_ended(run: Any) -> None:
    assert max(run(_held_up)) < 1.0 + 2.0


def _slow_to_connect(ranks: Ranks) -> float:
    start = time.monotonic()
    transport: Any = ranks.create(timeout_s=0.5)
    transport.barrier()  # connects once more
    transport.close()
    return time.monotonic() - start


def test_connecting_may_take_longer_than_a_wait_for_data(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fake_nccl  # on the path for the fixture's lifetime

    monkeypatch.setattr(fake_nccl, "connecting_s", 2.0)
    assert min(run(_slow_to_connect)) > 4.0


def _gone_while_connecting(ranks: Ranks) -> list[Any]:
    """Rank 1 is the last that is known to come, and ends inside NCCL."""
    transport: Any = ranks.create(timeout_s=1.0)
    if ranks.rank == 1:
        transport.control.exchange("", "nccl: connect barriers")
        for rank in (0, 2):
            ranks.ask(f"raised/{rank}")
        return []
    start = time.monotonic()
    with pytest.raises((TransportTimeoutError, PeerFailedError)) as caught:
        transport.barrier()
    waited = time.monotonic() - start
    ranks.tell(f"raised/{ranks.rank}", "")
    return [type(caught.value).__name__, str(caught.value), waited]


def test_a_rank_that_ends_while_it_connects_is_not_waited_for(run: Any) -> None:
    first, _, last = run(_gone_while_connecting)
    assert "TransportTimeoutError" in (first[0], last[0])
    for _, text, waited in (first, last):
        assert "for rank 1;" in text
        assert waited < 1.0 + 2.0
