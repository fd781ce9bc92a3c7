# SPDX-License-Identifier: Apache-2.0
"""``convert_layout`` on threads: values, gradients, bytes, and what it refuses."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import cptransport
from cptransport import (
    CapabilityError,
    CPContext,
    OpInputError,
    PeerFailedError,
    Plan,
    PlanError,
    TransportError,
    TransportTimeoutError,
    build_plan,
    convert_layout,
    threads,
)
from cptransport.relayout import received_rows
from cptransport.transports.loopback import LoopbackTransport

Transport = threads.ThreadTransport

METHODS = ("p2p", "a2a")
OFFSETS = [0, 7, 7, 20, 33]
PADDED = [0, 8, 10, 25, 40]
#: Plans of one stream of 40 rows on 4 ranks; one leaves two ranks empty.
PLANS = {
    **{
        layout: build_plan(OFFSETS, world_size=4, layout=layout, padded_cu_seqlens=PADDED)
        for layout in ("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence")
    },
    "uneven": build_plan(
        OFFSETS, world_size=4, boundaries=[0, 3, 3, 30, 40], padded_cu_seqlens=PADDED
    ),
    "empty": build_plan(
        OFFSETS,
        world_size=4,
        layout="custom",
        boundaries=[(3, 0, 9), (1, 9, 31), (3, 31, 40)],
        padded_cu_seqlens=PADDED,
    ),
}


def on_ranks(body: Callable[[Transport], Any], world_size: int = 4, timeout_s: float = 20.0) -> Any:
    return threads.run(body, world_size, timeout_s)


def stream(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("before", PLANS)
def test_rows_go_over_and_gradients_come_back(before: str, method: str) -> None:
    """Between all plans, ranks without tokens and padding rows included, and every byte counted."""
    whole, grad = stream(2, 40, 3), stream(2, 40, 3).flip(0)
    source = PLANS[before]

    def body(transport: Transport) -> None:
        context = CPContext(source, transport)
        rank = transport.rank
        for target in PLANS.values():
            x = source.shard(whole, rank).clone().requires_grad_()
            start = transport.activation_bytes_sent, transport.activation_bytes_received
            y = convert_layout(x, source, target, context, method=method)
            assert torch.equal(y, target.shard(whole, rank))
            y.backward(target.shard(grad, rank))
            assert x.grad is not None
            assert torch.equal(x.grad, source.shard(grad, rank))
            there, back = received_rows(source, target), received_rows(target, source)
            moved = transport.activation_bytes_received - start[1]
            assert moved == (there[rank] + back[rank]) * 2 * 3 * 8
            # Every row that leaves comes back.
            assert transport.activation_bytes_sent - start[0] == moved
        stats = transport.stats()
        assert (stats.bytes_sent, stats.bytes_received, stats.messages) == (0, 0, 0)
        assert not transport._generations

    on_ranks(body)


DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_arrive_as_they_left(dtype: torch.dtype) -> None:
    """Every dtype, NaN payloads, strides and dimensions; a rank's bytes do not depend on the method."""
    noise = torch.randint(0, 2, (5, 40, 2, dtype.itemsize), dtype=torch.uint8) * 255
    if dtype == torch.bool:
        noise &= 1
    whole = noise.view(dtype).squeeze(-1)
    source, target = PLANS["zigzag_per_sequence"], PLANS["uneven"]

    def body(transport: Transport) -> None:
        local, wanted = (plan.shard(whole, transport.rank) for plan in (source, target))
        for method in METHODS:
            for dim in range(-3, 3):
                x = local.movedim(1, dim)
                y = convert_layout(
                    x, source, target, CPContext(source, transport), method=method, dim=dim
                )
                expected = wanted.movedim(1, dim).contiguous()
                assert y.dtype == dtype
                assert y.is_contiguous()
                assert torch.equal(
                    y.view(-1).view(torch.uint8), expected.view(-1).view(torch.uint8)
                )

    on_ranks(body)


