# SPDX-License-Identifier: Apache-2.0
"""The Triton engine of SSD against the recurrence: ranks, packing, options, decays, padding."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ssd_chain import Rank, check, lab

import cptransport.engines.triton.ssd as triton_ssd
import cptransport_kernels.ssd as ssd_kernels
from cptransport.engines import LocalSegment, Need, OpFacts, SSDOptions
from cptransport.engines.triton import SSD_ENGINE
from cptransport.plan import build_plan
from cptransport_kernels.launch import count_launches
from cptransport_kernels.ssd_tables import SSDSegment, build_ssd_tables

EVERYTHING = ("D2", "z", "dt_bias")


def case(
    cu_seqlens: list[int],
    world_size: int = 2,
    *,
    plan: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """A case with two groups of two heads, headdim 6 and dstate 5, unless said otherwise."""
    built = build_plan(cu_seqlens, world_size=world_size, **(plan or {}))
    return lab.make_case("ssd", built, **{"heads": (2, 4), "dims": (5, 6), **arguments})


@pytest.mark.parametrize(
    ("cu_seqlens", "world_size", "arguments"),
    [
        ([0, 40], 1, {}),
        ([0, 40], 3, {"initial": False}),
        ([0, 33], 4, {"plan": {"boundaries": [0, 0, 1, 32, 33]}}),
        ([0, 7, 7, 8, 60], 3, {"heads": (1, 2), "optional": ("D",)}),
        ([0, 0, 40, 40], 2, {"heads": (1, 1)}),
        ([0, 36], 2, {"batch": 2, "optional": EVERYTHING, "dt_softplus": True}),
        ([0, 21, 50], 2, {"heads": (2, 2), "optional": ("z",), "plan": {"layout": "zigzag"}}),
        ([0, 40], 2, {"heads": (1, 2), "dims": (17, 33)}),
        ([0, 35], 2, {"heads": (1, 2), "dims": (70, 6), "optional": EVERYTHING}),
    ],
)
def test_matches_recurrence_on_every_rank(
    cu_seqlens: list[int], world_size: int, arguments: dict[str, Any], device: str
) -> None:
    check(case(cu_seqlens, world_size, **arguments), device=device)


def test_two_blocks_of_channels(device: str) -> None:
    check(case([0, 34], heads=(1, 2), dims=(3, 70), optional=EVERYTHING), device=device)


@pytest.mark.parametrize("optional", [(), ("D",), ("D", "z"), ("D2", "dt_bias")])
def test_optional_inputs(optional: tuple[str, ...], device: str) -> None:
    check(case([0, 35], optional=optional, dt_softplus=True), device=device)


@pytest.mark.parametrize("length", [31, 32, 33, 65])
def test_remainders_of_chunks(length: int, device: str) -> None:
    check(case([0, length], 1, heads=(1, 1)), device=device)


@pytest.mark.parametrize("seed", [2, 5, 8, 12])
def test_random_plans_with_nan_in_padding(seed: int, device: str) -> None:
    check(lab.random_case("ssd", seed), device=device)


@pytest.mark.parametrize("splits", [1, 2])
def test_cut_segments_equal_whole_ones(
    splits: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_ssd, "ssd_piece_tokens", lambda *_: 32)
    monkeypatch.setattr(ssd_kernels, "ssd_splits", lambda *_: splits)
    check(case([0, 100, 101, 130], 2, heads=(1, 2), optional=("D",)), device=device)
    check(case([0, 70], 2, batch=2, heads=(1, 2), initial=False), device=device)


def test_float16(device: str) -> None:
    check(case([0, 40], optional=EVERYTHING), dtype=torch.float16, device=device)


def test_clamped_steps_have_no_gradient(device: str) -> None:
    clamped = case([0, 40], dt_min=0.4, dt_max=1.0)
    actual = check(clamped, device=device)
    d = clamped.inputs["dt"]
    outside = (d < 0.4) | (d > 1.0)
    assert outside.sum() > 20
    assert not actual.grads["dt"][outside].count_nonzero()
    assert actual.grads["dt"][~outside].all()


@pytest.mark.parametrize("rate", [0.1, 0.0, -20.0, -1e4, -3e38, -math.inf])
def test_decays(rate: float, device: str) -> None:
    strong = case([0, 40])
    strong.inputs["A"][1:3] = rate
    check(strong, device=device)


def test_a_step_of_zero_keeps_the_state(device: str) -> None:
    kept = case([0, 40])
    kept.inputs["dt"][:, ::3] = 0.0
    check(kept, device=device)


def test_steps_of_any_size(device: str) -> None:
    sizes = case([0, 50], optional=("dt_bias",), dt_softplus=True)
    sizes.inputs["dt"][:, ::5] = 30.0
    sizes.inputs["dt"][:, 1::5] = -40.0
    sizes.inputs["A"].fill_(-0.3)
    check(sizes, device=device)


def test_small_decays_after_strong_ones_keep_their_digits(device: str) -> None:
    """A cumulative sum in float32 would have lost them: errors of 1e-4."""
    after = case([0, 64], 1, heads=(1, 1))
    after.inputs["A"].fill_(-1.0)
    after.inputs["dt"][:, :16] = 120.0
    after.inputs["dt"][:, 16:] *= 0.1
    after.inputs["dt"][:, 32:48] = 120.0
    after = after.to(torch.float32, device)
    actual = lab.chain(SSD_ENGINE, after).run()
    expected = lab.reference(after)
    for name in ("output", "dx", "dB", "dC"):
        a, e = actual.items()[name].double(), expected.items()[name]
        assert (a - e).abs().max() < 2e-6 * e.abs().max(), name


def test_gradient_of_decays_that_nothing_passes_is_zero(device: str) -> None:
    """Tokens that see only themselves: terms of a token with itself never enter."""
    alone = case([0, 40], 1, heads=(1, 1))
    alone.inputs["A"].fill_(-3000.0)
    alone.inputs["dt"] += 0.5
    actual = check(alone, "dA", "dinitial", device=device)
    assert actual.grads["dt"].all()


def test_a_strong_decay_forgets_exactly(device: str) -> None:
    given = case([0, 50], 1, heads=(1, 1)).to(torch.float32, device)
    given.inputs["dt"][:, 20] = 1e5
    x = given.inputs["x"].clone()
    x[:, :20] *= -2
    other = replace(given, inputs={**given.inputs, "x": x}, initial=3 * given.initial)
    a, b = (lab.chain(SSD_ENGINE, each).run() for each in (given, other))
    assert torch.equal(a.output[:, 20:], b.output[:, 20:])
    assert torch.equal(a.final, b.final)
    assert not torch.equal(a.output[:, :20], b.output[:, :20])


def test_chunk_size_changes_nothing(device: str) -> None:
    runs = []
    for chunk_size in (16, 256):
        given = case([0, 40], chunk_size=chunk_size).to(torch.float32, device)
        runs.append(lab.chain(SSD_ENGINE, given).run().items())
    assert all(torch.equal(value, runs[1][name]) for name, value in runs[0].items())


INTERIOR = [LocalSegment(0, 70, 0, False, False)]
ALL = Need(True, True)


def test_interior_rank_costs_ten_launches(device: str) -> None:
    rank = Rank(INTERIOR, 70, device=device)
    rank.backward(rank.forward(ALL), ALL)
    before = build_ssd_tables.cache_info()
    with count_launches() as forward:
        finished = rank.forward(ALL)
    with count_launches() as backward:
        rank.backward(finished, ALL)
    assert forward.total() == 3, forward
    assert backward.total() == 7, backward
    # Tables are uploaded once.
    assert build_ssd_tables.cache_info().misses == before.misses


def test_every_kernel_runs_when_segments_are_cut_and_groups_split(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_ssd, "ssd_piece_tokens", lambda *_: 32)
    monkeypatch.setattr(ssd_kernels, "ssd_splits", lambda *_: 2)
    rank = Rank(INTERIOR, 70, device=device)
    with count_launches() as counter:
        rank.backward(rank.forward(ALL), ALL)
    assert {name[4:-7]: count for name, count in counter.items()} == {
        "summary": 2,
        "join": 2,
        "scores": 1,
        "output": 1,
        "chunk_states": 2,
        "pair_grads": 1,
        "write_grads": 1,
        "read_grads": 1,
        "sum_grads": 1,
    }


def test_a_rank_alone_computes_no_summaries(device: str) -> None:
    rank = Rank([LocalSegment(0, 40, 0, True, True)], 40, device=device)
    with count_launches() as counter:
        rank.backward(rank.forward(Need(False, False)), Need(False, False))
    assert not counter["ssd_summary_kernel"]
    assert not counter["ssd_join_kernel"]


@pytest.mark.parametrize("piece_tokens", [32, 64])
def test_a_rank_alone_asks_for_no_states(
    piece_tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What enters is known to be zero; where it is not known, a table of zeros says the same."""
    monkeypatch.setattr(triton_ssd, "ssd_piece_tokens", lambda *_: piece_tokens)

    def never() -> torch.Tensor:
        raise AssertionError("asked for states")

    runs = []
    for alone in (True, False):
        rank = Rank([LocalSegment(0, 60, 0, alone, alone)], 60, device=device)
        incoming = never if alone else lambda rank=rank: torch.zeros_like(rank.table)
        finished = rank.forward(Need(False, False), incoming)
        grads = rank.backward(finished, Need(False, False), incoming)
        runs.append([finished.output, finished.outgoing, grads.incoming, *grads.inputs.values()])
    for a, b in zip(*runs, strict=True):
        assert a is b is None or torch.equal(a, b)


