# SPDX-License-Identifier: Apache-2.0
"""The concatenated-summary API: found by signature and schema, checked by numbers, used or not, and said so."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cptransport import last_run
from cptransport.errors import BackendUnavailableError
from cptransport.testing import RankPool
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import RankCall, RankRun, run_rank, run_specs, run_threads
from cptransport.transport import Gathered
from cptransport.transports import loopback, threads
from cptransport_cudnn_summary import BACKEND, library
from cptransport_cudnn_summary.concat import Binding, stack

Use = Callable[..., Any]
VARIABLE = "CULA_CP_CUDNN_CONCAT"


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_STRICT", "1")
    monkeypatch.delenv(VARIABLE, raising=False)


def spec_of(**changes: Any) -> OpSpec:
    spec = OpSpec(
        "kda",
        [0, 30, 90],
        world_size=4,
        heads=2,
        value_heads=2,
        key_dim=6,
        value_dim=9,
        dtype="float64",
        engine="cudnn",
        optional=("initial_state",),
    )
    return spec.with_(**changes)


def run(**changes: Any) -> list[RankRun]:
    case = OpCase.of(spec_of(**changes))
    runs = run_threads(case)
    check(case, runs)
    return runs


def detail(runs: list[RankRun]) -> str:
    details = {each.record.detail for each in runs if each.record is not None}
    assert len(details) == 1
    return details.pop()


@pytest.mark.parametrize(
    ("changes", "composed"),
    [
        # [0, 30) on ranks 0 and 1, [30, 90) on 1, 2, 3: segments after the second of their chain.
        ({}, 1 + 1),
        ({"layout": "zigzag", "overlap": True}, None),
        ({"cu_seqlens": [0, 40], "batch": 2}, 2 + 2),
        ({"cu_seqlens": [0, 40]}, 2 + 2),
        # Of rounds and chains nothing is left to compose.
        ({"composition": "scan"}, 0),
        ({"composition": "handoff"}, 0),
    ],
    ids=["packed", "zigzag", "dense", "one", "scan", "handoff"],
)
def test_it_composes_what_was_gathered(
    changes: dict[str, Any], composed: int | None, use: Use
) -> None:
    fake = use("concatenated")
    runs = run(**changes)
    said = (
        "summaries that are gathered are composed inside cuDNN (forward preceding_state_update, "
        "preceding_transition; backward following_state_update, following_transition)"
    )
    assert said in detail(runs)
    checks = 2  # of itself, once
    found = fake.calls["composed"] - checks
    assert found == composed if composed is not None else found > 2
    run(**changes)
    assert fake.calls["composed"] - checks == 2 * found, "the check runs once"


@pytest.mark.usefixtures("stand_in_for_nccl")
@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens": [0, 40]},
        # Slots of two rows, of which a chain fills one: the workspace's slices have gaps.
        {"cu_seqlens": [0, 80, 90]},
        {"cu_seqlens": [0, 90], "layout": "zigzag", "overlap": True},
        {"cu_seqlens": [0, 40], "batch": 2},
    ],
    ids=["one", "two", "zigzag", "dense"],
)
def test_it_composes_in_the_workspace_of_the_transport(changes: dict[str, Any], use: Use) -> None:
    """Its partner: all summaries are gathered densely, and arrive as the ops take them."""
    fake = use("concatenated")
    spec = spec_of(composition="gather", **changes)
    with RankPool("fake_dense_nccl:BACKEND", spec.world_size, processes=False) as pool:
        runs = [rank[0] for rank in pool.run(run_specs, specs=[spec.to_json()])]
    check(OpCase.of(spec), runs, exact_bytes=False)
    assert fake.calls["composed"] > 2


def test_absent_it_is_composed_outside(use: Use) -> None:
    use("blackwell")
    said = detail(run())
    assert "summaries composed outside cuDNN" in said
    assert (
        "absent: the signature has no preceding_state_update and no preceding_transition in "
        "nvidia-cudnn-frontend 1.32.0" in said
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"signature": False}, "absent: the signature has no preceding_state_update"),
        ({"schema": False}, "absent: the forward op's schema has no preceding_state_update"),
        ({"fault": "order"}, r"refused: its forward differs from the composition by \d"),
        ({"fault": "transposed"}, r"refused: its forward differs from the composition by \d"),
        ({"fault": "raises"}, "refused: it raised RuntimeError: unexpected rank"),
    ],
)
def test_in_another_form_it_is_not_used(changes: dict[str, Any], reason: str, use: Use) -> None:
    """Half of it, or another order, orientation or shape: the numbers stay right, and the reason is on record."""
    use("concatenated", **changes)
    assert re.search(reason, detail(run()))


def test_off(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = use("concatenated")
    monkeypatch.setenv(VARIABLE, "off")
    assert "concatenated-summary API: off" in detail(run())
    assert "composed" not in fake.calls


@pytest.mark.parametrize("changes", [None, {"fault": "order"}])
def test_require(changes: dict[str, Any] | None, use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that says what is missing, without strict too; fulfilled it serves."""
    monkeypatch.setenv("CULA_CP_STRICT", "0")
    monkeypatch.setenv(VARIABLE, "require")
    use("concatenated")
    run()
    assert library.why_not_required() is None
    if changes is None:
        use("blackwell")
        assert "preceding_state_update" in str(library.why_not_required())
    else:
        use("concatenated", **changes)
    with pytest.raises(BackendUnavailableError, match="CULA_CP_CUDNN_CONCAT=require, but"):
        run()