def test_the_same_rows_are_the_same_tensor() -> None:
    """Other words for the same plan, and one rank alone, move nothing."""
    plan = build_plan([0, 5, 12], world_size=2)
    same = build_plan([0, 5, 12], world_size=2, layout="custom", boundaries=[(1, 6, 12), (0, 0, 6)])
    assert plan != same

    def body(transport: Transport) -> None:
        x = plan.shard(stream(1, 12, 2), transport.rank)
        assert convert_layout(x, plan, same, CPContext(plan, transport)) is x
        assert transport.activation_bytes_sent == 0

    on_ranks(body, 2)
    whole = build_plan([0, 12], world_size=1)
    other = build_plan([0, 12], world_size=1, layout="zigzag")
    x = stream(1, 12, 2)
    assert convert_layout(x, whole, other, None) is x  # this process alone


def test_inside_threads_none_means_its_ranks() -> None:
    source, target = PLANS["zigzag"], PLANS["contiguous"]
    whole = stream(1, 40, 2)

    def body(transport: Transport) -> None:
        assert threads.current_transport() is transport
        for group in (None, transport):
            y = convert_layout(source.shard(whole, transport.rank), source, target, group)
            assert torch.equal(y, target.shard(whole, transport.rank))

    on_ranks(body)
    assert threads.current_transport() is None


def test_many_round_trips_and_both_methods_side_by_side() -> None:
    """Micro-batches in flight, backward in another order than forward."""
    source, target = PLANS["zigzag"], PLANS["contiguous_per_sequence"]

    def body(transport: Transport) -> None:
        context = CPContext(source, transport)
        live = []
        for i in range(12):
            x = source.shard(stream(1, 40, 1 + i), transport.rank).clone().requires_grad_()
            y = convert_layout(x, source, target, context, method=METHODS[i % 2])
            live.append((x, y, convert_layout(2 * y, target, source, context)))
        for x, y, z in reversed(live):
            assert torch.equal(z, 2 * x)
            (z * x.detach()).sum().backward()
            assert x.grad is not None
            assert torch.equal(x.grad, 2 * x)
            assert y.shape[1] == target.for_rank(transport.rank).num_tokens
        transport.barrier()
        assert not transport._hub.mail  # nothing is left lying around

    on_ranks(body)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_under_checkpointing(use_reentrant: bool) -> None:
    source, target = PLANS["zigzag"], PLANS["contiguous"]

    def body(transport: Transport) -> None:
        x = source.shard(stream(1, 40, 2), transport.rank).clone().requires_grad_()

        def layer(x: Tensor) -> Tensor:
            return convert_layout(x.sin(), source, target, CPContext(source, transport)).exp()

        checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
        assert x.grad is not None
        assert torch.allclose(x.grad, x.sin().exp() * x.cos())

    on_ranks(body)


def test_moves_are_linear_and_so_is_their_backward() -> None:
    """Unlike ops, a conversion can be differentiated again."""
    source, target = PLANS["zigzag"], PLANS["contiguous"]
    weight = stream(1, 40, 2)

    def body(transport: Transport) -> None:
        x = source.shard(stream(1, 40, 2), transport.rank).clone().requires_grad_()
        y = convert_layout(x, source, target, CPContext(source, transport))
        loss = (y**3 * target.shard(weight, transport.rank)).sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
        assert torch.allclose(second, 6 * x * source.shard(weight, transport.rank))

    on_ranks(body)


def test_in_inference_mode() -> None:
    """And what it leaves behind in caches serves gradients afterwards."""
    source = build_plan([0, 3, 40], world_size=4, layout="zigzag")
    target = build_plan([0, 3, 40], world_size=4)
    whole = stream(1, 40, 2)

    def body(transport: Transport) -> None:
        with torch.inference_mode():
            x = source.shard(whole, transport.rank) + 0
            for method in METHODS:
                y = convert_layout(x, source, target, transport, method=method)
                assert torch.equal(y, target.shard(whole, transport.rank))
        leaf = source.shard(whole, transport.rank).clone().requires_grad_()
        (convert_layout(leaf, source, target, transport) ** 2).sum().backward()
        assert leaf.grad is not None
        assert torch.equal(leaf.grad, 2 * leaf)

    on_ranks(body)


