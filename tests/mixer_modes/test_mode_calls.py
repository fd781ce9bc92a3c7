# SPDX-License-Identifier: Apache-2.0
"""The modes as citizens of autograd, and what they refuse: before anything moves, alike on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cptransport
from cptransport import (
    BackendError,
    CPContext,
    EnvVarError,
    OpInputError,
    PeerFailedError,
    UnsupportedOptionError,
    build_plan,
    ops,
    threads,
)
from cptransport.ops.redistribute import Exchange
from cptransport.testing import relative_error
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import reference
from cptransport.testing.op_rank import RankCall, RankRun

Transport = threads.ThreadTransport

MODES = ("permute_p2p", "permute_a2a", "all_to_all")
ALL_MODES = ("virtual", *MODES)


def mixer_case(seed: int = 0, **more: Any) -> OpCase:
    """Three ranks, documents over all of them."""
    given: dict[str, Any] = {
        "world_size": 3,
        "layout": "zigzag",
        "heads": 2,
        "value_heads": 6,
        "optional": ("conv1d_bias", "initial_states"),
        "options": {"chunk_size": 16},
        "dtype": "float64",
        "seed": seed,
    }
    offsets = more.pop("cu_seqlens", [0, 9, 31])
    return OpCase.of(OpSpec("mixer", offsets, **{**given, **more}))


CASE = mixer_case()


def arguments(transport: Transport, case: OpCase = CASE) -> dict[str, Any]:
    """One rank's arguments of a call."""
    given: dict[str, Any] = {n: case.plan.shard(x, transport.rank) for n, x in case.tokens.items()}
    given.update(case.parameters, initial_states=case.initial, chunk_size=16)
    given.update(headdim=case.spec.value_dim, ngroups=case.spec.heads)
    given.update(cp_context=CPContext(case.plan, transport), return_final_states=True)
    return given


