# SPDX-License-Identifier: Apache-2.0
"""``CULA_CP_CHECK=1`` compares what the ranks ask for, and changes nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_calls import CASES, FUNCTIONS, Change, Transport, arguments, one_differs

import cptransport
from cptransport import CPContext, OpInputError, PeerFailedError, build_plan, ops, threads
from cptransport.control import ControlPlane
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import run_rank

DIFFERENT: list[tuple[str, Change, str]] = [
    ("kda", lambda given: given.update(scale=0.3), "scale=0.3"),
    ("kda", lambda given: given.update(use_qk_l2norm_in_kernel=True), "l2norm"),
    ("kda", lambda given: given.update(initial_state=None), "initial_state"),
    ("kda", lambda given: given.update(initial_state=given["initial_state"].double()), "float64"),
    ("kda", lambda given: given["g"].requires_grad_(), "requires_grad"),
    ("kda", lambda given: given.update(g=given["g"].double()), "g torch.float64"),
    ("ssd", lambda given: given.update(chunk_size=32), "chunk_size=32"),
    ("ssd", lambda given: given.update(dt_softplus=True), "dt_softplus=True"),
    ("ssd", lambda given: given["A"].requires_grad_(), "requires_grad"),
    ("conv1d", lambda given: given.update(activation="silu"), "activation silu"),
    ("conv1d", lambda given: given.update(weight=given["weight"][:, 1:]), "W 3"),
    ("conv1d", lambda given: given["x"].requires_grad_(), "requires_grad"),
    ("mixer", lambda given: given.update(load_balancing="none"), "load balancing none"),
    ("mixer", lambda given: given["D"].requires_grad_(), "requires_grad"),
]


@pytest.mark.parametrize(("op", "change", "words"), DIFFERENT)
def test_the_check_compares_what_is_valid_but_different(
    op: str, change: Change, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    results = one_differs(op, change)
    texts = {str(error) for error, _ in results}
    assert {type(error) for error, _ in results} == {OpInputError}
    assert len(texts) == 1
    (text,) = texts
    assert "differently" in text
    assert "rank 1: " in text
    assert words in text
    assert [after for _, after in results] == ["usable"] * 3


@pytest.mark.parametrize("op", FUNCTIONS)
def test_02_27_plans_that_differ(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports 2 and 27: another layout with the same shapes, or other offsets, on one rank."""
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    right = CASES[op].plan
    others = [
        build_plan([0, 9, 24], world_size=3),
        build_plan(right.cu_seqlens, world_size=3, boundaries=[0, 7, 15, 24]),
        build_plan(right.cu_seqlens, world_size=3, boundaries=[0, 8, 16, 24]),
    ]
    differ = [plan for plan in others if plan.digest() != right.digest()]
    assert len(differ) == 2  # the third one says the same in other words
    for plan in differ:
        if plan.for_rank(1).num_tokens != 8:
            continue

        def change(given: dict[str, Any], plan: cptransport.Plan = plan) -> None:
            given["cp_context"] = CPContext(plan, given["cp_context"].transport)

        results = one_differs(op, change)
        assert {type(error) for error, _ in results} == {OpInputError}
        assert len({str(error) for error, _ in results}) == 1
        assert "plan" in str(results[0][0])


def test_02_two_meanings_of_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    case = OpCase.of(OpSpec("kda", [0, 8, 24], 2))
    layouts = ("contiguous", "contiguous_per_sequence")

    def body(transport: Transport) -> str:
        plan = build_plan([0, 8, 24], world_size=2, layout=layouts[transport.rank])
        local = {n: plan.shard(x, transport.rank) for n, x in case.tokens.items()}
        with pytest.raises(OpInputError, match="plan") as caught:
            ops.chunk_kda(**local, cp_context=CPContext(plan, transport))
        return str(caught.value)

    assert len(set(threads.run(body, 2, 20.0))) == 1


def positive(given: dict[str, Any]) -> None:
    given["g"] = given["g"].clone()
    given["g"][0, -1, 0, 0] = 1e-3


def test_16_positive_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 16: the caller's mistake; looked for under the check only, found on all ranks."""
    without = one_differs("kda", positive)
    assert [error for error, _ in without] == [None] * 3
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    results = one_differs("kda", positive)
    assert {type(error) for error, _ in results} == {OpInputError}
    assert len({str(error) for error, _ in results}) == 1
    assert "rank 1: g must be a natural-log decay in [-inf, 0]" in str(results[0][0])
    assert [after for _, after in results] == ["usable"] * 3


def test_69_the_wrong_head_count_of_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 69: HV = 2H, A_log [H] is refused with its shape, [HV] is right."""
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    spec = OpSpec("kda", [0, 7, 24], 2, heads=3, value_heads=6, optional=("A_log",))
    case = OpCase.of(spec.with_(options={"use_gate_in_kernel": True}))

    def body(transport: Transport) -> str:
        local = {n: case.plan.shard(x, transport.rank) for n, x in case.tokens.items()}
        context = CPContext(case.plan, transport)
        with pytest.raises(OpInputError) as caught:
            ops.chunk_kda(**local, cp_context=context, use_gate_in_kernel=True, A_log=torch.ones(3))
        return str(caught.value)

    for text in threads.run(body, 2, 20.0):
        assert "A_log must be [HV] = [6], got [3]" in text
    check(case, threads.run(lambda transport: run_rank(transport, case), 2, 20.0))


def test_a_fast_rank_does_not_get_ahead_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts are there and rank 0 has raised what they say, while rank 1 still looks for one."""
    store = torch.distributed.HashStore()
    fast, slow = (ControlPlane(store, rank, 2, 20.0) for rank in range(2))
    fast.begin_step()
    slow.begin_step()
    has = ControlPlane._has

    def late(self: ControlPlane, key: str) -> bool:
        if self is slow and not fast._raised:
            store.set("agree/1/1", "mine")
            assert fast.exchange("yours", "inputs") == ["yours", "mine"]
            fast.report(OpInputError("they differ"), fatal=False)
            return False
        return has(self, key)

    monkeypatch.setattr(ControlPlane, "_has", late)
    assert slow.exchange("mine", "inputs") == ["yours", "mine"]
    with pytest.raises(PeerFailedError, match="they differ"):  # only a rank that goes on hears it
        slow.check()


def test_the_check_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    for case in CASES.values():
        check(case, threads.run(lambda t, case=case: run_rank(t, case), 3, 20.0))


def test_the_check_finds_a_rank_in_another_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")

    def body(transport: Transport) -> str:
        op = "conv1d" if transport.rank == 1 else "kda"
        with pytest.raises(OpInputError) as caught:
            FUNCTIONS[op](**arguments(op, transport))
        return str(caught.value)

    texts = threads.run(body, 3, 20.0)
    assert len({text.partition("differently")[2] for text in texts}) == 1
    assert all("chunk_kda" in text and "causal_conv1d" in text for text in texts)
