# SPDX-License-Identifier: Apache-2.0
"""Long sequences over real ranks against fp64 on the whole: relative root mean squares of bf16 streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import rig

from cptransport.bench.kda_op import KDAShape, kda_layer
from cptransport.bench.layer_stage import LayerOp, Setup, Stage
from cptransport.bench.mamba2 import Shape, layer
from cptransport.context import CPContext
from cptransport.ops import last_run
from cptransport.testing import Ranks
from cptransport.testing.numerics import relative_rms, rms_tolerance

pytestmark = pytest.mark.gpu

RANKS = 2
LENGTHS = (128,) if rig.REHEARSAL else (2048, 8192, 32768)
GATES = (-0.01, -1.0, -2.5)
ENGINE, DTYPE = ("torch", "float32") if rig.REHEARSAL else ("triton", "bfloat16")


def _layer(op: str, tokens: int, gate: float) -> LayerOp:
    if op == "kda":
        size = (2, 2, 8, 8) if rig.REHEARSAL else (4, 4, 128, 128)
        return kda_layer(KDAShape(tokens, *size, gate))
    core = (4, 2, 4, 8, 16) if rig.REHEARSAL else (16, 2, 64, 128, 128)
    return layer(Shape(tokens, *core))


def _errors(ranks: Ranks, op: str, length: int, gate: float) -> Mapping[str, Any]:
    """Return this rank's error by name, and the engine that ran."""
    transport = ranks.create()
    op_layer = _layer(op, length // ranks.world_size, gate)
    stage = Stage(op_layer, Setup(ranks.world_size, DTYPE, 5, 60.0), ranks.device)
    cp, rank = CPContext(stage.plan, transport), ranks.rank
    found = op_layer.explicit(stage.local(rank), cp, ENGINE, stage.local_grad(rank))
    ran = last_run()
    assert ran is not None
    wide = {name: x.double() for name, x in stage.inputs.items()}
    right = op_layer.explicit(wide, stage.single(length), "torch", stage.grad.double())
    errors: dict[str, Any] = {"engine": ran.engine}
    for name, value in found.items():
        if name == "o" or name in op_layer.sharded:
            errors[name] = relative_rms(value, stage.plan.shard(right[name], rank))
    return errors


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize(("op", "gate"), [*(("kda", gate) for gate in GATES), ("ssd", 0.0)])
def test_against_fp64(op: str, gate: float, length: int) -> None:
    """Output and every gradient of the stream, on both ranks."""
    serving = rig.serving("cupy_ipc", RANKS)
    rows = serving.run(_errors, transport=False, timeout_s=120, op=op, length=length, gate=gate)
    for rank, row in enumerate(rows):
        assert row.pop("engine") == ENGINE
        wrong = {}
        for name, error in row.items():
            limit = rms_tolerance("output" if name == "o" else f"d{name}")
            if not error <= limit:
                wrong[name] = (error, limit)
        assert not wrong, f"rank {rank}: {wrong}"
        assert len(row) >= 5