@pytest.fixture
def in_mode(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda mode: monkeypatch.setenv("CULA_CP_MAMBA_LOAD_BALANCING", mode)


# --------------------------------------------------------------------------------------- autograd


@pytest.mark.parametrize("order", ["F1 F2 B1 B2", "F1 F2 B2 B1", "F1 F2 F3 B2 B3 B1"])
@pytest.mark.parametrize("mode", MODES)
def test_14_micro_batches_in_flight(
    mode: str, order: str, in_mode: Callable[[str], None], compare: Any
) -> None:
    """Report 14: different data, plans and groups of lengths, one transport."""
    in_mode(mode)
    cases = {
        "1": mixer_case(1),
        "2": mixer_case(2, layout="contiguous_per_sequence", cu_seqlens=[0, 2, 40]),
        "3": mixer_case(3, layout="zigzag_per_sequence"),
    }

    def body(transport: Transport) -> dict[str, RankRun]:
        live = {name: RankCall(transport, case) for name, case in cases.items()}
        done = {}
        for step in order.split():
            if step[0] == "F":
                live[step[1]].forward()
            else:
                done[step[1]] = live[step[1]].backward()
        return done

    results = threads.run(body, 3, 20.0)
    for name in results[0]:
        compare(mode, cases[name], [result[name] for result in results])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_activation_checkpointing(mode: str, use_reentrant: bool, in_mode: Any) -> None:
    in_mode(mode)
    right = reference(CASE)

    def body(transport: Transport) -> list[RankRun]:
        live = [RankCall(transport, CASE).checkpointed(use_reentrant) for _ in range(2)]
        runs = [each.backward() for each in live]
        return [*runs, RankCall(transport, CASE).forward().backward()]  # still usable

    results = threads.run(body, 3, 20.0)
    for i in range(3):
        runs = [result[i] for result in results]
        for rank, run in enumerate(runs):
            expected = CASE.plan.shard(right.grads["zxbcdt"], rank)
            assert relative_error(run.grads["zxbcdt"], expected) < 1e-9
        for name in CASE.parameters:
            total = torch.stack([run.grads[name] for run in runs]).sum(0)
            assert relative_error(total, right.grads[name]) < 1e-9, name


@pytest.mark.parametrize("mode", ALL_MODES)
def test_ranks_whose_losses_use_different_outputs(mode: str) -> None:
    """One uses y, one the final states, one an empty slice of y: the backward is one for all."""
    right = reference(CASE)

    def body(transport: Transport) -> dict[str, Tensor]:
        call = RankCall(transport, CASE)
        y, final = ops.mamba_split_conv1d_scan_combined(
            **{**arguments(transport), **call.leaves}, load_balancing=mode
        )
        grads = CASE.plan.shard(CASE.grad_output, transport.rank)
        if transport.rank == 0:
            (y * grads).sum().backward()
        elif transport.rank == 1:
            (final * CASE.grad_final).sum().backward()
        else:
            y[:, :0].sum().backward()
        return {name: leaf.grad for name, leaf in call.leaves.items() if leaf.grad is not None}

    # The unsharded loss that this makes: rank 0's tokens, and rank 1's states.
    spec = CASE.spec
    grad_output = torch.zeros_like(CASE.grad_output)
    mine = CASE.plan.for_rank(0).index
    grad_output[:, mine] = CASE.grad_output[:, mine]
    grad_final = torch.zeros_like(CASE.grad_final)
    rows = [s for s in range(CASE.plan.num_sequences) if CASE.plan.owner(s) == 1]
    grad_final[rows] = CASE.grad_final[rows]
    given = OpCase(
        spec, CASE.plan, CASE.tokens, CASE.parameters, CASE.initial, grad_output, grad_final
    )
    right = reference(given)
    results = threads.run(body, 3, 20.0)
    for rank, grads in enumerate(results):
        expected = CASE.plan.shard(right.grads["zxbcdt"], rank)
        assert relative_error(grads["zxbcdt"], expected) < 1e-9, rank
    for name in (*CASE.parameters, "initial_states"):
        total = torch.stack([grads[name] for grads in results]).sum(0)
        assert relative_error(total, right.grads[name]) < 1e-9, name


@pytest.mark.parametrize("mode", ALL_MODES)
def test_double_backward_raises(mode: str) -> None:
    def body(transport: Transport) -> None:
        call = RankCall(transport, CASE)
        y, _ = ops.mamba_split_conv1d_scan_combined(
            **{**arguments(transport), **call.leaves}, load_balancing=mode
        )
        leaves = tuple(call.leaves.values())
        grads = torch.autograd.grad(y.sum(), leaves, create_graph=True)
        with pytest.raises(OpInputError, match="double backward"):
            torch.autograd.grad(grads[0].sum(), leaves, allow_unused=True)

    threads.run(body, 3, 20.0)


@pytest.mark.parametrize("mode", ALL_MODES)
def test_world_size_one_moves_nothing(mode: str, in_mode: Any, compare: Any) -> None:
    in_mode(mode)
    case = mixer_case(world_size=1)

    def body(transport: Transport) -> tuple[RankRun, list[int], list[str]]:
        run = RankCall(transport, case).forward().backward()
        counted = [transport.activation_bytes_sent, transport.stats().messages]
        return run, counted, list(transport._generations)

    ((run, counted, staged),) = threads.run(body, 1, 20.0)
    assert counted == [0, 0]
    assert staged == []
    compare(mode, case, [run])


@pytest.mark.parametrize("mode", ALL_MODES)
def test_last_run_is_the_op_that_was_called(mode: str) -> None:
    def body(transport: Transport) -> Any:
        ops.mamba_split_conv1d_scan_combined(**arguments(transport), load_balancing=mode)
        return cptransport.last_run()

    for record in threads.run(body, 3, 20.0):
        assert record.op == "mamba_split_conv1d_scan_combined"
        assert (record.engine, record.transport, record.world_size) == ("torch", "threads", 3)
        assert record.composition == (mode if mode == "all_to_all" else "gather")


@pytest.mark.parametrize("mode", ALL_MODES)
def test_in_inference_mode(mode: str) -> None:
    """Weights that require gradients, nothing recorded; a plan that nobody has used yet."""
    case = mixer_case(cu_seqlens=[0, 31, 31 + len(mode)])

    def body(transport: Transport) -> Tensor:
        given = arguments(transport, case)
        given["A"] = given["A"].clone().requires_grad_()
        given["conv1d_weight"] = given["conv1d_weight"].clone().requires_grad_()
        with torch.inference_mode():
            y, final = ops.mamba_split_conv1d_scan_combined(**given, load_balancing=mode)
        assert not y.requires_grad
        assert not final.requires_grad
        # What it leaves behind in caches serves gradients afterwards.
        call = RankCall(transport, case)
        again, last = ops.mamba_split_conv1d_scan_combined(
            **{**arguments(transport, case), **call.leaves}, load_balancing=mode
        )
        (again.sum() + last.sum()).backward()
        return y.clone()

    whole = case.plan.unshard(threads.run(body, 3, 20.0))
    assert relative_error(whole, reference(case).output) < 1e-9


def test_states_are_returned_only_when_asked() -> None:
    def body(transport: Transport, mode: str) -> None:
        given = arguments(transport)
        given["return_final_states"] = False
        start = transport.activation_bytes_received
        y = ops.mamba_split_conv1d_scan_combined(**given, load_balancing=mode)
        assert isinstance(y, Tensor)
        fewer = transport.activation_bytes_received - start
        ops.mamba_split_conv1d_scan_combined(**arguments(transport), load_balancing=mode)
        assert transport.activation_bytes_received - start >= 2 * fewer

    for mode in MODES:
        threads.run(lambda transport, mode=mode: body(transport, mode), 3, 20.0)


# ---------------------------------------------------------------------------------------- refused


def refused(mode: str | None, change: dict[str, Any], case: OpCase = CASE) -> list[Exception]:
    """Call with a change on every rank; everybody must raise, move nothing, and go on."""

    def body(transport: Transport) -> Exception:
        given = {**arguments(transport, case), "load_balancing": mode, **change}
        error: Exception | None = None
        try:
            ops.mamba_split_conv1d_scan_combined(**given)
        except Exception as caught:
            error = caught
        assert error is not None
        moved = (transport.activation_bytes_sent, transport.stats().messages)
        assert moved == (0, 0), error
        assert not transport._generations
        ops.mamba_split_conv1d_scan_combined(**arguments(transport, case))
        return error

    return threads.run(body, case.plan.world_size, 20.0)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"A": torch.ones(5)}, OpInputError, r"A must be \[nheads\] = \[6\], got \[5\]"),
    ({"dt_bias": torch.ones(7)}, OpInputError, "dt_bias must be"),
    ({"D": torch.ones(6, 11)}, OpInputError, "D must be"),
    ({"conv1d_bias": torch.ones(3)}, OpInputError, "conv1d_bias must be"),
    ({"initial_states": torch.ones(1, 6, 12, 8)}, OpInputError, "initial_states must be"),
    ({"chunk_size": 48}, OpInputError, "power of two"),
    ({"activation": "relu"}, OpInputError, "activation must be"),
    ({"dt_limit": (1.0, 0.5)}, OpInputError, "dt_limit"),
    ({"dt_limit": (0.0, 1.0, 2.0)}, OpInputError, "dt_limit must be"),
    ({"dt_limit": None}, OpInputError, "dt_limit must be"),
    ({"dt_limit": ("low", 1.0)}, OpInputError, "dt_limit must be"),
    ({"ngroups": 4}, OpInputError, "multiple of ngroups"),
    ({"ngroups": 5}, OpInputError, "channels"),
    ({"ngroups": 2.0}, OpInputError, "ngroups must be an int"),
    ({"ngroups": None}, OpInputError, "ngroups must be an int"),
    ({"headdim": "12"}, OpInputError, "headdim must be an int"),
    ({"zxbcdt": torch.zeros(1, 12, 110)}, OpInputError, "zxbcdt"),
    ({"A": torch.ones(6, dtype=torch.int64)}, OpInputError, "A must be bfloat16"),
    ({"engine": "no-such-engine"}, BackendError, "no-such-engine"),
]


