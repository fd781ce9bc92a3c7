# SPDX-License-Identifier: Apache-2.0
"""``threads`` is the executable specification: it refuses what other transports may let pass, and poisons."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from cptransport.errors import PeerFailedError, PlanError, TransportError
from cptransport.transport import PartSpec, Slot
from cptransport.transports import threads
from cptransport.transports.threads import ThreadTransport, poison

X = PartSpec("x", (3,), torch.float32)


def test_results_come_in_rank_order() -> None:
    assert threads.run(lambda t: (t.rank, t.world_size), 3) == [(0, 3), (1, 3), (2, 3)]


@pytest.mark.parametrize("world_size", [0, -1, 1.5, True, "2"])
def test_a_world_size_that_is_none(world_size: Any) -> None:
    with pytest.raises(PlanError):
        threads.run(lambda t: None, world_size)


def test_the_own_error_of_a_rank_is_raised_not_what_its_peers_were_told() -> None:
    def body(transport: ThreadTransport) -> None:
        if transport.rank == 1:
            raise KeyError("mine")
        transport.barrier()

    with pytest.raises(KeyError, match="mine"):
        threads.run(body, 3, timeout_s=5)


def test_peers_are_told_with_the_text() -> None:
    seen: list[str] = []

    def body(transport: ThreadTransport) -> None:
        if transport.rank == 1:
            raise KeyError("mine")
        try:
            transport.barrier()
        except PeerFailedError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError):
        threads.run(body, 2, timeout_s=5)
    assert seen == ["rank 1 failed: KeyError: 'mine'"]


def test_what_was_not_written_and_what_no_route_moved_is_nan() -> None:
    part = PartSpec("x", (3, 2), torch.float32, frozenset({(0, 1, 1)}))
    slot = Slot("s", (part,))

    def body(transport: ThreadTransport) -> Any:
        staged = transport.stage(slot)["x"]
        assert staged.isnan().all()
        staged.fill_(transport.rank)
        transport.publish(slot)
        return transport.fetch(slot, "x", source=0).isnan().tolist() if transport.rank else None

    assert threads.run(body, 2)[1] == [[True, True], [False, False], [True, True]]


def test_the_next_stage_takes_back_what_was_handed_out() -> None:
    slot = Slot("s", (X,))

    def body(transport: ThreadTransport) -> list[bool]:
        staged = transport.stage(slot)["x"].fill_(1.0)
        transport.publish(slot)
        fetched = transport.fetch(slot, "x", source=1 - transport.rank)
        own = transport.fetch(slot, "x", source=transport.rank)
        assert not fetched.isnan().any()
        transport.stage(slot)
        return [bool(t.isnan().all()) for t in (staged, fetched, own)]

    assert threads.run(body, 2) == [[True] * 3] * 2


def test_writing_after_publish_is_an_error() -> None:
    slot = Slot("s", (X,))

    def body(transport: ThreadTransport) -> None:
        staged = transport.stage(slot)["x"].fill_(1.0)
        transport.publish(slot, to=[])
        staged.fill_(2.0)
        with pytest.raises(TransportError, match="written after publish"):
            transport.stage(slot)

    threads.run(body, 2)


def test_a_publication_is_a_snapshot() -> None:
    slot = Slot("s", (X,))

    def body(transport: ThreadTransport) -> Any:
        staged = transport.stage(slot)["x"].fill_(1.0)
        transport.publish(slot, to=[1 - transport.rank])
        staged.fill_(2.0)
        transport.barrier()
        return transport.fetch(slot, "x", source=1 - transport.rank).tolist()

    assert threads.run(body, 2) == [[1.0] * 3] * 2


def test_ranks_that_stage_different_parts_learn_of_it() -> None:
    def body(transport: ThreadTransport) -> None:
        parts = (X,) if transport.rank else (PartSpec("x", (4,), torch.float32),)
        if transport.rank:
            time.sleep(0.1)
        transport.stage(Slot("s", parts))
        transport.barrier()

    with pytest.raises(TransportError, match="other parts than its peers"):
        threads.run(body, 2, timeout_s=5)


def test_runs_may_be_nested_and_follow_each_other() -> None:
    def outer(transport: ThreadTransport) -> list[int]:
        return threads.run(lambda t: 10 * transport.rank + t.rank, 2)

    assert threads.run(outer, 2) == [[0, 1], [10, 11]]
    assert threads.current_world() is None


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int64]
)
def test_poison_changes_every_element(dtype: torch.dtype) -> None:
    poisoned = poison(torch.zeros(5).to(dtype)).view(torch.uint8)
    assert (poisoned != 0).reshape(5, -1).any(1).all()
