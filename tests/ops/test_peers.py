# SPDX-License-Identifier: Apache-2.0
"""When one rank calls differently: ``CULA_CP_CHECK=1`` tells all, else its peers hear of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cptransport
from cptransport import (
    CapabilityError,
    CPContext,
    CPTransportError,
    OpInputError,
    PeerFailedError,
    TransportClosedError,
    TransportTimeoutError,
    UnsupportedOptionError,
    build_plan,
    ops,
    threads,
)
from cptransport.control import ControlPlane
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import run_rank

Transport = threads.ThreadTransport

SPECS = {
    "kda": OpSpec("kda", [0, 7, 24], 3, optional=("initial_state",)),
    "ssd": OpSpec("ssd", [0, 7, 24], 3, options={"chunk_size": 16}),
    "conv1d": OpSpec("conv1d", [0, 7, 24], 3),
    "mixer": OpSpec("mixer", [0, 7, 24], 3, options={"chunk_size": 16}),
}
CASES = {op: OpCase.of(spec) for op, spec in SPECS.items()}

Change = Callable[[dict[str, Any]], None]


def arguments(op: str, transport: Transport) -> dict[str, Any]:
    case = CASES[op]
    found: dict[str, Any] = {n: case.plan.shard(x, transport.rank) for n, x in case.tokens.items()}
    found.update(case.parameters)
    if case.initial is not None:
        found["initial_state"] = case.initial
    found = {name: x.clone() for name, x in found.items()}
    found.update(case.spec.options)
    if op == "mixer":
        found.update(headdim=12, ngroups=3, conv1d_bias=None)
    return {**found, "cp_context": CPContext(case.plan, transport)}


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "kda": ops.chunk_kda,
    "ssd": ops.mamba_chunk_scan_combined,
    "conv1d": ops.causal_conv1d,
    "mixer": ops.mamba_split_conv1d_scan_combined,
}


def one_differs(op: str, change: Change, timeout_s: float = 5.0) -> list[Any]:
    """Call with a change on rank 1; return what each rank raised, and what it raises after that."""

    def body(transport: Transport) -> tuple[Exception | None, str]:
        given = arguments(op, transport)
        if transport.rank == 1:
            change(given)
        error: Exception | None = None
        try:
            FUNCTIONS[op](**given)
        except Exception as caught:
            error = caught
        try:
            run_rank(transport, CASES[op])
            after = "usable"
        except TransportClosedError:
            after = "closed"
        except CPTransportError as caught:
            after = type(caught).__name__
        return error, after

    return threads.run(body, 3, timeout_s)


def wrong_dtype(name: str) -> Change:
    return lambda given: given.update({name: given[name].long()})


def shorter(name: str) -> Change:
    return lambda given: given.update({name: given[name][:, 1:]})


def empty(name: str) -> Change:
    return lambda given: given.update({name: given[name][:, :0]})


#: op, what rank 1 does, the error class, its words. Seen by rank 1 alone, without its peers.
OWN_MISTAKES: list[tuple[str, Change, type[Exception], str]] = [
    ("kda", wrong_dtype("beta"), OpInputError, "beta must be bfloat16"),
    ("kda", shorter("q"), OpInputError, "rank 1 has 7 local rows, its plan says 8"),
    ("kda", empty("q"), OpInputError, "rank 1 has 0 local rows, its plan says 8"),
    ("kda", lambda given: given.update(lower_bound=-1.0), OpInputError, "needs use_gate_in"),
    ("kda", lambda given: given.update(cu_seqlens=[0, 1]), UnsupportedOptionError, "not served"),
    ("kda", lambda given: given.update(betta=1), TypeError, "unexpected keyword argument 'betta'"),
    ("ssd", shorter("x"), OpInputError, "rank 1 has 7 local rows"),
    ("ssd", lambda given: given.update(chunk_size=40), OpInputError, "power of two"),
    ("conv1d", wrong_dtype("x"), OpInputError, "x must be bfloat16"),
    ("conv1d", empty("x"), OpInputError, "rank 1 has 0 local rows"),
    ("mixer", shorter("zxbcdt"), OpInputError, "local rows"),
    ("mixer", lambda given: given.update(ngroups=5), OpInputError, "channels"),
]


@pytest.mark.parametrize(("op", "change", "kind", "words"), OWN_MISTAKES)
def test_52_with_the_check_all_ranks_raise_the_same(
    op: str,
    change: Change,
    kind: type[Exception],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Report 52, and everybody goes on: the error came before anything was staged."""
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    start = time.monotonic()
    results = one_differs(op, change)
    assert time.monotonic() - start < 10
    assert len({(type(error), str(error)) for error, _ in results}) == 1
    error = results[0][0]
    assert type(error) is kind
    assert "rank 1: " in str(error)
    assert words in str(error)
    assert [after for _, after in results] == ["usable"] * 3


