# SPDX-License-Identifier: Apache-2.0
"""The scan under the ops: fp64 oracle at many world sizes, long chains, memory, and what `auto` takes."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch

import cptransport
from cptransport import CPContext, build_plan, ops, threads
from cptransport.cost import choose
from cptransport.errors import CapabilityError
from cptransport.testing import relative_error
from cptransport.testing.op_cases import INITIAL, OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import run_threads
from cptransport.transport import PartSpec

LAYOUTS = ("contiguous", "zigzag", "contiguous_per_sequence", "zigzag_per_sequence")


def scan(op: str, offsets: tuple[int, ...], world_size: int, layout: str, **more: object) -> OpSpec:
    """A call with an initial state, in fp64, by scan; exact bytes and every gradient are compared."""
    options = {"chunk_size": 16} if op == "ssd" else {}
    return OpSpec(
        op,
        offsets,
        world_size,
        layout,
        dtype="float64",
        composition="scan",
        optional=(INITIAL[op],),
        options=options,
    ).with_(**more)


def right(spec: OpSpec, timeout_s: float = 60.0) -> None:
    case = OpCase.of(spec)
    compared = check(case, run_threads(case, timeout_s))
    moved = [each for each in compared if each.name.startswith("bytes") and each.scale > 0]
    assert moved or spec.world_size == 1
    assert any(each.name == f"d{INITIAL[spec.op]}" for each in compared)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, "zigzag"),
        (3, "contiguous_per_sequence"),
        (4, "zigzag_per_sequence"),
        (7, "zigzag"),
        (8, "contiguous"),
        (9, "contiguous"),
    ],
)
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_scan_is_exact_at_any_world_size(op: str, world_size: int, layout: str) -> None:
    right(scan(op, (0, 3, 3, 31, 50), world_size, layout))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", range(2, 34))
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_scan_is_exact_at_every_world_size(op: str, world_size: int, layout: str) -> None:
    right(scan(op, (0, 7, 7, 90, 140), world_size, layout), 120.0)


@pytest.mark.slow
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_scan_is_exact_on_256_ranks(op: str) -> None:
    small = {"heads": 1, "value_heads": 3, "key_dim": 4, "value_dim": 5}
    right(scan(op, (0, 600), 256, "contiguous", **small), 280.0)


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_dense_batches(op: str) -> None:
    for layout in ("contiguous", "zigzag"):
        right(scan(op, (0, 40), 6, layout, batch=3))


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_one_rank_owns_several_segments_of_a_chain(op: str) -> None:
    pieces = [(i % 2, 2 * i, 2 * i + 2) for i in range(9)]  # what is 2 or 4 away is one's own
    right(scan(op, (0, 18), 2, "custom", boundaries=pieces))
    pieces = [(rank, 2 * i, 2 * i + 2) for i, rank in enumerate((0, 1, 0, 2, 1, 0, 2, 0))]
    right(scan(op, (0, 5, 16), 3, "custom", boundaries=pieces))


def test_a_state_that_is_v_major_outside() -> None:
    right(scan("kda", (0, 31), 5, "contiguous", options={"state_v_first": True}))


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_all_compositions_give_the_same_states(op: str) -> None:
    results = {}
    for composition in ("gather", "handoff", "scan"):
        spec = scan(op, (0, 11, 70), 7, "zigzag", composition=composition, dtype="float32")
        runs = run_threads(OpCase.of(spec))
        assert {run.record.composition for run in runs if run.record} == {composition}
        results[composition] = [x for run in runs for x in (run.output, run.final)]
    for composition in ("handoff", "scan"):
        for one, other in zip(results["gather"], results[composition], strict=True):
            assert relative_error(other, one) <= 1e-5


def test_scan_serves_transports_that_are_not_pairwise(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = build_plan([0, 5, 40], world_size=5, layout="zigzag")
    generator = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(1, 40, 2, 4, generator=generator).double() for _ in "qkvg")
    inputs = (q, k, v, -g.abs(), torch.rand(1, 40, 2, generator=generator).double())

    def run(composition: str, *, pairwise: bool) -> torch.Tensor:
        def layer(transport: threads.ThreadTransport) -> torch.Tensor:
            # Without it the transport refuses to hand out what comes before an own publish.
            transport.capabilities = replace(transport.capabilities, pairwise=pairwise)
            local = [plan.shard(x, transport.rank) for x in inputs]
            return ops.chunk_kda(*local, cp_context=CPContext(plan, transport))[0]

        monkeypatch.setenv("CULA_CP_COMPOSITION", composition)
        return plan.unshard(threads.run(layer, 5, 20.0))

    expected = run("gather", pairwise=True)
    assert relative_error(run("scan", pairwise=False), expected) <= 1e-12
    with pytest.raises(CapabilityError, match="not pairwise"):
        run("handoff", pairwise=False)


def test_auto_takes_the_predicted_best_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CULA_CP_COMPOSITION", raising=False)
    plan = build_plan([0, 16], world_size=16)
    sizes = ((2, 4, 5), (8, 96, 96))  # a round costs more than its bytes; the reverse

    def body(transport: threads.ThreadTransport) -> list[ops.RunRecord | None]:
        records = []
        for heads, keys, values in sizes:
            q, k, v, g = (torch.zeros(1, 1, heads, n) for n in (keys, keys, values, keys))
            context = CPContext(plan, transport)
            ops.chunk_kda(q, k, v, g, torch.zeros(1, 1, heads), cp_context=context, engine="torch")
            records.append(cptransport.last_run())
        return records

    every = threads.run(body, 16, 30.0)
    assert all(records == every[0] for records in every)
    small, large = every[0]
    assert small is not None
    assert large is not None
    assert (small.composition, large.composition) == ("gather", "scan")
    for record, (heads, keys, values) in zip((small, large), sizes, strict=True):
        parts = (
            PartSpec("state", (1, heads, keys, values), torch.float32),
            PartSpec("transition", (1, heads, keys, keys), torch.float32),
        )
        choice = choose(plan, parts, "threads", True)
        assert (record.composition, record.predicted_s) == (choice.composition, choice.predicted_s)
        assert record.reasons == choice.passed_over
        assert {name for name, _ in record.reasons} == {"gather", "scan", "handoff"} - {
            record.composition
        }


def test_auto_never_hands_off_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CULA_CP_COMPOSITION", raising=False)
    plan = build_plan([0, 16], world_size=3)

    def body(transport: threads.ThreadTransport) -> list[str]:
        found = []
        for pairwise in (True, False):
            transport.capabilities = replace(transport.capabilities, pairwise=pairwise)
            local = torch.zeros(1, plan.for_rank(transport.rank).num_tokens, 8, 128)
            context = CPContext(plan, transport)
            ops.chunk_kda(*[local] * 4, local[..., 0], cp_context=context, engine="torch")
            record = cptransport.last_run()
            assert record is not None
            found.append(record.composition)
        return found

    assert threads.run(body, 3, 30.0) == [["handoff", "gather"]] * 3


def test_what_was_asked_for_is_predicted_too() -> None:
    case = OpCase.of(scan("kda", (0, 40), 4, "contiguous"))
    (record,) = {run.record for run in run_threads(case)}
    assert record is not None
    assert (record.composition, record.reasons) == ("scan", ())
    assert record.predicted_s is not None
    assert record.predicted_s > 0


@pytest.fixture(scope="module")
def scaling() -> ModuleType:
    """What `docs/scaling.md` is made of."""
    path = Path(__file__).parents[2] / "docs" / "make_scaling.py"
    spec = importlib.util.spec_from_file_location("make_scaling", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("composition", ["gather", "scan", "handoff"])
def test_counters_and_states_of_16_ranks(scaling: ModuleType, composition: str) -> None:
    measured = scaling.measure(16, composition)
    assert measured["bytes_equal_plan"]
    assert measured["max_relative_error"] <= 1e-12


def test_memory_of_a_rank_grows_with_the_logarithm(scaling: ModuleType) -> None:
    both = (3 * 5 + 3 * 3) * 8  # a state and a transition in fp64
    for n in (8, 32):
        held = scaling.measure(n, "scan")["held_bytes_most"]
        assert held <= 2 * both * math.ceil(math.log2(n))  # per round what is staged and what comes
    gathered = {n: scaling.measure(n, "gather")["held_bytes_most"] for n in (8, 32)}
    assert gathered[32] > 3 * gathered[8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "composition"),
    [(64, "gather"), (64, "scan"), (64, "handoff"), (256, "gather"), (256, "scan"), (1024, "scan")],
)
def test_counters_and_states_of_many_ranks(
    scaling: ModuleType, world_size: int, composition: str
) -> None:
    measured = scaling.measure(world_size, composition)
    assert measured["bytes_equal_plan"]
    assert measured["max_relative_error"] <= 1e-12


#: fp32, log decay -0.001, weak writes: largest error of an entering state against fp64.
GROWTH = {8: 1e-6, 64: 2e-6, 512: 4e-6}


@pytest.mark.parametrize(
    ("segments", "composition"),
    [
        (8, "gather"),
        (8, "scan"),
        (64, "gather"),
        (64, "scan"),
        (512, "scan"),
        pytest.param(512, "gather", marks=pytest.mark.slow),
    ],
)
def test_error_of_long_chains_in_fp32(scaling: ModuleType, segments: int, composition: str) -> None:
    for direction, error in scaling.growth(segments, composition).items():
        assert 1e-9 < error <= GROWTH[segments], direction


def test_the_page_is_what_the_program_writes(scaling: ModuleType) -> None:
    results = json.loads(scaling.RESULTS.read_text(encoding="utf-8"))
    page = scaling.PAGE.read_text(encoding="utf-8")
    for name, body in scaling.sections(results).items():
        assert f"<!-- {name} -->\n\n{body}\n\n<!-- end -->" in page, name
    assert all(measured["bytes_equal_plan"] for measured in results["measured"])
    assert {(m["ranks"], m["composition"]) for m in results["measured"]} == {*scaling.MEASURED}


def test_the_recorded_predictions_are_todays(scaling: ModuleType) -> None:
    results = json.loads(scaling.RESULTS.read_text(encoding="utf-8"))
    checked = 0
    for row in results["model"]:
        if row["ranks"] <= 32:
            arguments = (row["op"], row["backend"], row["ranks"], row["composition"])
            assert scaling.model_row(*arguments) == row
            checked += 1
    assert checked == 2 * 2 * 3 * 3
