# SPDX-License-Identifier: Apache-2.0
"""The op calls that every transport is tried with."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import rig

from cptransport.testing.op_cases import OPTIONAL, OpSpec

__all__ = ["SPECS", "why_not"]

SEQUENCES = [0, 70, 71, 71, 200, 333]
OPTIONS: dict[str, dict[str, Any]] = {
    "kda": {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True},
    "ssd": {"chunk_size": 16, "dt_softplus": True},
    "conv1d": {"activation": "silu"},
    "mixer": {"chunk_size": 16},
}
#: A gate with a bound, so that cuDNN's range is not left.
BOUNDED = {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True, "safe_gate": True}
WIDE = {"key_dim": 128, "value_dim": 128}
BFLOAT16 = {"dtype": "bfloat16", "gate_dtype": "float32"}
LAYOUTS = ("contiguous", "zigzag")
#: Mamba2 as it is trained: power-of-two sizes, several heads to a group.
CORE = {"heads": 2, "value_heads": 4, "key_dim": 64, "value_dim": 64}


def spec_of(op: str, **changes: Any) -> OpSpec:
    """Return a call with all optional inputs on a zigzag plan of packed sequences."""
    spec = OpSpec(
        op, SEQUENCES, layout="zigzag", optional=OPTIONAL[op], options=OPTIONS[op], seed=3
    )
    return spec.with_(**changes)


SPECS = {
    **{
        f"{op}-torch-{how}": spec_of(op, engine="torch", composition=how, overlap=how == "gather")
        for op in ("kda", "ssd")
        for how in ("gather", "handoff", "scan")
    },
    "conv1d": spec_of("conv1d"),
    "mixer-torch": spec_of("mixer", engine="torch"),
    "kda-torch-fp64": spec_of("kda", engine="torch", dtype="float64", layout="contiguous"),
    "kda-triton-fp32": spec_of("kda", engine="triton", key_dim=32, value_dim=64),
    "kda-triton-v-first": spec_of(
        "kda", engine="triton", **WIDE, options={**OPTIONS["kda"], "state_v_first": True}
    ),
    "kda-triton-bf16": spec_of("kda", engine="triton", overlap=True, **WIDE, **BFLOAT16),
    "kda-triton-handoff": spec_of(
        "kda", engine="triton", composition="handoff", layout="contiguous", **WIDE, **BFLOAT16
    ),
    "kda-triton-scan": spec_of("kda", engine="triton", composition="scan", **WIDE, **BFLOAT16),
    "ssd-triton-fp32": spec_of("ssd", engine="triton", **CORE),
    "ssd-triton-bf16": spec_of("ssd", engine="triton", overlap=True, **CORE, **BFLOAT16),
    "ssd-triton-scan": spec_of("ssd", engine="triton", composition="scan", **CORE, **BFLOAT16),
    "mixer-triton-bf16": spec_of("mixer", engine="triton", **CORE, **BFLOAT16),
    **{
        f"kda-cudnn-bound-{layout}": spec_of(
            "kda",
            engine="cudnn",
            layout=layout,
            options={**BOUNDED, "lower_bound": -5.0},
            **WIDE,
            **BFLOAT16,
        )
        for layout in LAYOUTS
    },
    **{
        f"kda-cudnn{gate:g}-{layout}": spec_of(
            "kda",
            engine="cudnn",
            layout=layout,
            optional=("initial_state",),
            options={},
            gate=gate,
            **WIDE,
            **BFLOAT16,
        )
        for gate in (-0.01, -1.0, -5.0)
        for layout in LAYOUTS
    },
}


def why_not(name: str) -> str | None:
    """Say why a call cannot be tried here at all."""
    engine = SPECS[name].engine
    if rig.REHEARSAL and engine in ("triton", "cudnn"):
        return f"a rehearsal has no engine {engine}"
    if engine == "cudnn" and find_spec("cudnn") is None:
        return "cuDNN's frontend is not installed: pip install nvidia-cudnn-frontend"
    return None