def other_plan() -> Plan:
    return build_plan([0, 40], world_size=4)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"method": "p2"},
        OpInputError,
        "'p2' is not valid; choose one of p2p, a2a; did you mean 'p2p'",
    ),
    ({"method": None}, OpInputError, "choose one of p2p, a2a"),
    ({"method": "P2P"}, OpInputError, "choose one of p2p, a2a"),
    ({"plan_to": "zigzag"}, OpInputError, "plan_to must be a Plan, got str"),
    ({"plan_to": other_plan()}, PlanError, "their cu_seqlens differ"),
    ({"plan_from": other_plan()}, PlanError, "their cu_seqlens differ"),
    ({"dim": 3}, OpInputError, "has no dimension 3"),
    ({"dim": True}, OpInputError, "has no dimension True"),
    ({"dim": 0}, OpInputError, r"rank \d has 1 rows in dimension 0, plan_from says 10"),
    ({"x": torch.zeros(1, 11, 2)}, OpInputError, "has 11 rows in dimension 1, plan_from says 10"),
    ({"x": [1.0]}, OpInputError, "x must be a tensor, got list"),
]


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_mistakes_are_seen_before_anything_moves(
    change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    source, target = PLANS["zigzag"], PLANS["contiguous"]

    def body(transport: Transport) -> str:
        given: dict[str, Any] = {"x": torch.zeros(1, 10, 2), "plan_from": source, "plan_to": target}
        given.update(change, cp_or_group=CPContext(source, transport))
        with pytest.raises(kind, match=words) as caught:
            convert_layout(**given)
        assert isinstance(caught.value, ValueError)
        assert transport.activation_bytes_sent == 0
        # Everybody raised, so everybody goes on.
        good = convert_layout(torch.zeros(1, 10, 2), source, target, given["cp_or_group"])
        return f"{caught.value}; {tuple(good.shape)}"

    assert len({text.replace(f"rank {r} ", "") for r, text in enumerate(on_ranks(body))}) == 1


def test_world_sizes_must_match() -> None:
    source, target = PLANS["zigzag"], PLANS["contiguous"]

    def body(transport: Transport) -> None:
        with pytest.raises(PlanError, match="the plans are for 4 ranks, there are 3"):
            convert_layout(torch.zeros(1, 10, 2), source, target, transport)

    on_ranks(body, 3)
    for group in (3, "world", CPContext):
        with pytest.raises(OpInputError, match="CPContext or a torch.distributed group"):
            convert_layout(torch.zeros(1, 10, 2), source, target, group)


def test_a_rank_that_is_wrong_alone_reaches_its_peers() -> None:
    source, target = PLANS["zigzag"], PLANS["contiguous"]

    def body(transport: Transport) -> str:
        rows = 9 if transport.rank == 2 else 10
        try:
            convert_layout(torch.zeros(1, rows, 2), source, target, CPContext(source, transport))
        except (OpInputError, PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return "needs nobody"

    start = time.monotonic()
    results = on_ranks(body)
    assert time.monotonic() - start < 10
    assert results[2].startswith("OpInputError: x: rank 2 has 9 rows")
    told = [text for text in results if text.startswith("PeerFailedError")]
    assert told
    assert all("rank 2" in text for text in told)


def test_with_the_check_all_ranks_raise_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    source, target = PLANS["zigzag"], PLANS["contiguous"]
    changes: list[dict[str, Any]] = [
        {"x": torch.zeros(1, 9, 2)},
        {"x": torch.zeros(1, 10, 3)},
        {"x": torch.zeros(1, 10, 2, dtype=torch.bfloat16)},
        {"x": torch.zeros(1, 10, 2).requires_grad_()},
        {"method": "a2a"},
        {"plan_to": PLANS["contiguous_per_sequence"]},
    ]

    def body(transport: Transport) -> list[str]:
        texts = []
        for change in changes:
            given = {"x": torch.zeros(1, 10, 2), "plan_to": target, "method": "p2p"}
            if transport.rank == 1:
                given.update(change)
            with pytest.raises(OpInputError) as caught:
                convert_layout(plan_from=source, cp_or_group=transport, **given)
            texts.append(str(caught.value))
        assert convert_layout(torch.zeros(1, 10, 2), source, target, transport).shape[1] == 10
        return texts

    results = on_ranks(body)
    assert all(result == results[0] for result in results)
    assert all("rank 1: " in text for text in results[0])


def test_waits_end() -> None:
    """A rank that does not come is named; the transport is then closed for everybody."""
    source, target = PLANS["zigzag"], PLANS["contiguous"]

    def body(transport: Transport) -> str:
        if transport.rank == 3:
            time.sleep(2)
            return "late"
        try:
            convert_layout(torch.zeros(1, 10, 2), source, target, transport, method="a2a")
        except TransportTimeoutError as error:
            return f"{error}; missing {error.missing}"
        except PeerFailedError as error:
            return f"told: {error}"
        return "needs nobody"

    results = threads.run(body, 4, 0.5)
    waited = [text for text in results[:3] if "activations did not come" in text]
    assert any("missing (3,)" in text for text in waited), results
    assert "needs nobody" not in results


def test_a_peer_that_fails_meanwhile_is_named() -> None:
    source, target = PLANS["zigzag"], PLANS["contiguous"]

    def body(transport: Transport) -> str:
        if transport.rank == 1:
            raise KeyError("bad data loader")
        with pytest.raises(PeerFailedError, match="bad data loader") as caught:
            convert_layout(torch.zeros(1, 10, 2), source, target, transport, method="a2a")
        assert caught.value.peer == 1
        return "told"

    start = time.monotonic()
    with pytest.raises(KeyError, match="bad data loader"):
        on_ranks(body)
    assert time.monotonic() - start < 10


def test_ranks_with_different_plans_are_found_out() -> None:
    """Without the check a wrong number of bytes shows at the receiver."""
    source = PLANS["zigzag"]

    def body(transport: Transport) -> str:
        target = PLANS["contiguous" if transport.rank else "contiguous_per_sequence"]
        try:
            convert_layout(torch.zeros(1, 10, 2), source, target, transport, method="a2a")
        except (TransportError, TransportTimeoutError) as error:
            return str(error)
        return "no contradiction here"

    results = threads.run(body, 4, 2.0)
    assert any("do the ranks hold different plans?" in text for text in results)


def test_a_transport_without_a_way_says_so() -> None:
    class Bare(LoopbackTransport):
        """Two ranks, says it; moves nothing itself."""

        def __init__(self) -> None:
            super().__init__(torch.device("cpu"), 1.0)
            self.world_size = 2

    source = build_plan([0, 8], world_size=2, layout="zigzag")
    with pytest.raises(CapabilityError, match="was not made by create_transport"):
        convert_layout(
            torch.zeros(1, 4, 2),
            source,
            build_plan([0, 8], world_size=2),
            CPContext(source, Bare()),
        )


def test_it_is_public() -> None:
    assert cptransport.convert_layout is convert_layout
    assert "convert_layout" in cptransport.__all__


def test_random_chains_of_conversions() -> None:
    whole = stream(1, 40, 5, dtype=torch.float32)

    def body(transport: Transport) -> None:
        rng = random.Random(0)
        here = PLANS["contiguous"]
        x = here.shard(whole, transport.rank)
        for _ in range(40):
            there = PLANS[rng.choice(list(PLANS))]
            x = convert_layout(x, here, there, transport, method=rng.choice(METHODS))
            here = there
            assert torch.equal(x, here.shard(whole, transport.rank))

    on_ranks(body)
