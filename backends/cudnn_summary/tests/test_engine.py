# SPDX-License-Identifier: Apache-2.0
"""Engine ``cudnn`` on stand-ins with cuDNN's contract: every output and gradient against the recurrence.

The stand-ins refuse what cuDNN refuses and assert what it takes for granted, so a call that gets
through kept the contract.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from cptransport.errors import BackendUnavailableError
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check, judge
from cptransport.testing.op_rank import RankCall, RankRun, run_threads
from cptransport.transports import threads
from cptransport_cudnn_summary import resolve
from cptransport_cudnn_summary.contract import Contract, Kind
from cptransport_cudnn_summary.engine import KDA_ENGINE

Use = Callable[..., Any]

#: Chains over several ranks, single tokens, an empty sequence, short ones.
PACKED = [0, 50, 51, 51, 53, 110]
GATES = {
    "softplus": {"use_gate_in_kernel": True},
    "bounded": {"use_gate_in_kernel": True, "lower_bound": -5.0, "safe_gate": True},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "l2norm": {"use_qk_l2norm_in_kernel": True, "scale": 0.3},
    "sigmoid": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    **GATES,
    "all": {
        **GATES["bounded"],
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
        "state_v_first": True,
        "scale": 0.3,
    },
}


def spec_of(variant: str, **changes: Any) -> OpSpec:
    spec = OpSpec(
        "kda",
        PACKED,
        world_size=4,
        heads=2,
        value_heads=2,
        key_dim=6,
        value_dim=6 if variant == "hopper" else 9,  # Hopper serves K = V only
        dtype="float64",
        engine="cudnn",
        optional=("initial_state",),
    )
    return spec.with_(**changes)


def run(spec: OpSpec) -> list[RankRun]:
    """Run and check a call; the engine that was asked for must have run."""
    case = OpCase.of(spec)
    runs = run_threads(case)
    for each in runs:
        assert each.record is not None
        assert each.record.engine == "cudnn"
    check(case, runs)
    return runs


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot serve is an error here, not another one."""
    monkeypatch.setenv("CULA_CP_STRICT", "1")


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_sequence"])
@pytest.mark.parametrize("variant", ["hopper", "blackwell", "concatenated"])
def test_layouts(variant: str, layout: str, world_size: int, use: Use) -> None:
    fake = use(variant)
    run(spec_of(variant, layout=layout, world_size=world_size, seed=world_size))
    fake.assert_untouched()


@pytest.mark.parametrize("composition", ["gather", "scan", "handoff"])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("variant", ["hopper", "concatenated"])
def test_compositions(variant: str, composition: str, overlap: bool, use: Use) -> None:
    """One long sequence: interior segments on two ranks; the fold, the scan and the chain."""
    use(variant)
    run(
        spec_of(
            variant, cu_seqlens=[0, 83], composition=composition, overlap=overlap, layout="zigzag"
        )
    )


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("value_heads", [2, 4])
@pytest.mark.parametrize("variant", ["hopper", "blackwell"])
def test_options(variant: str, value_heads: int, name: str, use: Use) -> None:
    """Inside cuDNN where it serves them in both directions, else outside; absent A_log and dt_bias too."""
    use(variant)
    options = OPTIONS[name]
    if variant == "hopper":  # declined there, see below
        options = {n: value for n, value in options.items() if n != "allow_neg_eigval"}
    gates = name in ("softplus", "bounded", "all")
    optional = ("initial_state", *(("A_log", "dt_bias") if gates and value_heads == 4 else ()))
    run(
        spec_of(
            variant,
            cu_seqlens=[0, 60, 61, 75],
            value_heads=value_heads,
            options=options,
            optional=optional,
            world_size=3,
            seed=7,  # a softplus gate of seed 0 leaves the kernels' range
        )
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens": [0, 40], "batch": 3, "world_size": 3},
        {"cu_seqlens": [0, 7], "batch": 2, "world_size": 4},
        {"cu_seqlens": [0, 30, 41], "padded_cu_seqlens": [0, 33, 50], "world_size": 3},
        {"strided": True, "dtype": "float32"},
        {"explicit": True, "loss": ("final",)},
        {"loss": ("output",), "loss_ranks": [3], "optional": ()},
        {"cu_seqlens": [0, 2, 4, 5], "layout": "zigzag"},
        {"cu_seqlens": [0, 0, 3], "boundaries": [0, 0, 1, 1, 3]},
        {"dtype": "float32", "gate_dtype": "bfloat16", "parameter_dtype": "bfloat16"},
    ],
    ids=["dense", "dense-short", "padded", "strided", "final", "last", "short", "empty", "mixed"],
)
@pytest.mark.parametrize("variant", ["hopper", "concatenated"])
def test_inputs(variant: str, changes: dict[str, Any], use: Use) -> None:
    use(variant)
    if "boundaries" in changes:
        changes = {**changes, "layout": "contiguous"}
    run(spec_of(variant, **changes))


