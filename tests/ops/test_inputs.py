# SPDX-License-Identifier: Apache-2.0
"""What ops refuse on their own rank: shapes, dtypes, options, upstream arguments, plans."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cptransport
from cptransport import (
    CPContext,
    CPTransportError,
    EnvVarError,
    OpInputError,
    UnsupportedOptionError,
    build_plan,
    ops,
    threads,
)
from cptransport.composition import COMPOSITIONS
from cptransport.ops import kda_forward, ssd_forward

N, T, H, HV, K, V = 2, 10, 2, 4, 8, 12
PLAN = build_plan([0, 4, T], world_size=1)
DENSE = build_plan([0, T], world_size=1)


def alone(body: Callable[[CPContext], Any], plan: cptransport.Plan = PLAN) -> Any:
    """Run on the one rank of a plan."""
    return threads.run(lambda transport: body(CPContext(plan, transport)), 1, 20.0)[0]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def kda_inputs(batch: int = 1) -> dict[str, Tensor]:
    return {
        "q": normal(batch, T, H, K),
        "k": normal(batch, T, H, K),
        "v": normal(batch, T, HV, V),
        "g": -normal(batch, T, HV, K).abs(),
        "beta": normal(batch, T, HV).sigmoid(),
    }


def ssd_inputs() -> dict[str, Any]:
    return {
        "x": normal(1, T, HV, V),
        "dt": normal(1, T, HV).exp(),
        "A": -normal(HV).exp(),
        "B": normal(1, T, H, K),
        "C": normal(1, T, H, K),
        "chunk_size": 16,
    }


def conv_inputs() -> dict[str, Tensor]:
    return {"x": normal(1, T, 6), "weight": normal(6, 4)}


def mixer_inputs() -> dict[str, Any]:
    inner, channels = HV * V, HV * V + 2 * H * K
    return {
        "zxbcdt": normal(1, T, inner + channels + HV),
        "conv1d_weight": normal(channels, 4),
        "conv1d_bias": None,
        "dt_bias": normal(HV),
        "A": -normal(HV).exp(),
        "D": normal(HV),
        "chunk_size": 16,
        "headdim": V,
        "ngroups": H,
    }


OPS: dict[str, tuple[Callable[..., Any], Callable[[], dict[str, Any]]]] = {
    "kda": (ops.chunk_kda, kda_inputs),
    "ssd": (ops.mamba_chunk_scan_combined, ssd_inputs),
    "conv1d": (ops.causal_conv1d, conv_inputs),
    "mixer": (ops.mamba_split_conv1d_scan_combined, mixer_inputs),
}

INSIDE = {"use_gate_in_kernel": True}

#: op, changes of the inputs, what the message says.
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("kda", {"q": normal(1, T, H)}, r"q must be \[B, T, H, K\]"),
    ("kda", {"q": normal(2, T, H, K)}, "needs packed input with B = 1, got B = 2"),
    ("kda", {"q": normal(1, T - 1, H, K)}, "rank 0 has 9 local rows, its plan says 10"),
    ("kda", {"k": normal(1, T, HV, K)}, r"k must be \[B, T, H, K\]"),
    ("kda", {"v": normal(1, T, 3, V)}, "HV must be a multiple of H"),
    ("kda", {"g": normal(1, T, H, K)}, r"g must be \[B, T, HV, K\] = \[1, 10, 4, 8\]"),
    ("kda", {"beta": normal(1, T, H)}, r"beta must be \[B, T, HV\]"),
    ("kda", {"v": normal(1, T, HV, 257)}, "V must be between 1 and 256, got 257"),
    ("kda", {"v": normal(1, T, HV, V).double()}, "must have one dtype: q torch.float32"),
    ("kda", {"beta": torch.ones(1, T, HV, dtype=torch.int64)}, "beta must be bfloat16"),
    ("kda", {"q": [1.0]}, "q must be a tensor of shape"),
    ("kda", {"initial_state": normal(N, HV, V, K)}, r"initial_state must be \[N, HV, K, V\]"),
    ("kda", {"initial_state": normal(1, HV, K, V)}, r"\[2, 4, 8, 12\], got \[1, 4, 8, 12\]"),
    (
        "kda",
        {"initial_state": normal(N, HV, K, V), "state_v_first": True},
        r"initial_state must be \[N, HV, V, K\]",
    ),
    ("kda", {"A_log": normal(H), **INSIDE}, r"A_log must be \[HV\] = \[4\], got \[2\]"),
    ("kda", {"dt_bias": normal(HV), **INSIDE}, r"dt_bias must be \[HV, K\]"),
    ("kda", {"A_log": normal(HV)}, "A_log needs use_gate_in_kernel"),
    ("kda", {"dt_bias": normal(HV, K)}, "dt_bias needs use_gate_in_kernel"),
    ("kda", {"lower_bound": -5.0}, "lower_bound needs use_gate_in_kernel"),
    ("kda", {"lower_bound": 1.0, **INSIDE}, "lower_bound must be negative"),
    ("kda", {"safe_gate": True, **INSIDE}, "safe_gate needs lower_bound"),
    ("kda", {"allow_neg_eigval": True}, "allow_neg_eigval needs use_beta_sigmoid_in_kernel"),
    ("kda", {"cp_context": None}, "cp_context must be a CPContext, got NoneType"),
    ("ssd", {"x": normal(1, T, HV * V)}, r"x must be \[B, T, nheads, headdim\]"),
    ("ssd", {"dt": normal(1, T, H)}, r"dt must be \[B, T, nheads\]"),
    ("ssd", {"A": normal(H)}, r"A must be \[nheads\]"),
    ("ssd", {"C": normal(1, T, H, K + 1)}, r"C must be \[B, T, ngroups, dstate\]"),
    ("ssd", {"B": normal(1, T, 3, K), "C": normal(1, T, 3, K)}, "multiple of ngroups"),
    ("ssd", {"D": normal(V)}, r"D must be \[nheads\]"),
    ("ssd", {"D": normal(HV, K)}, r"D must be \[nheads, headdim\]"),
    ("ssd", {"z": normal(1, T, V, HV)}, "z must be"),
    ("ssd", {"dt_bias": normal(H)}, "dt_bias must be"),
    ("ssd", {"initial_states": normal(N, HV, K, V)}, "initial_states must be"),
    ("ssd", {"dt_limit": (1.0, 0.5)}, "dt_limit must be"),
    ("ssd", {"B": normal(1, T, H, K).half()}, "must have one dtype"),
    ("conv1d", {"x": normal(1, T, 6, 1)}, r"x must be \[B, T, D\]"),
    ("conv1d", {"weight": normal(5, 4)}, r"weight must be \[D, W\]"),
    ("conv1d", {"weight": normal(6, 0)}, "W >= 1"),
    ("conv1d", {"weight": normal(6, 1, 4)}, r"weight must be \[D, W\]"),
    ("conv1d", {"bias": normal(4)}, r"bias must be \[D\]"),
    ("conv1d", {"residual": normal(1, T, 5)}, "residual must be"),
    ("conv1d", {"initial_state": normal(N, 6, 4)}, r"initial_state must be \[N, D, W-1\]"),
    ("conv1d", {"activation": "relu"}, "activation must be None, 'silu' or 'swish', got 'relu'"),
    ("mixer", {"zxbcdt": normal(1, T, 100)}, "zxbcdt must have"),
    ("mixer", {"zxbcdt": normal(T, 100)}, "zxbcdt must be"),
    ("mixer", {"conv1d_weight": normal(49, 4)}, "conv1d_weight has 49 channels"),
    ("mixer", {"ngroups": 5}, "conv1d_weight has 80 channels"),
    ("mixer", {"D": None}, "D must be"),
    ("mixer", {"dt_bias": normal(3)}, "dt_bias must be"),
    ("mixer", {"load_balancing": "p2p"}, "permute_p2p"),
]


@pytest.mark.parametrize(("op", "changes", "message"), REFUSED)
def test_refused(op: str, changes: dict[str, Any], message: str) -> None:
    function, inputs = OPS[op]

    def body(context: CPContext) -> None:
        given = {**inputs(), "cp_context": context, **changes}
        kind = EnvVarError if "load_balancing" in changes else OpInputError
        with pytest.raises(kind, match=message) as caught:
            function(**given)
        assert isinstance(caught.value, ValueError)
        assert isinstance(caught.value, CPTransportError)

    alone(body)


@pytest.mark.parametrize("chunk_size", [1, 8, 40, 50, 0, -16, 16.0, True, None])
@pytest.mark.parametrize("op", ["ssd", "mixer"])
def test_32_chunk_sizes_that_are_refused(op: str, chunk_size: Any) -> None:
    """Report 32: not a power of two, or below 16."""
    function, inputs = OPS[op]

    def body(context: CPContext) -> None:
        for _ in range(2):
            with pytest.raises(OpInputError, match="chunk_size must be a power of two >= 16"):
                function(**{**inputs(), "chunk_size": chunk_size}, cp_context=context)
            function(**inputs(), cp_context=context)  # remembered, 16 equals 16.0

    alone(body)


UPSTREAM: list[tuple[str, str, Any]] = [
    *(("kda", name, 1) for name in ("cu_seqlens", "cu_seqlens_cpu", "chunk_indices")),
    *(("kda", name, True) for name in ("disable_recompute", "return_intermediate_states")),
    *(("ssd", name, 1) for name in ("seq_idx", "cu_seqlens", "out", "state_dtype")),
    ("ssd", "return_varlen_states", True),
    *(("conv1d", name, 1) for name in ("cu_seqlens", "seq_idx", "initial_states")),
    ("conv1d", "return_final_states", True),
    *(("mixer", name, 1) for name in ("seq_idx", "rmsnorm_weight", "outproj_weight")),
    ("mixer", "outproj_bias", torch.ones(3)),
]


@pytest.mark.parametrize(("op", "name", "value"), UPSTREAM)
def test_upstream_arguments(op: str, name: str, value: Any) -> None:
    """Given: refused with the reason. None and False: as if not given."""
    function, inputs = OPS[op]

    def body(context: CPContext) -> None:
        with pytest.raises(UnsupportedOptionError, match=f"{name} is not served: ") as caught:
            function(**inputs(), cp_context=context, **{name: value})
        assert isinstance(caught.value, NotImplementedError)
        for nothing in (None, False):
            function(**inputs(), cp_context=context, **{name: nothing})

    alone(body)


@pytest.mark.parametrize("op", OPS)
def test_unknown_arguments_are_type_errors(op: str) -> None:
    function, inputs = OPS[op]

    def body(context: CPContext) -> None:
        with pytest.raises(TypeError, match="'initial_sate'"):
            function(**inputs(), cp_context=context, initial_sate=None)

    alone(body)


@pytest.mark.parametrize(
    ("forward", "inputs"),
    [(kda_forward, kda_inputs), (ssd_forward, ssd_inputs)],
)
def test_explicit_forwards_have_no_arguments_of_their_own(
    forward: Callable[..., Any], inputs: Callable[[], dict[str, Any]]
) -> None:
    def body(context: CPContext) -> None:
        with pytest.raises(TypeError, match="'final'"):
            forward(**inputs(), cp_context=context, final=False)

    alone(body)


def test_load_balancing_none_needs_a_contiguous_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {
        layout: build_plan([0, 4, T], world_size=2, layout=layout)
        for layout in ("contiguous", "zigzag", "contiguous_per_sequence")
    }
    uneven = build_plan([0, 4, T], world_size=2, boundaries=[0, 3, T])

    def body(transport: threads.ThreadTransport) -> None:
        def mixer(plan: cptransport.Plan, mode: str | None) -> None:
            inputs = mixer_inputs()
            inputs["zxbcdt"] = plan.shard(inputs["zxbcdt"], transport.rank)
            context = CPContext(plan, transport)
            ops.mamba_split_conv1d_scan_combined(**inputs, cp_context=context, load_balancing=mode)

        for layout, plan in plans.items():
            if layout != "contiguous":
                with pytest.raises(OpInputError, match="needs a contiguous plan"):
                    mixer(plan, "none")
            mixer(plan, "virtual")
        mixer(plans["contiguous"], "none")
        mixer(uneven, "none")
        mixer(plans["zigzag"], None)  # the default is virtual

    threads.run(body, 2, 20.0)
    monkeypatch.setenv("CULA_CP_MAMBA_LOAD_BALANCING", "none")
    with pytest.raises(OpInputError, match="needs a contiguous plan"):
        threads.run(body, 2, 20.0)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("CULA_CP_COMPOSITION", "gatter", EnvVarError),
        ("CULA_CP_OVERLAP", "yes", EnvVarError),
        ("CULA_CP_CHECK", "2", EnvVarError),
        ("CULA_CP_ENGINE", "tritn", cptransport.BackendNotFoundError),
    ],
)
def test_variables_are_read_at_each_call(
    name: str, value: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(context: CPContext) -> None:
        ops.chunk_kda(**kda_inputs(), cp_context=context)
        monkeypatch.setenv(name, value)
        with pytest.raises(error):
            ops.chunk_kda(**kda_inputs(), cp_context=context)
        monkeypatch.setenv(name, "")  # empty is unset
        ops.chunk_kda(**kda_inputs(), cp_context=context)

    alone(body)


def test_the_engine_argument_beats_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_ENGINE", "nothing-of-that-name")

    def body(context: CPContext) -> None:
        ops.chunk_kda(**kda_inputs(), cp_context=context, engine="torch")
        with pytest.raises(cptransport.BackendNotFoundError, match="no-such-engine"):
            ops.chunk_kda(**kda_inputs(), cp_context=context, engine="no-such-engine")

    alone(body)


def test_last_run_is_this_threads_last_op() -> None:
    plan = build_plan([0, 4, T], world_size=2, layout="zigzag")

    def body(transport: threads.ThreadTransport) -> list[Any]:
        context = CPContext(plan, transport)
        records = [cptransport.last_run()]
        local = {n: plan.shard(x, transport.rank) for n, x in kda_inputs().items()}
        ops.chunk_kda(**local, cp_context=context)
        records.append(cptransport.last_run())
        conv = conv_inputs()
        conv["x"] = plan.shard(conv["x"], transport.rank)
        ops.causal_conv1d(**conv, cp_context=context)
        records.append(cptransport.last_run())
        return records

    for before, kda, conv in threads.run(body, 2, 20.0):
        assert before is None
        assert (kda.op, kda.engine, kda.transport) == ("chunk_kda", "torch", "threads")
        assert kda.composition in COMPOSITIONS  # what auto took
        assert (kda.overlap, kda.world_size) == (False, 2)
        assert isinstance(kda.reasons, tuple)
        assert (conv.op, conv.transport, conv.world_size) == ("causal_conv1d", "threads", 2)
    other: list[Any] = []
    thread = threading.Thread(target=lambda: other.append(cptransport.last_run()))
    thread.start()
    thread.join()
    assert other == [None]


def test_final_states_only_when_asked() -> None:
    def body(context: CPContext) -> None:
        assert ops.chunk_kda(**kda_inputs(), cp_context=context)[1] is None
        assert isinstance(ops.mamba_chunk_scan_combined(**ssd_inputs(), cp_context=context), Tensor)
        assert ops.causal_conv1d(**conv_inputs(), cp_context=context)[1] is None
        assert isinstance(
            ops.mamba_split_conv1d_scan_combined(**mixer_inputs(), cp_context=context), Tensor
        )

    alone(body)


def test_dense_plans_take_any_batch() -> None:
    def body(context: CPContext) -> None:
        o, final = ops.chunk_kda(**kda_inputs(3), cp_context=context, output_final_state=True)
        assert o.shape == (3, T, HV, V)
        assert final is not None
        assert final.shape == (3, HV, K, V)
        with pytest.raises(OpInputError, match="B must be at least 1"):
            ops.chunk_kda(**kda_inputs(0), cp_context=context)

    alone(body, DENSE)


def test_a_plan_of_another_world_size() -> None:
    plan = build_plan([0, 4], world_size=2)
    with pytest.raises(cptransport.PlanError, match="the plan is for 2 ranks, the transport has 1"):
        alone(lambda context: None, plan)


@pytest.mark.parametrize("offsets", [[0, 12, 8, 16], [1, 5], [], [0, -1], [0, 5, 3]], ids=str)
def test_27_malformed_offsets(offsets: list[int]) -> None:
    """Report 27: refused when the plan is built, with the same words on every rank."""
    words = set()
    for world_size in (1, 2):
        with pytest.raises(cptransport.PlanError) as caught:
            build_plan(offsets, world_size=world_size)
        words.add(str(caught.value))
    assert len(words) == 1