def test_require_is_not_passed_over_by_the_automatic_choice(
    use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a call that the engine declines anyhow goes to another one."""
    monkeypatch.setenv(VARIABLE, "require")
    use("concatenated", fault="order")
    bounded, unbounded = (
        OpCase.of(spec_of(options={"use_gate_in_kernel": True, **more}, engine=None, optional=()))
        for more in ({"lower_bound": -5.0}, {})
    )

    def step(transport: Any, case: OpCase) -> RankRun:
        transport.preferred_engine = "cudnn"
        return run_rank(transport, case)

    with pytest.raises(BackendUnavailableError, match="CULA_CP_CUDNN_CONCAT=require, but"):
        threads.run(lambda transport: step(transport, bounded), 4, 30.0)
    ran = threads.run(lambda transport: step(transport, unbounded), 4, 30.0)[0].record
    assert ran is not None
    assert ran.engine == "torch"
    assert dict(ran.reasons)["cudnn"].startswith("its kernels need a gate above")


def test_a_context_follows_the_variable(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ``last_run()`` says is what ran, also where the context has seen such a call before."""
    fake = use("concatenated")
    case = OpCase.of(spec_of(world_size=1))
    with loopback.BACKEND.create(None, torch.device("cpu"), 30.0) as transport:
        call = RankCall(transport, case)
        for value, said in (("auto", "inside cuDNN"), ("off", "API: off"), ("auto", "inside")):
            monkeypatch.setenv(VARIABLE, value)
            call.forward()
            record = last_run()
            assert record is not None
            assert said in record.detail
    assert fake.calls["composed"] == 2, "the check of itself, once"


def test_the_variable_is_the_backends() -> None:
    (declared,) = (each for each in BACKEND.variables if each.name == VARIABLE)
    assert (declared.default, declared.values) == ("auto", ("auto", "require", "off"))


def test_the_binding_needs_one_pair_in_the_backward(use: Use) -> None:
    fake = use("concatenated")
    assert fake.library.binding == Binding(
        ("preceding_state_update", "preceding_transition"),
        ("following_state_update", "following_transition"),
    )


def gathered(ranks: int, rows: int, *, dense: bool) -> tuple[Gathered, dict[str, torch.Tensor]]:
    tables = {
        "state": torch.randn(ranks, rows, 2, 5, 3),
        "transition": torch.randn(ranks, rows, 2, 3, 3),
    }
    parts = tables if dense else {name: tuple(table) for name, table in tables.items()}
    present = {name: range(ranks) for name in tables}
    return Gathered(parts, torch.device("cpu"), present), tables


def test_dense_summaries_of_a_run_of_ranks_are_taken_in_place() -> None:
    found, tables = gathered(4, 1, dense=True)
    seed = torch.zeros(1, 2, 5, 3)
    made = stack([[(0, 0), (1, 0), (2, 0)]], found, seed, 3, reverse=False)
    assert torch.equal(made.start[0], tables["state"][0, 0])
    for name in ("state", "transition"):
        value = getattr(made, name)
        assert value.data_ptr() == tables[name][1].data_ptr()
        assert value.is_contiguous()
        assert torch.equal(value, tables[name][1:3])
    # Travelling back, from rank 3 to rank 1: causal order stays.
    back = stack([[(3, 0), (2, 0), (1, 0)]], found, seed, 3, reverse=True)
    assert torch.equal(back.start[0], tables["state"][3, 0])
    assert back.state.data_ptr() == tables["state"][1].data_ptr()


def test_slices_of_wider_slots_are_copied() -> None:
    """cuDNN's kernels take contiguous tensors."""
    found, tables = gathered(4, 2, dense=True)
    made = stack([[(0, 1), (1, 1), (2, 1)]], found, torch.zeros(1, 2, 5, 3), 3, reverse=False)
    for name in ("state", "transition"):
        value = getattr(made, name)
        assert value.is_contiguous()
        assert torch.equal(value, tables[name][1:3, 1:2])


@pytest.mark.parametrize("reverse", [False, True])
def test_shorter_chains_are_padded_with_what_changes_nothing(reverse: bool) -> None:
    found, tables = gathered(3, 2, dense=False)
    seed = torch.randn(3, 2, 5, 3)
    chains = [[(0, 1), (1, 0), (2, 1)], [(2, 0), (1, 1)], []]
    made = stack(chains, found, seed, 3, reverse=reverse)
    for index, chain in enumerate(chains):
        right = seed[index]
        for position, (rank, row) in enumerate(chain):
            step = tables["transition"][rank, row]
            carried = right @ (step.mT if reverse else step) if position else 0
            right = carried + tables["state"][rank, row]
        state = made.start[index]
        for j in range(len(made.state))[:: -1 if reverse else 1]:
            step = made.transition[j, index]
            state = state @ (step.mT if reverse else step) + made.state[j, index]
        torch.testing.assert_close(state, right)