@pytest.mark.parametrize("gate", [-0.01, -1.0, -5.0])
def test_gates(gate: float, use: Use) -> None:
    """Up to the strongest that the kernels' range admits."""
    use("hopper")
    run(spec_of("hopper", cu_seqlens=[0, 90], gate=gate))


def test_interior_segments_by_the_triton_engine(use: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward, cuDNN's backward; the torch engine stands in for its kernels."""
    from cptransport.engines.torch import KDA_ENGINE as TORCH
    from cptransport_cudnn_summary import interior

    fake = use("hopper")
    monkeypatch.setattr(interior, "_engine", lambda: TORCH)
    monkeypatch.setattr(resolve, "_triton_declines", lambda kind: None)
    for layout in ("contiguous", "zigzag"):
        for name in ("plain", "bounded"):
            runs = run(spec_of("hopper", layout=layout, options=OPTIONS[name], optional=()))
            assert "interior segments by triton" in runs[1].record.detail  # type: ignore[union-attr]
    run(spec_of("hopper", cu_seqlens=[0, 50], batch=2))
    assert fake.calls["backward"] > 8
    monkeypatch.setenv("CULA_CP_CUDNN_INTERIOR", "identity")
    runs = run(spec_of("hopper"))
    assert "interior segments by identity" in runs[1].record.detail  # type: ignore[union-attr]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_interior_segments_by_the_triton_kernels(layout: str, use: Use) -> None:
    """The kernels themselves, in Triton's interpreter."""
    from cptransport.engines.triton import KDA_ENGINE as TRITON

    use("hopper")
    spec = spec_of("hopper", cu_seqlens=[0, 70], layout=layout, dtype="float32")
    if TRITON.eligible(replace(facts_of(OpCase.of(spec)), state_dtype=torch.float32)):
        pytest.skip("Triton's interpreter was not on when its kernels were imported")
    runs = run(spec)
    assert "interior segments by triton" in runs[1].record.detail  # type: ignore[union-attr]


def _in_flight(transport: Any, cases: list[OpCase], order: list[int]) -> list[RankRun]:
    calls = [RankCall(transport, case).forward() for case in cases]
    found = {i: calls[i].backward() for i in order}
    return [found[i] for i in range(len(cases))]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
@pytest.mark.parametrize("variant", ["hopper", "concatenated"])
def test_several_in_flight(variant: str, order: list[int], use: Use) -> None:
    """What a backward needs is its own: the transport's buffers have been used again by then."""
    use(variant)
    cases = [OpCase.of(spec_of(variant, seed=seed)) for seed in (0, 1)]
    both = threads.run(lambda transport: _in_flight(transport, cases, order), 4, 30.0)
    for i, case in enumerate(cases):
        check(case, [rank[i] for rank in both], exact_bytes=False)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_activation_checkpointing(use_reentrant: bool, use: Use) -> None:
    use("hopper")
    case = OpCase.of(spec_of("hopper"))

    def step(transport: Any) -> RankRun:
        return RankCall(transport, case).checkpointed(use_reentrant).backward()

    check(case, threads.run(step, 4, 30.0), exact_bytes=False)


def test_number_of_calls(use: Use) -> None:
    """An interior rank: two forwards (from the seed, from the identity), one backward; one each for others."""
    fake = use("hopper")
    spec = spec_of("hopper", cu_seqlens=[0, 80], world_size=3)
    run(spec)
    fake.calls.clear()
    run(spec)
    assert fake.calls == {"forward": 1 + 2 + 1, "backward": 1 + 1 + 1}
    fake = use("blackwell")
    run(spec_of("blackwell", cu_seqlens=[0, 80], world_size=3))
    fake.calls.clear()
    run(spec_of("blackwell", cu_seqlens=[0, 80], world_size=3))
    assert fake.calls == {"forward": 3, "backward": 3, "summary": 1, "summary_backward": 1}


@pytest.mark.parametrize("method", ["identity", "summary", "summary_backward"])
def test_the_oracle_sees_a_missing_transpose(
    method: str, use: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With K = V every wrong orientation fits by shape; it must show in the numbers."""
    use("hopper" if method == "identity" else "blackwell")
    honest = getattr(Contract, method)

    def turned(self: Contract, *args: Any) -> Any:
        found = honest(self, *args)
        if isinstance(found, torch.Tensor):
            return found.mT.contiguous()
        first, second = found
        return first, second.mT.contiguous()

    monkeypatch.setattr(Contract, method, turned)
    spec = spec_of("blackwell", cu_seqlens=[0, 80], value_dim=6, seed=5)
    case = OpCase.of(spec)
    wrong = [each for each in judge(case, run_threads(case)) if not each.ok]
    assert wrong


def test_gates_that_nothing_bounds_are_declined_unless_it_is_named(use: Use) -> None:
    use("hopper")
    case = OpCase.of(spec_of("hopper"))
    facts = facts_of(case)
    assert KDA_ENGINE.eligible(replace(facts, named=True)) is None
    assert "nothing says" in str(KDA_ENGINE.eligible(facts))
    for options, bounded in (
        ({"safe_gate": True}, True),
        ({"use_gate_in_kernel": True}, False),
        ({"use_gate_in_kernel": True, "lower_bound": -5.0}, True),
        ({"use_gate_in_kernel": True, "lower_bound": -6.0}, False),
    ):
        found = KDA_ENGINE.eligible(facts_of(case, **options))
        assert (found is None) == bounded, (options, found)
    many = replace(facts, named=True, max_segments=1 << 15)
    assert "65535" in str(KDA_ENGINE.eligible(many))
    assert KDA_ENGINE.eligible(replace(facts, op="ssd")) == "serves kda, not ssd"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"value_dim": 8}, "needs K = V"),
        ({"dtype": "bfloat16"}, "dtypes"),
        ({"options": OPTIONS["sigmoid"]}, r"allow_neg_eigval needs beta in \(0, 1\)"),
    ],
)
def test_what_hopper_serves_in_no_direction(changes: dict[str, Any], reason: str, use: Use) -> None:
    """Known before the first step, with cuDNN's own words."""
    use("hopper")
    with pytest.raises(BackendUnavailableError, match=reason):
        run_threads(OpCase.of(spec_of("hopper", **changes)))


def test_what_fails_only_backward_is_applied_outside(use: Use) -> None:
    """Hopper takes l2norm forward and refuses it in the backward."""
    fake = use("hopper")
    options = {"use_qk_l2norm_in_kernel": True}
    found = resolve.resolve(Kind.of_facts(facts_of(OpCase.of(spec_of("hopper")), **options)))
    assert isinstance(found, Contract)
    assert found.flags == {}
    assert found.outside.l2norm
    fake = use("blackwell")
    found = resolve.resolve(Kind.of_facts(facts_of(OpCase.of(spec_of("blackwell")), **options)))
    assert isinstance(found, Contract)
    assert found.flags["use_qk_l2norm_in_kernel"]
    assert not found.outside.l2norm
    assert fake.calls["backward"] == 1


def facts_of(case: OpCase, **options: Any) -> Any:
    """Facts of a case's call, with other options."""
    from cptransport.engines import KDAOptions, OpFacts

    spec, plan = case.spec, case.plan
    return OpFacts(
        op="kda",
        device_type="cpu",
        world_size=plan.world_size,
        batch=spec.batch,
        heads=spec.heads,
        value_heads=spec.value_heads,
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
        dtypes={name: x.dtype for name, x in case.tokens.items()},
        state_dtype=torch.float64,
        max_segments=plan.max_segments,
        max_tokens=plan.max_tokens,
        requires_grad=frozenset(),
        options=KDAOptions(**{"scale": spec.key_dim**-0.5, **options}),
    )


@pytest.mark.parametrize("variant", ["hopper", "blackwell"])
def test_what_the_op_returns_may_be_changed_in_place(use: Use, variant: str) -> None:
    """On every rank alike: one that raised alone would leave its peers waiting in the backward."""
    use(variant)
    case = OpCase.of(spec_of(variant, cu_seqlens=[0, 40], optional=()))

    def step(transport: Any) -> torch.Tensor:
        run = RankCall(transport, case).forward()
        before = run.output.detach().clone()
        run.output.mul_(2.0)
        assert torch.equal(run.output, 2 * before)
        run.output.sum().backward()
        return run.gradients()["v"]

    found = threads.run(step, 4, 30.0)
    assert all(grad.any() for grad in found)