def test_local_work_is_launched_before_the_wait(device: str) -> None:
    """What overlap hides an exchange behind; the summary is complete by then."""
    rank = Rank(INTERIOR, 70, device=device)
    seen = []

    def incoming() -> torch.Tensor:
        seen.append(set(counter))
        return rank.table

    with count_launches() as counter:
        finished = rank.forward(ALL, incoming)
    with count_launches() as counter:
        rank.backward(finished, ALL, incoming)
    assert seen == [
        {"ssd_summary_kernel", "ssd_scores_kernel"},
        {"ssd_summary_kernel", "ssd_chunk_states_kernel", "ssd_pair_grads_kernel"},
    ]


def test_kept_for_the_backward_are_inputs_and_states_of_pieces(device: str) -> None:
    rank = Rank(INTERIOR, 70, device=device)
    *inputs, entering = rank.forward(ALL).saved.tensors
    given = {x.data_ptr() for x in vars(rank.inputs).values() if isinstance(x, torch.Tensor)}
    assert {x.data_ptr() for x in inputs if x is not None} == given
    assert entering.shape == rank.table.shape
    alone = Rank([LocalSegment(0, 40, 0, True, True)], 40, device=device)
    assert alone.forward(Need(False, False)).saved.tensors[-1].numel() == 0


