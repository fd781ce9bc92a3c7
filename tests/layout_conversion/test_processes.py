# SPDX-License-Identifier: Apache-2.0
"""``convert_layout`` between processes: over a transport, over a bare group, in subgroups, with a dead rank."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from cptransport import (
    CPContext,
    PeerFailedError,
    Plan,
    TransportError,
    TransportTimeoutError,
    build_plan,
    convert_layout,
    threads,
)
from cptransport.base import TransportBase
from cptransport.relayout import received_rows
from cptransport.testing import Ranks, run_ranks
from cptransport.transports.gloo import GlooTransport

RANKS = 4
OFFSETS = [0, 5, 19, 42]
LAYOUTS = ("zigzag_per_sequence", "contiguous", "zigzag", "empty")
DTYPES = ("float32", "bfloat16", "int64", "bool")

pytestmark = pytest.mark.backend("gloo")


def plan_of(layout: str, world_size: int) -> Plan:
    if layout == "empty":
        pieces = [(world_size - 1, 0, 11), (0, 11, 42)]
        return build_plan(OFFSETS, world_size=world_size, layout="custom", boundaries=pieces)
    return build_plan(OFFSETS, world_size=world_size, layout=layout)


def stream(dtype: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-9, 9, (2, 42, 3), generator=generator)
    return whole.to(getattr(torch, dtype))


def round_trips(group: Any, rank: int, world_size: int, seed: int) -> int:
    """Go through all layouts with every dtype and method, and back in the backward; return bytes."""
    moved = 0
    for dtype in DTYPES:
        whole, floating = stream(dtype, seed), dtype in ("float32", "bfloat16")
        for method in ("p2p", "a2a"):
            here = plan_of(LAYOUTS[-1], world_size)
            x = start = here.shard(whole, rank).clone().requires_grad_(floating)
            for layout in LAYOUTS:
                there = plan_of(layout, world_size)
                x = convert_layout(x, here, there, group, method=method)
                assert torch.equal(x, there.shard(whole, rank)), (dtype, method, layout)
                moved += received_rows(here, there)[rank] * 2 * 3 * whole.itemsize
                if floating:
                    moved += received_rows(there, here)[rank] * 2 * 3 * whole.itemsize
                here = there
            if floating:
                x.backward(x.detach())
                assert torch.equal(start.grad, start.detach())
    return moved


def over_a_transport(ranks: Ranks) -> list[int]:
    transport = ranks.create()
    context = CPContext(plan_of("zigzag", ranks.world_size), transport)
    moved = round_trips(context, transport.rank, transport.world_size, 1)
    stats: Any = transport.stats()
    return [moved, transport.activation_bytes_received, stats.messages, stats.bytes_sent]


def test_over_a_transport_every_byte_is_counted() -> None:
    """Processes and threads move the same bytes; none of them through slots."""
    on_gloo = run_ranks(over_a_transport, backend="gloo", world_size=RANKS, transport=False)
    on_threads = run_ranks(over_a_transport, backend="threads", world_size=RANKS, transport=False)
    assert on_gloo == on_threads
    for planned, counted, messages, sent in on_gloo:
        assert planned == counted > 0
        assert (messages, sent) == (0, 0)


def over_groups(ranks: Ranks, groupings: Sequence[Any]) -> list[bool]:
    """Bare groups: WORLD by name and as None, and subgroups; each has data of its own."""
    round_trips(None, ranks.rank, ranks.world_size, 2)
    round_trips(dist.group.WORLD, ranks.rank, ranks.world_size, 3)
    for i, groups in enumerate(groupings):
        mine = next(group for group in groups if ranks.rank in group)
        group = ranks.subgroup(*groups)
        round_trips(group, mine.index(ranks.rank), len(mine), 10 * i + mine[0])
        transport = ranks.create(group)
        assert transport.group is group
        round_trips(transport, transport.rank, transport.world_size, 10 * i + mine[0])
    return [True]


def test_49_bare_groups_and_subgroups() -> None:
    """Report 49: groups that are not the first ranks, strided and uneven, in turn."""
    groupings = [[[0, 2], [1, 3]], [[0, 1], [2, 3]], [[1, 2, 3], [0]]]
    run_ranks(
        over_groups,
        backend="gloo",
        world_size=RANKS,
        transport=False,
        timeout_s=120.0,
        groupings=groupings,
    )


class ByGroup(GlooTransport):
    """A transport without a way of its own, as most are."""

    _move = TransportBase._move


def over_the_group_of_a_transport(ranks: Ranks) -> list[int]:
    made = [ranks.create(), ranks.create(ranks.subgroup([0, 2], [1, 3]))]
    counted = []
    for transport in made:
        transport.__class__ = ByGroup
        seed = ranks.rank % 2 if transport.world_size == 2 else 7
        moved = round_trips(transport, transport.rank, transport.world_size, seed)
        counted.append(moved - transport.activation_bytes_received)
    return counted


def test_transports_without_a_way_use_their_group() -> None:
    """The group that ``create_transport`` was given; seeds differ between the two groups."""
    found = run_ranks(
        over_the_group_of_a_transport, backend="gloo", world_size=RANKS, transport=False
    )
    assert found == [[0, 0]] * RANKS


def one_does_not_come(ranks: Ranks, method: str) -> str:
    source, target = plan_of("zigzag", RANKS), plan_of("contiguous", RANKS)
    group = dist.new_group(list(range(RANKS)))
    os.environ["CULA_CP_TIMEOUT_S"] = "1"
    start = time.monotonic()
    try:
        if ranks.rank == 3:
            time.sleep(3)
            return "late"
        x = torch.zeros(1, source.for_rank(ranks.rank).num_tokens, 2)
        convert_layout(x, source, target, group, method=method)
    except (TransportTimeoutError, PeerFailedError):
        return "told" if time.monotonic() - start < 10 else "told late"
    finally:
        os.environ.pop("CULA_CP_TIMEOUT_S")
    return "needs nobody"


@pytest.mark.parametrize("method", ["p2p", "a2a"])
def test_waits_over_a_bare_group_end(method: str) -> None:
    results = run_ranks(
        one_does_not_come, backend="gloo", world_size=RANKS, transport=False, method=method
    )
    assert results[3] == "late"
    assert "told" in results[:3]
    assert "told late" not in results
    if method == "a2a":
        assert results[:3] == ["told"] * 3


def foreign_group(ranks: Ranks) -> list[str]:
    source, target = plan_of("zigzag", 2), plan_of("contiguous", 2)
    group = dist.new_group([0, 1])
    if ranks.rank < 2:
        return [""]
    with pytest.raises(TransportError) as caught:
        convert_layout(torch.zeros(1, 21, 2), source, target, group)
    return [str(caught.value)]


def test_a_group_that_this_process_is_not_in() -> None:
    texts = run_ranks(foreign_group, backend="gloo", world_size=RANKS, transport=False)
    assert all("not a member" in text for [text] in texts[2:])


def one_dies(ranks: Ranks, method: str) -> str:
    transport = ranks.create()
    source, target = plan_of("zigzag", RANKS), plan_of("contiguous", RANKS)
    rows = source.for_rank(ranks.rank).num_tokens
    x = torch.zeros(1, rows, 2)
    assert convert_layout(x, source, target, transport, method=method).shape[0] == 1
    if ranks.rank == 1:
        os._exit(7)
    start = time.monotonic()
    try:
        for _ in range(3):
            convert_layout(x, source, target, transport, method=method)
    except (PeerFailedError, TransportTimeoutError):
        return "told" if time.monotonic() - start < 10 else "told late"
    return "not told"


@pytest.mark.parametrize("method", ["p2p", pytest.param("a2a", marks=pytest.mark.slow)])
def test_55_a_rank_that_dies(method: str) -> None:
    """Survivors raise within the limit, and end well."""
    told = run_ranks(
        one_dies,
        backend="gloo",
        world_size=RANKS,
        transport=False,
        transport_timeout_s=2.0,
        exits={1: 7},
        method=method,
    )
    assert told == ["told", None, "told", "told"]


def one_is_wrong(ranks: Ranks) -> str:
    transport = ranks.create()
    source, target = plan_of("zigzag", RANKS), plan_of("contiguous", RANKS)
    rows = source.for_rank(ranks.rank).num_tokens - (ranks.rank == 2)
    start = time.monotonic()
    try:
        convert_layout(torch.zeros(1, rows, 2), source, target, transport, method="a2a")
    except (ValueError, PeerFailedError) as error:
        late = time.monotonic() - start > 10  # not by the time limit
        return f"{type(error).__name__}: {error}{', late' if late else ''}"
    return "done"


def test_52_a_rank_that_is_wrong_alone() -> None:
    texts = run_ranks(one_is_wrong, backend="gloo", world_size=RANKS, transport=False)
    assert texts[2].startswith("OpInputError: x: rank 2 has")
    for text in (texts[0], texts[1], texts[3]):
        assert text.startswith("PeerFailedError")
        assert "rank 2 has" in text
        assert "late" not in text


def test_threads_need_no_process_group() -> None:
    def body(transport: threads.ThreadTransport) -> None:
        round_trips(None, transport.rank, transport.world_size, 5)

    threads.run(body, RANKS, 20.0)
