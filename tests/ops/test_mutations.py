# SPDX-License-Identifier: Apache-2.0
"""The oracle has teeth: each fault that such systems have had, put in on purpose, is caught.

Every mutation is made where the library would have the fault, and the calls that catch it are the
ordinary ones of the other tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cptransport import composition, exchange, halo, layouts, merge, plan, summary
from cptransport.ops import call as orchestration
from cptransport.ops import conv1d_torch
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import Comparison, judge
from cptransport.testing.op_rank import run_threads

PACKED = (0, 7, 26, 42)
CASES = {
    "kda": OpSpec("kda", PACKED, 4, optional=("initial_state",)),
    "square": OpSpec("kda", PACKED, 4, key_dim=8, value_dim=8),
    "zigzag": OpSpec("kda", PACKED, 3, "zigzag"),
    "ssd": OpSpec("ssd", PACKED, 4, options={"chunk_size": 16}),
    "handoff": OpSpec("kda", PACKED, 4, composition="handoff"),
    "scan": OpSpec("kda", (0, 7, 42), 5, "zigzag", composition="scan"),
    "conv1d": OpSpec("conv1d", PACKED, 4),
}

#: What is planned once and remembered.
CACHES = (
    composition._schedule,
    composition.expand_routes,
    halo.halo,
    orchestration._rows,
    plan._build,
)


@pytest.fixture(autouse=True)
def _clean_caches() -> Iterator[None]:
    yield
    forget()


def forget() -> None:
    """Drop what was planned while a mutation was in."""
    for cached in CACHES:
        cached.cache_clear()


def wrong(name: str, *, bytes_too: bool = False) -> list[Comparison]:
    """Run a case and return the comparisons that do not hold."""
    forget()
    case = OpCase.of(CASES[name])
    found = [each for each in judge(case, run_threads(case, 20.0)) if not each.ok]
    return [each for each in found if bytes_too or each.measure != "bytes"]


def names(found: list[Comparison]) -> set[str]:
    return {each.name for each in found}


@pytest.mark.parametrize("name", CASES)
def test_without_a_mutation_nothing_is_wrong(name: str) -> None:
    assert not wrong(name, bytes_too=True)


def drop_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every segment's outgoing state gets no gradient from its successor."""
    right = exchange.Exchange.incoming

    def incoming(self: exchange.Exchange, seed: Tensor | None = None) -> Tensor:
        table = right(self, seed)
        if self.course.schedule.direction == "backward":
            table = torch.zeros_like(table) if seed is None else seed.to(table.dtype, copy=True)
        return table

    monkeypatch.setattr(exchange.Exchange, "incoming", incoming)


