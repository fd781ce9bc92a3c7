# SPDX-License-Identifier: Apache-2.0
"""The dense workspace: its size, that it is one for all layers, what it counts, and ops on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cptransport.engines import KDAOptions, OpFacts
from cptransport.errors import RouteError
from cptransport.exchange import Wire, course
from cptransport.plan import build_plan
from cptransport.testing import RankPool, Ranks
from cptransport.testing.op_cases import OpCase
from cptransport.testing.op_oracle import check
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import run_specs
from cptransport.transport import PartSpec, Slot
from cptransport_cudnn_summary.engine import KDA_ENGINE
from cptransport_cudnn_summary.transport import workspace_bytes

STATE, TRANSITION = (1, 2, 5, 3), (1, 2, 3, 3)


def kda_slot(world_size: int, heads: int, dim: int, direction: str) -> Slot:
    """The slot of a gather of one sequence over all ranks, as the engine ``cudnn`` writes it."""
    plan = build_plan([0, world_size * 64], world_size=world_size)
    facts = OpFacts(
        op="kda",
        device_type="cuda",
        world_size=world_size,
        batch=1,
        heads=heads,
        value_heads=heads,
        key_dim=dim,
        value_dim=dim,
        dtypes={},
        state_dtype=torch.float32,
        max_segments=plan.max_segments,
        max_tokens=plan.max_tokens,
        requires_grad=frozenset(),
        options=KDAOptions(1.0),
    )
    parts = KDA_ENGINE.slot_parts(facts)
    wire = Wire("kda", parts, "v_major", 1, torch.device("cpu"), "gather")
    (slot,) = course(wire, plan, direction, 0).slots
    return slot


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_size(direction: str) -> None:
    """The figure of the docs: 256 MiB at world size 64, H = 32, K = V = 128."""
    assert workspace_bytes(kda_slot(64, 32, 128, direction), 64) == 256 << 20
    assert workspace_bytes(kda_slot(4, 8, 128, direction), 4) == 4 << 20
    # Between two ranks everything moves to one destination: nothing is gathered.
    assert workspace_bytes(kda_slot(2, 32, 128, direction), 2) == 0


def slot_of(size: int) -> Slot:
    """What rank r sends goes to all later ones."""
    later = frozenset((s, d) for s in range(size) for d in range(s + 1, size))
    return Slot(
        "kda.forward",
        (
            PartSpec("state", STATE, torch.float32, later),
            PartSpec("transition", TRANSITION, torch.float32, later),
        ),
    )


def _layers(ranks: Ranks, layers: int) -> dict[str, Any]:
    transport: Any = ranks.create()
    size, me = ranks.world_size, ranks.rank
    slot = slot_of(size)
    addresses, held = set(), []
    for layer in range(layers):
        staged = transport.stage(slot)
        for part in slot.parts:
            staged[part.name].fill_(100 * layer + me)
        transport.publish(slot)
        gathered = transport.gather(slot)
        addresses.add((gathered["state"].data_ptr(), gathered["transition"].data_ptr()))
        held.append(sum(memory.numel() for memory in transport._memory.values()))
        for part in slot.parts:
            table = gathered[part.name]
            assert isinstance(table, torch.Tensor)
            assert table.shape == (size, *part.shape)
            assert table.is_contiguous()
            assert table[:me].is_contiguous()
            sources = set(gathered.sources(part.name))
            asked = {s for s in range(size) if part.rows(s, me) != ()}
            assert sources == asked | {me}
            for source in sources:
                assert bool((gathered.tensor(part.name, source) == 100 * layer + source).all())
                assert bool((table[source] == 100 * layer + source).all())
        if me == 0:
            with pytest.raises(RouteError):
                transport.fetch(slot, "state", source=1)  # it arrives, but was not asked for
    transport.stage(Slot(slot.name, ()))  # counts what was not looked at
    return {
        "addresses": len(addresses),
        "held": held,
        "stats": transport.stats(),
        "sizes": {part.name: part.nbytes for part in slot.parts},
        "expected": workspace_bytes(slot, size),
    }


@pytest.fixture(
    scope="module",
    params=[("cudnn_summary", True, 3), ("fake_dense_nccl:BACKEND", False, 4)],
    ids=["gloo", "nccl"],
)
def pool(request: pytest.FixtureRequest, stand_in_for_nccl: None) -> Iterator[RankPool]:
    """Ranks on the transport: processes over gloo, and threads over the stand-in for NCCL."""
    backend, processes, world_size = request.param
    with RankPool(backend, world_size, processes=processes) as made:
        yield made


def test_one_workspace_serves_all_layers(pool: RankPool) -> None:
    size, layers = pool.world_size, 5
    for row in pool.run(_layers, transport=False, layers=layers):
        assert row["addresses"] == 1
        assert row["held"][1:] == row["held"][1:2] * (layers - 1)
        # Dense tables, and what this rank stages twice.
        assert row["held"][-1] == row["expected"] + 2 * sum(row["sizes"].values())
        # What arrived: every rank's part from every other, asked for or not.
        for name, nbytes in row["sizes"].items():
            arrived = row["stats"].by_part[name]
            assert arrived.bytes_received == arrived.bytes_sent == layers * (size - 1) * nbytes


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_ops(op: str, pool: RankPool) -> None:
    """Random calls against the recurrence; at least the bytes that the plan says."""
    rngs = (random.Random(f"{op}/{seed}/dense") for seed in range(20))
    specs = (random_spec(rng, op, world_size=pool.world_size, dtype="float64") for rng in rngs)
    # Not pairwise, so without a handoff.
    chosen = [spec for spec in specs if spec.composition != "handoff"][:5]
    assert len(chosen) == 5
    for spec in chosen:
        # One at a time: ranks that are threads share the variables that a call is made under.
        runs = pool.run(run_specs, specs=[spec.to_json()])
        check(OpCase.of(spec), [rank[0] for rank in runs], exact_bytes=False)
