# SPDX-License-Identifier: Apache-2.0
"""Contract tests: what moves (routes, ``to``), what is handed out (``source``, ``parts``), and what is counted."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch

from cptransport.backend import bytes_at
from cptransport.errors import GenerationError, RouteError, TransportError
from cptransport.testing.contract_base import ContractTests, clause
from cptransport.testing.oracle import assert_bytes, bytes_of, fill
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, PartSpec, PartStats, Route, Slot

__all__ = ["RoutesContract", "part_at", "random_routed_slot"]


def random_routed_slot(name: str, world_size: int, seed: int) -> Slot:
    """Return a slot with random routes between different ranks: whole parts, rows, or nothing."""
    chance = random.Random(seed)
    parts = []
    for number in range(chance.randrange(1, 4)):
        rows = chance.randrange(1, 5)
        routes: set[Route] = set()
        for source in range(world_size):
            for destination in range(world_size):
                kind = chance.choice(("none", "none", "whole", "rows", "rows"))
                if source == destination or kind == "none":
                    continue
                if kind == "whole":
                    routes.add((source, destination))
                else:
                    chosen = chance.sample(range(rows), chance.randint(1, rows))
                    routes.update((source, destination, row) for row in chosen)
        shape = (rows, chance.randrange(0, 4), 3)
        dtype = chance.choice((torch.float32, torch.bfloat16, torch.int64))
        parts.append(PartSpec(f"part {number}", shape, dtype, frozenset(routes)))
    return Slot(name, tuple(parts))


def _check(
    transport: BoundaryTransport, slot: Slot, part: PartSpec, source: int, number: int
) -> None:
    """Check the rows of a part that its routes bring here."""
    got = transport.fetch(slot, part.name, source=source)
    rows = part.rows(source, transport.rank)
    assert got.shape == torch.Size(part.shape)
    for row in (None,) if rows is None else rows:
        assert_bytes(got, part, rank=source, slot=slot.name, generation=number, row=row)


def _random_routes(ranks: Ranks, seed: int) -> None:
    transport = ranks.create()
    chance = random.Random(seed * 100 + ranks.rank)
    sent: dict[str, int] = {}
    arrived: dict[str, int] = {}
    for number in range(1, 13):
        slot = random_routed_slot("routed", ranks.world_size, seed * 1000 + number)
        fill(transport, slot, number)
        transport.publish(slot, to=chance.choice((None, [], [ranks.rank])))
        for part in slot.parts:
            sources = [s for s in range(ranks.world_size) if part.rows(s, ranks.rank) != ()]
            for source in range(ranks.world_size):
                if source != ranks.rank:
                    whole = transport.capabilities.dense and _goes_to_all(part)
                    out = part.nbytes if whole else part.moved_bytes(ranks.rank, source)
                    sent[part.name] = sent.get(part.name, 0) + out
                    back = part.nbytes if whole else part.moved_bytes(source, ranks.rank)
                    arrived[part.name] = arrived.get(part.name, 0) + back
            for source in chance.sample(sources, chance.randint(0, len(sources))):
                _check(transport, slot, part, source, number)
                _check(transport, slot, part, source, number)  # with routes, looking twice is fine
    transport.stage(Slot("routed", ()))  # takes what was not looked at
    stats = transport.stats()
    for name in sent:
        found = stats.by_part.get(name, PartStats())
        assert (found.bytes_sent, found.bytes_received) == (sent[name], arrived[name]), name
    assert stats.bytes_sent == sum(sent.values())
    assert stats.bytes_received == sum(arrived.values())


def _goes_to_all(part: PartSpec) -> bool:
    """Whether some rank sends a part to two or more others; a ``dense`` transport then gathers it."""
    pairs = {route[:2] for route in part.routes or () if route[0] != route[1]}
    return len(pairs) > len({source for source, _ in pairs})


def _outside(ranks: Ranks) -> None:
    """Naming anything outside the routes is an error of the caller; nothing breaks, nobody else notices."""
    transport = ranks.create()
    last = ranks.world_size - 1
    part = PartSpec("x", (3,), torch.float32, frozenset({(0, last, 1)} if last else set()))
    slot = Slot("outside", (part,))
    fill(transport, slot, 1)
    transport.publish(slot)
    for source in range(ranks.world_size):
        if part.rows(source, ranks.rank) == ():
            with pytest.raises(RouteError):
                transport.fetch(slot, "x", source=source)
            if source != ranks.rank:
                with pytest.raises(RouteError):
                    transport.gather(slot, parts={"x": [source]})
    for source in (-1, ranks.world_size, 99):
        with pytest.raises(RouteError):
            transport.fetch(slot, "x", source=source)
        with pytest.raises(RouteError):
            transport.gather(slot, parts={"x": [source]})
    with pytest.raises(RouteError):
        transport.fetch(slot, "no such part", source=0)
    with pytest.raises(RouteError):
        transport.gather(slot, parts={"no such part": [0]})
    far = PartSpec("x", (3,), torch.float32, frozenset({(0, ranks.world_size)}))
    with pytest.raises(RouteError):
        transport.stage(Slot("far", (far,)))
    if last and ranks.rank == last:
        _check(transport, slot, part, 0, 1)
    transport.stage(slot)
    for to in ([ranks.world_size], [-1], [0, 0]):
        with pytest.raises(RouteError):
            transport.publish(slot, to=to)
    transport.publish(slot)


def _malformed(ranks: Ranks) -> None:
    """Malformed slots and parts are refused before any transport sees them."""
    del ranks
    f32 = torch.float32
    wrong: list[Any] = [
        lambda: PartSpec("", (1,), f32),
        lambda: PartSpec("x", (-1,), f32),
        lambda: PartSpec("x", (1,), "float32"),  # type: ignore[arg-type]
        lambda: PartSpec("x", (2,), f32, frozenset({(0,)})),  # type: ignore[arg-type]
        lambda: PartSpec("x", (2,), f32, frozenset({(0, 1, 2)})),
        lambda: PartSpec("x", (), f32, frozenset({(0, 1, 0)})),
        lambda: PartSpec("x", (2,), f32, frozenset({(-1, 1)})),
        lambda: Slot("", ()),
        lambda: Slot("s", (PartSpec("x", (1,), f32), PartSpec("x", (2,), f32))),
    ]
    for make in wrong:
        with pytest.raises(TransportError):
            make()


def _not_looked_at(ranks: Ranks) -> None:
    """With routes, what nobody looks at never blocks anybody and is never handed out later."""
    transport = ranks.create()
    size = ranks.world_size
    routes = frozenset((s, d) for s in range(size) for d in range(size) if s != d)
    part = PartSpec("x", (1000,), torch.float32, routes)
    slot = Slot("ignored", (part,))
    for number in range(1, 13):
        fill(transport, slot, number)
        transport.publish(slot)
        if number % 5 == ranks.rank:
            for source in range(size):
                if source != ranks.rank:
                    _check(transport, slot, part, source, number)


def _gather(ranks: Ranks) -> None:
    transport = ranks.create()
    size, me = ranks.world_size, ranks.rank
    whole = PartSpec("whole", (2, 3), torch.float32)
    ring = PartSpec(
        "ring", (4, 2), torch.bfloat16, frozenset({(s, (s + 1) % size, 2) for s in range(size)})
    )
    slot = Slot("gathered", (whole, ring))
    for number in range(1, 5):
        fill(transport, slot, number)
        transport.publish(slot)
        if number % 2:
            gathered = transport.gather(slot)
            assert gathered.sources("whole") == tuple(range(size))
            assert set(gathered.sources("ring")) == {(me - 1) % size, me}
        else:
            gathered = transport.gather(slot, parts={"whole": [size - 1, 0] if size > 1 else [0]})
            assert set(gathered.sources("whole")) == {0, size - 1, me}
        for part in slot.parts:
            for source in gathered.sources(part.name):
                tensor = gathered.tensor(part.name, source)
                rows = part.rows(source, me)
                for row in (None,) if rows is None or source == me else rows:
                    assert_bytes(
                        tensor, part, rank=source, slot=slot.name, generation=number, row=row
                    )
                again = gathered[part.name][source]
                assert again is not None
                assert again.data_ptr() == tensor.data_ptr()
            if part.name not in gathered.addresses:
                continue
            table = gathered.addresses[part.name]
            assert table.dtype == torch.int64
            assert table.shape == (size,)
            assert table.device == transport.device
            for source in range(size):
                address = int(table[source].item())
                if source not in gathered.sources(part.name):
                    assert address == 0, f"{part.name}, address of rank {source}"
                    continue
                found = part_at(address, part, transport.device)
                rows = part.rows(source, me)
                for row in (None,) if rows is None or source == me else rows:
                    assert_bytes(
                        found, part, rank=source, slot=slot.name, generation=number, row=row
                    )
        with pytest.raises(RouteError):
            gathered.tensor("no such part", 0)
        for source in set(range(size)) - set(gathered.sources("whole")):
            transport.fetch(slot, "whole", source=source)


def part_at(address: int, part: PartSpec, device: torch.device) -> torch.Tensor:
    """Copy the part that an address table says is there."""
    if device.type == "cuda":
        line = bytes_at(address, part.nbytes, device).cpu()
    else:
        line = torch.frombuffer(
            bytearray(ctypes.string_at(address, part.nbytes)), dtype=torch.uint8
        )
    return line.view(part.dtype).view(part.shape)


def _some_destinations(ranks: Ranks) -> None:
    """Without routes a part goes to every rank in ``to``, others get nothing, each takes it once."""
    transport = ranks.create()
    size, me = ranks.world_size, ranks.rank
    part = PartSpec("x", (3,), torch.float32)
    slot = Slot("to", (part,))
    sent = 0
    for number in range(1, 7):
        # In generation g rank s sends to rank (s + g) mod size and to itself.
        fill(transport, slot, number)
        target = (me + number) % size
        transport.publish(slot, to=sorted({target, me}))
        sent += part.nbytes * (target != me)
        source = (me - number) % size
        got = transport.fetch(slot, "x", source=source)
        assert_bytes(got, part, rank=source, slot="to", generation=number)
        with pytest.raises(GenerationError):
            transport.fetch(slot, "x", source=source)
    assert transport.stats().bytes_sent == transport.stats().bytes_received == sent


def _own_part(ranks: Ranks) -> None:
    """A rank's own data is at hand, never moves, never counts."""
    transport = ranks.create()
    part = PartSpec("x", (5,), torch.float64)
    slot = Slot("own", (part,))
    for number in range(1, 4):
        fill(transport, slot, number)
        transport.publish(slot, to=[ranks.rank])
        got = transport.fetch(slot, "x", source=ranks.rank)
        assert_bytes(got, part, rank=ranks.rank, slot="own", generation=number)
    stats = transport.stats()
    assert stats.bytes_sent == stats.bytes_received == stats.messages == 0