@pytest.mark.parametrize(("change", "kind", "words"), REFUSED, ids=lambda value: str(value)[:24])
@pytest.mark.parametrize("mode", ALL_MODES)
def test_mistakes_are_seen_before_tokens_move(
    mode: str, change: dict[str, Any], kind: type[Exception], words: str
) -> None:
    for error in refused(mode, change):
        assert isinstance(error, kind), repr(error)
        assert re.search(words, str(error)), error


UPSTREAM = ("seq_idx", "rmsnorm_weight", "outproj_weight", "outproj_bias", "state_dtype")


@pytest.mark.parametrize("name", UPSTREAM)
@pytest.mark.parametrize("mode", ALL_MODES)
def test_upstream_arguments_are_refused_by_name(mode: str, name: str) -> None:
    for error in refused(mode, {name: torch.ones(3)}):
        assert isinstance(error, UnsupportedOptionError)
        assert f"{name} is not served" in str(error)


def test_state_dtype_is_refused_by_name() -> None:
    """Of the scan too."""

    def body(transport: Transport) -> None:
        x = torch.zeros(1, CASE.plan.for_rank(transport.rank).num_tokens, 2, 4)
        with pytest.raises(UnsupportedOptionError, match="state_dtype is not served: states are"):
            ops.mamba_chunk_scan_combined(
                x,
                x[..., 0],
                -torch.ones(2),
                x[:, :, :1],
                x[:, :, :1],
                16,
                cp_context=CPContext(CASE.plan, transport),
                state_dtype=torch.bfloat16,
            )

    threads.run(body, 3, 5.0)


