# SPDX-License-Identifier: Apache-2.0
"""Every option of every op by itself, and what must not change a bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cptransport.composition import COMPOSITIONS
from cptransport.testing import relative_error
from cptransport.testing.op_cases import OPS, OpCase, OpSpec
from cptransport.testing.op_oracle import check, judge
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import RankRun, run_threads

PACKED = (0, 5, 5, 23, 41)
GATE = ("A_log", "dt_bias")
INSIDE = {"use_gate_in_kernel": True}


def spec_of(op: str, optional: tuple[str, ...] = (), **options: Any) -> OpSpec:
    if op in ("ssd", "mixer"):
        options.setdefault("chunk_size", 16)
    return OpSpec(
        op,
        PACKED,
        world_size=3,
        layout="zigzag",
        dtype="float64",
        value_heads=6,
        optional=optional,
        options=options,
    )


SINGLY = [
    spec_of("kda"),
    spec_of("kda", ("initial_state",)),
    spec_of("kda", scale=0.7),
    spec_of("kda", use_qk_l2norm_in_kernel=True),
    spec_of("kda", use_beta_sigmoid_in_kernel=True),
    spec_of("kda", use_beta_sigmoid_in_kernel=True, allow_neg_eigval=True),
    spec_of("kda", ("initial_state",), state_v_first=True),
    spec_of("kda", safe_gate=True),
    spec_of("kda", **INSIDE),
    spec_of("kda", ("A_log",), **INSIDE),
    spec_of("kda", ("dt_bias",), **INSIDE),
    spec_of("kda", ("dt_bias",), **INSIDE).with_(alternate=True),
    spec_of("kda", GATE, **INSIDE),
    spec_of("kda", GATE, **INSIDE, lower_bound=-5.0),
    spec_of("kda", (), **INSIDE, lower_bound=-5.0, safe_gate=True),
    spec_of("ssd"),
    spec_of("ssd", ("initial_states",)),
    spec_of("ssd", ("D",)),
    spec_of("ssd", ("D",)).with_(alternate=True),
    spec_of("ssd", ("z",)),
    spec_of("ssd", dt_softplus=True),
    spec_of("ssd", ("dt_bias",), dt_softplus=True),
    spec_of("ssd", ("dt_bias",), dt_limit=(0.05, 10.0)),
    spec_of("ssd", dt_limit=(0.2, 0.5)),
    spec_of("ssd", chunk_size=128),
    spec_of("conv1d"),
    spec_of("conv1d", ("bias",)),
    spec_of("conv1d", ("residual",)),
    spec_of("conv1d", ("initial_state",)),
    spec_of("conv1d", activation="silu"),
    spec_of("conv1d", activation="swish"),
    spec_of("mixer"),
    spec_of("mixer", ("conv1d_bias",)),
    spec_of("mixer", ("initial_states",)),
    spec_of("mixer", activation=None),
    spec_of("mixer", activation="swish"),
    spec_of("mixer", dt_limit=(0.2, 0.5)),
    spec_of("mixer").with_(alternate=True),
]


@pytest.mark.parametrize(
    "spec", SINGLY, ids=lambda s: "-".join([s.op, *s.optional, *s.options, str(s.alternate)])
)
def test_one_option(spec: OpSpec) -> None:
    case = OpCase.of(spec)
    check(case, run_threads(case))


@pytest.mark.parametrize("width", range(1, 7))
@pytest.mark.parametrize("layout", ["contiguous", "zigzag_per_sequence"])
def test_widths_of_the_convolution(layout: str, width: int) -> None:
    """Shards of 0 to 3 tokens: the halo comes from several ranks back."""
    for offsets in ([0, 9], [0, 3, 12], [0, 1, 2, 11]):
        spec = OpSpec("conv1d", offsets, 5, layout, dtype="float64", width=width)
        case = OpCase.of(spec.with_(optional=("initial_state", "bias", "residual")))
        check(case, run_threads(case))


def bits(runs: list[RankRun]) -> list[torch.Tensor]:
    return [x for run in runs for x in (run.output, run.final, *run.grads.values())]


def same_bits(one: list[RankRun], other: list[RankRun]) -> bool:
    pairs = list(zip(bits(one), bits(other), strict=True))
    assert len(pairs) > 2
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_explicit_forward_and_backward_equal_autograd(op: str, dtype: str) -> None:
    for seed in range(8):
        rng = random.Random(f"explicit/{op}/{seed}")
        spec = random_spec(rng, op, dtype=dtype, loss=("output", "final"))
        implicit, explicit = (
            run_threads(OpCase.of(spec.with_(explicit=explicit))) for explicit in (False, True)
        )
        assert same_bits(implicit, explicit), spec


@pytest.mark.parametrize("op", OPS)
def test_overlap_changes_no_bit_of_the_torch_engine(op: str) -> None:
    for seed in range(6):
        spec = random_spec(random.Random(f"overlap/{op}/{seed}"), op)
        runs = [run_threads(OpCase.of(spec.with_(overlap=overlap))) for overlap in (False, True)]
        assert same_bits(*runs), spec
        assert all(run.record is not None and run.record.overlap for run in runs[1])


@pytest.mark.parametrize("op", OPS)
def test_strides_change_no_bit(op: str) -> None:
    for seed in range(4):
        spec = random_spec(random.Random(f"strides/{op}/{seed}"), op)
        runs = [run_threads(OpCase.of(spec.with_(strided=strided))) for strided in (False, True)]
        for one, other in zip(bits(runs[0]), bits(runs[1]), strict=True):
            assert relative_error(other, one) < 1e-6  # matrix products may block otherwise


@pytest.mark.parametrize("op", OPS)
def test_runs_repeat_bit_by_bit(op: str) -> None:
    case = OpCase.of(random_spec(random.Random(f"repeat/{op}"), op, world_size=3))
    assert same_bits(run_threads(case), run_threads(case))


@pytest.mark.parametrize(("dtype", "limit"), [("float64", 1e-9), ("float32", 1e-5)])
@pytest.mark.parametrize("op", OPS)
def test_independent_of_the_world_size(op: str, dtype: str, limit: float) -> None:
    """The same call on 2 to 5 ranks against our own op on one: fp64 1e-9, fp32 1e-5."""
    for layout in ("contiguous", "zigzag", "contiguous_per_sequence", "zigzag_per_sequence"):
        name = "initial_states" if op in ("ssd", "mixer") else "initial_state"
        spec = spec_of(op, (name,)).with_(dtype=dtype, layout=layout)
        (alone,) = run_threads(OpCase.of(spec.with_(world_size=1)))
        for world_size in (2, 3, 4, 5):
            case = OpCase.of(spec.with_(world_size=world_size))
            runs = run_threads(case)
            for rank, run in enumerate(runs):
                local = {"output": (run.output, alone.output)}
                local.update({n: (run.grads[n], alone.grads[n]) for n in case.tokens})
                for what, (actual, whole) in local.items():
                    expected = case.plan.shard(whole, rank)
                    assert relative_error(actual, expected) <= limit, (what, rank, layout)
            for what in (*case.parameters, name):
                total = sum(run.grads[what] for run in runs)
                assert relative_error(total, alone.grads[what]) <= limit, (what, layout)
            assert relative_error(sum(run.final for run in runs), alone.final) <= limit


def test_bf16_equals_our_own_unsharded_op() -> None:
    """5e-3 against our own op on one rank; Mamba2's ddt_bias 3e-3."""
    for op in ("kda", "ssd"):
        optional = ("dt_bias", "initial_states") if op == "ssd" else ("initial_state",)
        spec = spec_of(op, optional).with_(dtype="bfloat16")
        (alone,) = run_threads(OpCase.of(spec.with_(world_size=1)))
        case = OpCase.of(spec)
        runs = run_threads(case)
        for rank, run in enumerate(runs):
            for name in case.tokens:
                expected = case.plan.shard(alone.grads[name], rank)
                assert relative_error(run.grads[name], expected) <= 5e-3, (op, name, rank)
            expected = case.plan.shard(alone.output, rank)
            assert relative_error(run.output, expected) <= 5e-3
        for name in case.parameters:
            limit = 3e-3 if name == "dt_bias" else 5e-3
            total = sum(run.grads[name] for run in runs)
            assert relative_error(total, alone.grads[name]) <= limit, name


def test_compositions_agree_and_say_what_they_are() -> None:
    for op in ("kda", "ssd"):
        results = {}
        for composition in COMPOSITIONS:
            case = OpCase.of(spec_of(op).with_(composition=composition, dtype="float32"))
            runs = run_threads(case)
            assert not [str(each) for each in judge(case, runs) if not each.ok]
            assert {run.record.composition for run in runs if run.record} == {composition}
            results[composition] = bits(runs)
        for one, *others in zip(*results.values(), strict=True):
            assert all(relative_error(other, one) <= 1e-5 for other in others)


@pytest.mark.parametrize("op", OPS)
def test_auto_says_which_composition_it_took(op: str) -> None:
    """The bytes are those of what the record names."""
    for offsets in (PACKED, (0, 41)):
        case = OpCase.of(spec_of(op).with_(composition="auto", cu_seqlens=offsets))
        runs = run_threads(case)
        check(case, runs)
        records = {run.record.composition for run in runs if run.record}
        assert len(records) == 1
        assert records <= {*COMPOSITIONS, "halo"}