def _counters(ranks: Ranks) -> None:
    """Barriers, agreement and zero-size parts add no bytes; numbers are integers."""
    transport = ranks.create()
    peers = ranks.world_size - 1
    slot = Slot(
        "counted", (PartSpec("a", (3, 2), torch.float16), PartSpec("none", (0,), torch.int8))
    )
    for number in range(1, 4):
        fill(transport, slot, number)
        transport.publish(slot)
        transport.barrier()
        gathered = transport.gather(slot)
        assert bytes_of(gathered.tensor("a", 0)).numel() == 12
        stats = transport.stats()
        assert type(stats.bytes_sent) is type(stats.bytes_received) is type(stats.messages) is int
        assert stats.bytes_sent == stats.bytes_received == number * peers * 12
        assert stats.by_part.get("a", PartStats()) == PartStats(
            number * peers * 12, number * peers * 12
        )
        assert stats.by_part.get("none", PartStats()) == PartStats(0, 0)
        assert stats.waited_s >= 0.0
        if not peers:
            assert stats.messages == 0


class RoutesContract(ContractTests):
    """What moves, what is handed out, what is counted."""

    @clause("C7", "C9", "C23", "C34", ranks=2)
    def test_random_asymmetric_routes(self, world_size: int) -> None:
        """Whole parts, rows, or nothing, between any ranks; ``to`` changes nothing; counters are exact."""
        for seed in range(3):
            self.run(_random_routes, world_size, seed=seed)

    @clause("C8")
    def test_outside_the_routes_is_an_error_of_the_caller(self, world_size: int) -> None:
        """RouteError; the transport stays usable and peers are not disturbed."""
        self.run(_outside, world_size)

    @clause("C8")
    def test_malformed_slots_are_refused(self) -> None:
        """Names, shapes, dtypes, routes."""
        _malformed(None)  # type: ignore[arg-type]

    @clause("C9", ranks=2)
    def test_what_is_not_looked_at_counts_as_taken(self, world_size: int) -> None:
        """At the destination's next ``stage``."""
        self.run(_not_looked_at, world_size)

    @clause("C18")
    def test_gather_and_its_address_table(self, world_size: int) -> None:
        """Rank-major, the same bytes as fetch, addresses of the same memory."""
        self.run(_gather, world_size)

    @clause("C10", ranks=2)
    def test_without_routes_each_destination_takes_once(self, world_size: int) -> None:
        """Each rank in ``to`` and nobody else; a second take is a GenerationError."""
        self.run(_some_destinations, world_size)

    @clause("C34", "C38")
    def test_own_part_never_moves(self, world_size: int) -> None:
        """It is handed out in place and never counted."""
        self.run(_own_part, world_size)

    @clause("C34")
    def test_counters_are_payload_only(self, world_size: int) -> None:
        """Integers, by part, no barriers."""
        self.run(_counters, world_size)