def test_rows_of_no_segment_are_zero_and_never_read(device: str) -> None:
    segments = [LocalSegment(3, 20, 0, False, True), LocalSegment(25, 40, 1, True, False)]
    padding = [*range(3), *range(20, 25), *range(40, 45)]
    rank = Rank(segments, 45, device=device, poison=padding, gated=True)
    finished = rank.forward(Need(True, False))
    grads = rank.backward(finished, Need(True, False)).inputs
    for tensor in (finished.output, *(grads[name] for name in ("x", "dt", "B", "C", "z"))):
        assert tensor is not None
        assert torch.equal(tensor[:, padding], torch.zeros_like(tensor[:, padding]))
        assert tensor.isfinite().all()
        assert tensor[:, 3:20].abs().max() > 0
    assert all(grads[name].isfinite().all() for name in ("A", "D", "dt_bias"))


def test_only_what_is_needed_is_written(device: str) -> None:
    for need, state, transition in (
        (Need(True, False), True, False),
        (Need(False, True), False, True),
        (Need(False, False), False, False),
    ):
        rank = Rank(INTERIOR, 70, device=device)
        for table in rank.out.values():
            table.fill_(math.nan)
        rank.forward(need)
        assert bool(rank.out["state"].isfinite().all()) is state
        assert bool(rank.out["transition"].isfinite().all()) is transition