def test_heads_that_do_not_divide() -> None:
    case = mixer_case(world_size=4)
    errors = refused("all_to_all", {}, case)
    assert {type(error) for error in errors} == {OpInputError}
    assert {str(error) for error in errors} == {
        "load balancing 'all_to_all' shares heads out evenly: nheads = 6 does not divide by 4 ranks"
    }


def test_none_needs_a_contiguous_plan() -> None:
    for error in refused("none", {}):
        assert isinstance(error, OpInputError)
        assert "needs a contiguous plan, this one is zigzag" in str(error)


def test_unknown_modes_list_the_known(in_mode: Any) -> None:
    for error in refused("permute", {}):
        assert isinstance(error, EnvVarError)
        for mode in ("none", *ALL_MODES):
            assert mode in str(error)
    errors = refused("permute_p2", {})
    assert all("did you mean 'permute_p2p'" in str(error) for error in errors)


@pytest.mark.parametrize("mode", MODES)
def test_the_check_compares_modes_and_inputs(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_CHECK", "1")
    changes: list[dict[str, Any]] = [
        {"load_balancing": "virtual"},
        {"return_final_states": False},
        {"activation": None},
        {"initial_states": None},
        {"dt_limit": (0.0, 1.0)},
        {"conv1d_bias": None},
        {"D": torch.ones(6, 12, dtype=torch.float64)},
        {"A": CASE.parameters["A"].clone().requires_grad_()},
        {"zxbcdt": torch.zeros(1, 3, 1)},
    ]

    def body(transport: Transport) -> list[str]:
        texts = []
        for change in changes:
            given = {**arguments(transport), "load_balancing": mode}
            if transport.rank == 1:
                given.update(change)
            with pytest.raises(OpInputError) as caught:
                ops.mamba_split_conv1d_scan_combined(**given)
            texts.append(str(caught.value))
        call = RankCall(transport, CASE)
        given = {**arguments(transport), **call.leaves, "load_balancing": mode}
        y, final = ops.mamba_split_conv1d_scan_combined(**given)
        (y.sum() + final.sum()).backward()
        return texts

    results = threads.run(body, 3, 20.0)
    assert results[0] == results[1] == results[2]
    assert all("rank 1: " in text for text in results[0])


@pytest.mark.parametrize("mode", MODES)
def test_without_the_check_the_peers_hear_of_a_mistake(mode: str) -> None:
    def body(transport: Transport) -> str:
        given = arguments(transport)
        if transport.rank == 1:
            given["A"] = given["A"][1:]
        try:
            ops.mamba_split_conv1d_scan_combined(**given, load_balancing=mode)
        except (OpInputError, PeerFailedError) as error:
            return f"{type(error).__name__}: {error}"
        return "needs nobody"

    results = threads.run(body, 3, 20.0)
    assert results[1].startswith("OpInputError: A must be")
    for text in (results[0], results[2]):
        assert text.startswith("PeerFailedError: rank 1 failed: OpInputError: A must be")


def test_exchanges_of_one_call_have_names_of_their_own() -> None:
    """What an error between two moves says where it was."""
    call = Exchange("mixer, tokens", None, (), "p2p")  # type: ignore[arg-type]
    assert call.reverse.title == "mixer, tokens backward"


def test_a_contiguous_plan_needs_no_conversion() -> None:
    plan = build_plan([0, 9, 31], world_size=3, boundaries=[0, 4, 4, 31])

    def body(transport: Transport) -> None:
        given = arguments(transport)
        given["zxbcdt"] = plan.shard(CASE.tokens["zxbcdt"], transport.rank)
        given["cp_context"] = CPContext(plan, transport)
        for mode in ("none", "virtual", "permute_p2p", "permute_a2a"):
            ops.mamba_split_conv1d_scan_combined(**given, load_balancing=mode)
        assert transport.activation_bytes_sent == 0

    threads.run(body, 3, 20.0)
