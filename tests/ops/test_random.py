# SPDX-License-Identifier: Apache-2.0
"""Random calls of every op against the token-by-token recurrence in fp64, on every rank.

World sizes 1 to 5, all layouts, uneven and empty ranks, padding, empty sequences, dense batches,
every option, both compositions; outputs, states, every gradient and the counted bytes.
"""

from __future__ import annotations

import random
from collections import Counter

import pytest

from cptransport.composition import COMPOSITIONS
from cptransport.layouts import LAYOUTS
from cptransport.testing.op_cases import OPS, OPTIONAL, OpCase
from cptransport.testing.op_oracle import check
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import run_threads

BLOCK = 12


@pytest.mark.parametrize("block", range(4))
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_random_calls(op: str, dtype: str, block: int) -> None:
    shown: Counter[str] = Counter()
    for seed in range(block * BLOCK, (block + 1) * BLOCK):
        case = OpCase.of(random_spec(random.Random(f"{op}/{dtype}/{seed}"), op, dtype=dtype))
        for each in check(case, run_threads(case)):
            shown[each.name] += each.scale > 1e-3
    # A block in which some gradient was never compared with anything but zeros shows nothing.
    always = {name for name in shown if "," not in name and not name.startswith(("bytes", "dtype"))}
    assert len(always) >= 5
    assert all(shown[name] for name in always), shown


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("op", OPS)
def test_the_random_calls_meet_everything(op: str, dtype: str) -> None:
    """What is drawn above has every layout, world size, composition, kind of plan and input."""
    met: Counter[object] = Counter()
    for seed in range(4 * BLOCK):
        spec = random_spec(random.Random(f"{op}/{dtype}/{seed}"), op, dtype=dtype)
        plan = spec.plan()
        met.update([spec.layout, spec.world_size, spec.composition, *spec.optional, *spec.loss])
        met.update(name for name in ("overlap", "strided", "alternate") if getattr(spec, name))
        met.update(name for name in spec.options if spec.options[name])
        met["padding"] += plan.has_padding
        met["dense"] += spec.batch > 1
        met["packed"] += plan.num_sequences > 2
        met["uneven"] += spec.layout == "contiguous" and spec.boundaries is not None
        met["empty sequence"] += len(set(spec.cu_seqlens)) < len(spec.cu_seqlens)
        met["empty rank"] += any(not plan.for_rank(r).num_tokens for r in range(plan.world_size))
        met["two segments"] += plan.max_segments > plan.num_sequences
    expected = {*LAYOUTS, *range(1, 6), *COMPOSITIONS, *OPTIONAL[op], "output", "final"}
    expected |= {"overlap", "strided", "alternate", "padding", "dense", "packed", "uneven"}
    expected |= {"empty sequence", "empty rank", "two segments"}
    expected |= {
        "kda": {
            "scale",
            "use_qk_l2norm_in_kernel",
            "use_gate_in_kernel",
            "lower_bound",
            "safe_gate",
            "use_beta_sigmoid_in_kernel",
            "allow_neg_eigval",
            "state_v_first",
        },
        "ssd": {"dt_softplus", "dt_limit"},
        "conv1d": {"activation"},
        "mixer": {"activation", "dt_limit"},
    }[op]
    assert not {each for each in expected if not met[each]}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("op", OPS)
def test_random_calls_in_16_bits(op: str, dtype: str) -> None:
    # A loss on the final state alone gives gradients below what fp16 can hold.
    for seed in range(BLOCK):
        rng = random.Random(f"{op}/{dtype}/{seed}")
        case = OpCase.of(random_spec(rng, op, dtype=dtype, loss=("output", "final")))
        check(case, run_threads(case))


@pytest.mark.parametrize(
    ("stream", "gates", "parameters"),
    [
        ("bfloat16", "float32", "bfloat16"),
        ("bfloat16", "bfloat16", "float32"),
        ("float16", "float32", "float64"),
        ("float32", "bfloat16", "float16"),
        ("float32", "float64", "float64"),
        ("float64", "float32", "bfloat16"),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_dtypes_that_differ(op: str, stream: str, gates: str, parameters: str) -> None:
    """Gradients come in the dtype of their input; initial states may have any."""
    for seed in range(2):
        rng = random.Random(f"dtypes/{op}/{seed}")
        spec = random_spec(rng, op, dtype=stream, loss=("output", "final"), optional=OPTIONAL[op])
        if op == "kda":
            spec = spec.with_(options={**spec.options, "use_gate_in_kernel": True})
        case = OpCase.of(spec.with_(gate_dtype=gates, parameter_dtype=parameters))
        check(case, run_threads(case))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("op", OPS)
def test_initial_states_and_losses_on_both(op: str, seed: int) -> None:
    rng = random.Random(f"states/{op}/{seed}")
    spec = random_spec(rng, op, dtype="float64", loss=("output", "final"))
    name = "initial_states" if op in ("ssd", "mixer") else "initial_state"
    case = OpCase.of(spec.with_(optional=sorted({*spec.optional, name}), width=max(2, spec.width)))
    compared = check(case, run_threads(case))
    assert any(each.name == f"d{name}" for each in compared)


@pytest.mark.parametrize("op", OPS)
def test_08_edges_near_the_cuts_of_ranks(op: str) -> None:
    """Report 8: sequences that start 0 to 3 tokens before or after a rank does, on two and three ranks."""
    for world_size in (2, 3):
        cut = 8
        for offset in range(-3, 4):
            edges = sorted({0, *(cut * r + offset for r in range(1, world_size))})
            case = OpCase.of(
                random_spec(
                    random.Random(f"edges/{op}/{world_size}/{offset}"),
                    op,
                    cu_seqlens=[*edges, cut * world_size],
                    world_size=world_size,
                    layout="contiguous",
                    dtype="float64",
                    width=4,
                )
            )
            check(case, run_threads(case))