def test_views_of_a_wide_parent_are_read_in_place(device: str) -> None:
    parent = torch.randn(1, 70, 2 * 5 + 2 * 6, device=device)
    views = {
        "x": parent[..., :10].unflatten(-1, (2, 5)),
        "B": parent[..., 10:16].unflatten(-1, (1, 6)),
        "C": parent[..., 16:].unflatten(-1, (1, 6)),
    }
    results = []
    for given in (views, {name: x.contiguous() for name, x in views.items()}):
        rank = Rank(INTERIOR, 70, device=device, tokenwise=given)
        finished = rank.forward(ALL)
        if given is views:
            assert finished.saved.tensors[0].data_ptr() == parent.data_ptr()
        grads = rank.backward(finished, ALL).inputs
        results.append([finished.output, *(x for x in grads.values() if x is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_same_inputs_give_the_same_bits(device: str) -> None:
    runs = []
    for _ in range(2):
        rank = Rank(INTERIOR, 70, device=device, gated=True)
        finished = rank.forward(ALL)
        grads = rank.backward(finished, ALL)
        runs.append([finished.output, grads.incoming, *grads.inputs.values(), *rank.out.values()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_tables_of_pieces_and_chunks() -> None:
    segments = (SSDSegment(0, 70, True, state=True), SSDSegment(70, 70, False))
    tables = build_ssd_tables(segments, 72, 32, 64, torch.device("cpu"), False)
    assert tables.pieces.tolist() == [
        [0, 64, 0, 0, 0, 1, 0, 1],
        [64, 70, 0, 2, 1, 1, 1, 1],
        [70, 70, 1, 3, 2, 0, 1, 0],
    ]
    assert tables.segments.tolist() == [[0, 2, 1, 0], [2, 1, 0, 0]]
    assert tables.chunks.tolist() == [[0, 32], [32, 64], [64, 70]]
    assert (tables.cut, tables.walked, tables.gaps) == (True, True, True)
    whole = build_ssd_tables((SSDSegment(0, 70, True),), 70, 32, 96, torch.device("cpu"), True)
    assert whole.pieces.tolist() == [[0, 70, 0, 0, -1, 0, 1, 0]]
    assert (whole.cut, whole.walked, whole.gaps, whole.num_rows) == (False, False, False, 0)


def facts(**changes: Any) -> OpFacts:
    known: dict[str, Any] = {
        "op": "ssd",
        "device_type": "cuda",
        "world_size": 2,
        "batch": 1,
        "heads": 2,
        "value_heads": 4,
        "key_dim": 128,
        "value_dim": 96,
        "dtypes": dict.fromkeys(("x", "dt", "A", "B", "C"), torch.bfloat16),
        "state_dtype": torch.float32,
        "max_segments": 3,
        "max_tokens": 100,
        "requires_grad": frozenset({"x"}),
        "options": SSDOptions(64),
    }
    return OpFacts(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"op": "kda"}, "serves ssd"),
        ({"key_dim": 257}, "needs dstate from 1 to 256"),
        ({"value_dim": 300}, "needs headdim from 1 to 256"),
        ({"dtypes": {"x": torch.float64}, "state_dtype": torch.float64}, "needs x in bfloat16"),
        ({"device_type": "xpu"}, "needs CUDA tensors"),
    ],
)
def test_eligible_says_why_not(changes: dict[str, Any], reason: str | None) -> None:
    found = SSD_ENGINE.eligible(facts(**changes))
    assert found == reason if reason is None else reason in (found or "")


def test_slots_have_the_callers_sizes() -> None:
    state, transition = SSD_ENGINE.slot_parts(facts(batch=2))
    assert (state.shape, state.dtype) == ((6, 4, 96, 128), torch.float32)
    assert (transition.shape, transition.dtype) == ((6, 4), torch.float32)