@pytest.mark.parametrize(("op", "change", "kind", "words"), OWN_MISTAKES)
def test_52_without_the_check_the_peers_hear_of_it(
    op: str, change: Change, kind: type[Exception], words: str
) -> None:
    start = time.monotonic()
    results = one_differs(op, change, timeout_s=20.0)
    assert time.monotonic() - start < 10  # they hear of it, they do not time out
    own = results[1][0]
    assert type(own) is kind
    assert words in str(own)
    # Rank 0 needs nobody in the forward, so it may learn of it one op later.
    heard = [each for each in (results[0], results[2]) if isinstance(each[0], PeerFailedError)]
    assert isinstance(results[2][0], PeerFailedError), results
    for error, after in heard:
        assert error.peer == 1
        assert words in str(error)
        assert after == "closed"
    assert results[0][1] in ("closed", "PeerFailedError")
    assert results[1][1] in ("closed", "PeerFailedError", "TransportTimeoutError")


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

    assert len(set(threads.run(body, 2, 5.0))) == 1


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

    for text in threads.run(body, 2, 5.0):
        assert "A_log must be [HV] = [6], got [3]" in text
    check(case, threads.run(lambda transport: run_rank(transport, case), 2, 5.0))


def test_a_fast_rank_does_not_get_ahead_of_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts are there and rank 0 has raised what they say, while rank 1 still looks for one."""
    store = torch.distributed.HashStore()
    fast, slow = (ControlPlane(store, rank, 2, 5.0) for rank in range(2))
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
        check(case, threads.run(lambda t, case=case: run_rank(t, case), 3, 10.0))


def test_the_check_finds_a_rank_in_another_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")

    def body(transport: Transport) -> str:
        op = "conv1d" if transport.rank == 1 else "kda"
        with pytest.raises(OpInputError) as caught:
            FUNCTIONS[op](**arguments(op, transport))
        return str(caught.value)

    texts = threads.run(body, 3, 5.0)
    assert len({text.partition("differently")[2] for text in texts}) == 1
    assert all("chunk_kda" in text and "causal_conv1d" in text for text in texts)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_a_wrong_gradient_for_an_explicit_backward(
    op: str, checked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", str(int(checked)))

    def body(transport: Transport) -> str:
        given = arguments(op, transport)
        if op == "kda":
            kda = ops.kda_forward(**given)
            output, saved, backward = kda.o, kda.saved, ops.kda_backward
        else:
            ssd = ops.ssd_forward(**given)
            output, saved, backward = ssd.y, ssd.saved, ops.ssd_backward
        try:
            backward(saved, output[:, 1:] if transport.rank == 1 else output)
        except (OpInputError, PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return "needs nobody"

    results = threads.run(body, 3, 20.0)
    name = "do" if op == "kda" else "dy"
    if checked:
        assert len(set(results)) == 1
        assert results[0].startswith(f"OpInputError: rank 1: {name} must be")
    else:
        assert results[0].startswith("PeerFailedError: rank 1 failed: OpInputError: " + name)
        assert results[1].startswith(f"OpInputError: {name} must be")


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_a_handoff_needs_a_pairwise_transport(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_COMPOSITION", "handoff")

    def body(transport: Transport) -> str:
        pairwise, transport.capabilities = (
            transport.capabilities,
            replace(transport.capabilities, pairwise=False),
        )
        with pytest.raises(CapabilityError, match="handoff") as caught:
            FUNCTIONS[op](**arguments(op, transport))
        transport.capabilities = pairwise
        FUNCTIONS[op](**arguments(op, transport))  # nothing was staged
        return str(caught.value)

    assert len(set(threads.run(body, 3, 5.0))) == 1


def test_every_rank_may_raise_and_go_on() -> None:
    """Without the check too: all raised in the same op before staging, each its own error."""

    def body(transport: Transport) -> str:
        for name in ("q", "v", "beta"):
            given = arguments("kda", transport)
            given[name] = given[name][:, :-1]
            with pytest.raises(OpInputError):
                ops.chunk_kda(**given)
        run_rank(transport, CASES["kda"])
        return "usable"

    assert threads.run(body, 3, 5.0) == ["usable"] * 3


def test_a_rank_that_fails_in_backward_reaches_its_peers() -> None:
    """The gradient's dtype is wrong on one rank, forward done, nothing staged yet there."""

    def body(transport: Transport) -> str:
        case = CASES["kda"]
        local: dict[str, Tensor] = {
            n: case.plan.shard(x, transport.rank).clone().requires_grad_()
            for n, x in case.tokens.items()
        }
        o, _ = ops.chunk_kda(**local, cp_context=CPContext(case.plan, transport))
        if transport.rank == 1:
            o.register_hook(fail)
        try:
            o.sum().backward()
        except RuntimeError as error:
            transport.abandon(error)
            return "own"
        except (PeerFailedError, TransportTimeoutError) as error:
            return str(error)
        return "needs nobody"

    def fail(grad: Tensor) -> None:
        raise RuntimeError("the user's hook failed")

    results = threads.run(body, 3, 3.0)
    assert results[1] == "own"
    assert "rank 1" in results[0]


def test_peers_of_a_rank_that_left_are_told() -> None:
    def body(transport: Transport) -> str:
        if transport.rank == 1:
            raise KeyError("bad data loader")
        with pytest.raises(PeerFailedError, match="bad data loader") as caught:
            run_rank(transport, CASES["kda"])
        assert caught.value.peer == 1
        with pytest.raises(TransportClosedError):
            run_rank(transport, CASES["kda"])
        return "told"

    start = time.monotonic()
    with pytest.raises(KeyError, match="bad data loader"):
        threads.run(body, 3, 30.0)
    assert time.monotonic() - start < 10