@pytest.mark.parametrize("name", ["kda", "ssd", "zigzag", "handoff", "scan"])
def test_dropping_the_reverse_exchange(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drop_reverse(monkeypatch)
    found = wrong(name)
    assert found
    assert not names(found) & {"output", "final", "dq"}  # these stay exact: never test dq alone
    assert names(found) >= ({"dk", "dv", "dg", "dbeta"} if name != "ssd" else {"dx", "dB", "ddt"})


def replace_advance(
    monkeypatch: pytest.MonkeyPatch, advance: Callable[..., summary.Advance]
) -> None:
    """Replace the step of all folds: of gathered summaries, and of a handoff."""
    for module in (exchange, merge):
        monkeypatch.setattr(module, "advance", advance)


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("name", ["kda", "square", "zigzag", "handoff", "scan"])
def test_transposing_the_transition(
    name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"forward": "backward", "backward": "forward"}

    def advance(op: str, which: str, layout: str) -> summary.Advance:
        return summary.advance(op, other[which] if which == direction else which, layout)

    replace_advance(monkeypatch, advance)
    found = wrong(name)
    expected = {"output"} if direction == "forward" else {"dk", "dv"}
    assert names(found) >= expected, [str(each) for each in found]


def test_composing_transitions_in_the_wrong_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """They do not commute; only a scan multiplies them."""

    def compose(op: str, direction: str, layout: str) -> Callable[[Tensor, Tensor], Tensor]:
        right = summary.compose(op, direction, layout)
        return lambda one, other: right(other, one)

    monkeypatch.setattr(merge, "compose", compose)
    assert names(wrong("scan")) >= {"output", "dk", "dv"}


@pytest.mark.parametrize("name", ["kda", "ssd", "scan"])
def test_dropping_the_transition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 23: the approximation that forgets what an interior segment lets through."""

    def forget(
        transition: Tensor, state: Tensor, summary: Tensor, out: Tensor | None = None
    ) -> Tensor:
        return summary if out is None else out.copy_(summary)

    replace_advance(monkeypatch, lambda *_: forget)
    assert "output" in names(wrong(name))


@pytest.mark.parametrize("name", ["kda", "ssd"])
def test_leaking_a_document(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state runs over the end of a sequence into the next one."""
    monkeypatch.setattr(plan.Plan, "chain", lambda self, sequence: tuple(range(len(self.segments))))
    assert "output" in names(wrong(name))


def test_leaking_a_document_through_the_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    right = halo._tokens_before

    def tokens(
        whole: plan.Plan, chain: tuple[int, ...], consumer: int, count: int
    ) -> Iterator[tuple[int, int]]:
        return right(whole, (0,), consumer, count)

    monkeypatch.setattr(halo, "_tokens_before", tokens)
    assert names(wrong("conv1d")) >= {"output", "dx"}


def test_dropping_the_halo_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    right = halo.Halo.for_rank

    def for_rank(self: halo.Halo, rank: int, device: torch.device) -> halo.RankHalo:
        tables = right(self, rank, device)
        kept = tuple(copy for copy in tables.give_back if copy.peer == rank)
        return replace(tables, give_back=kept)

    monkeypatch.setattr(halo.Halo, "for_rank", for_rank)
    found = wrong("conv1d")
    assert names(found) == {"dx"}


@pytest.mark.parametrize("name", ["kda", "ssd", "conv1d"])
def test_truncating_an_uneven_shard(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 4: 42 tokens on 4 ranks, 11, 11, 10, 10, of which everybody computes 10."""
    right = orchestration._rows
    length = PACKED[-1] // 4

    def rows(*arguments: object) -> orchestration._Rows:
        made = right(*arguments)  # type: ignore[arg-type]
        cut = [
            replace(segment, stop=max(segment.start, min(segment.stop, length)))
            for segment in made.segments
        ]
        return replace(made, segments=tuple(cut))

    if name == "conv1d":
        line = conv1d_torch._line

        def cut(*arguments: object) -> conv1d_torch._Line:
            made = line(*arguments)  # type: ignore[arg-type]
            kept = made.rows < length
            return replace(made, outputs=made.outputs[kept], rows=made.rows[kept])

        monkeypatch.setattr(conv1d_torch, "_line", cut)
    else:
        monkeypatch.setattr(orchestration, "_rows", rows)
    assert "output" in names(wrong(name))


def test_layouts_that_are_taken_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 2: the plan says per sequence, the data is cut as a flat stream; shapes agree."""
    offsets = [0, 8, 24]
    flat = OpCase.of(OpSpec("kda", offsets, 2, "contiguous"))
    per_sequence = OpCase.of(OpSpec("kda", offsets, 2, "contiguous_per_sequence"))
    assert [each.plan.for_rank(0).num_tokens for each in (flat, per_sequence)] == [12, 12]
    shard = plan.Plan.shard
    monkeypatch.setattr(
        plan.Plan, "shard", lambda self, x, rank, dim=1: shard(flat.plan, x, rank, dim)
    )
    runs = run_threads(per_sequence)
    monkeypatch.undo()
    found = [each for each in judge(per_sequence, runs) if not each.ok]
    assert "output" in names(found)


@pytest.mark.parametrize("part", ["state", "transition"])
def test_moving_more_than_the_plan_says(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The counters are compared too: a part that goes to everybody shows."""
    right = exchange._slot

    def slot(name: str, wire: exchange.Wire, step: composition.Round) -> exchange.Slot:
        made = right(name, wire, step)
        everyone = range(len(step.ranks))
        routes = frozenset((s, d) for s in everyone for d in everyone if s != d)
        parts = tuple(replace(p, routes=routes) if p.name == part else p for p in made.parts)
        return replace(made, parts=parts)

    monkeypatch.setattr(exchange, "_slot", slot)
    found = wrong("kda", bytes_too=True)
    assert names(found) == {f"bytes forward {part}", f"bytes backward {part}"}


def test_a_hidden_factor_of_the_world_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 38: a mean over ranks where the sum is promised."""
    case = OpCase.of(
        OpSpec("ssd", PACKED, 4, optional=("D",), options={"chunk_size": 16}, dtype="float64")
    )
    runs = run_threads(case)
    halved = [
        replace(run, grads={n: g / 4 if n in ("A", "D") else g for n, g in run.grads.items()})
        for run in runs
    ]
    found = [each for each in judge(case, halved) if not each.ok]
    assert names(found) == {"dA", "dD"}
    assert {each.rank for each in found} == {None}


def test_a_gradient_off_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 22: the right sum with the rows on the wrong rank is wrong."""
    case = OpCase.of(CASES["kda"])
    runs = run_threads(case)
    name = "initial_state"
    moved = [runs[(rank + 1) % 4].grads[name] for rank in range(4)]
    wrong_runs = [
        replace(run, grads={**run.grads, name: grad}) for run, grad in zip(runs, moved, strict=True)
    ]
    found = [each for each in judge(case, wrong_runs) if not each.ok]
    assert {each.name.partition(",")[0] for each in found} == {"dinitial_state"}


def test_the_layouts_know_no_truncation() -> None:
    """Report 4, by itself: 10 tokens on 3 ranks are 4, 3, 3."""
    runs = layouts.assign_rows("contiguous", (0, 10), 3, None)
    assert [(run.rank, run.start, run.stop) for run in runs] == [(0, 0, 4), (1, 4, 7), (2, 7, 10)]
