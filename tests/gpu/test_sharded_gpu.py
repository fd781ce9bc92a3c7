# SPDX-License-Identifier: Apache-2.0
"""How far KDA on four ranks is from the same engine's unsharded run, and both from fp64.

The ranks are threads, so that the only difference is what the boundary does. Two correct 16-bit results
differ by up to the root of the sum of the squares of their own errors; an engine whose segments inside a
chain run on other kernels than whole sequences do (``cudnn``: cuDNN's backward on the ``triton``
engine's forward) cannot be nearer to itself than that.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import rig
import torch

from cptransport.bench.kda_op import KDAShape, kda_layer
from cptransport.bench.layer_stage import Setup, Stage, Tensors, asking
from cptransport.context import CPContext
from cptransport.ops import last_run
from cptransport.testing.numerics import relative_rms, rms_tolerance
from cptransport.transport import BoundaryTransport
from cptransport.transports import threads

pytestmark = pytest.mark.gpu

RANKS = 4
LIMIT = 5e-3
INTERIOR = "CULA_CP_CUDNN_INTERIOR"
WAYS: dict[str, tuple[str, dict[str, str]]] = (
    {"torch": ("torch", {})}
    if rig.REHEARSAL
    else {
        "triton": ("triton", {}),
        "cudnn, interior segments by triton": ("cudnn", {INTERIOR: "triton"}),
        "cudnn, interior segments by identity": ("cudnn", {INTERIOR: "identity"}),
    }
)
#: Means; below about -3 some 16 tokens of a channel leave the range of cuDNN's kernels.
GATES = (-0.01, -0.25, -1.0, -2.5)
SIZE = (32, 2, 2, 8, 8) if rig.REHEARSAL else (512, 4, 4, 128, 128)


def _sharded(stage: Stage, engine: str, interior: str) -> list[Tensors]:
    """Return what every rank gets; ``interior`` says how segments inside a chain ran."""

    def step(transport: BoundaryTransport) -> Tensors:
        cp, rank = CPContext(stage.plan, transport), transport.rank
        found = stage.layer.explicit(stage.local(rank), cp, engine, stage.local_grad(rank))
        ran = last_run()
        assert ran is not None
        assert ran.engine == engine
        assert ran.detail.count(interior), ran.detail
        return found

    return threads.run(step, RANKS, rig.WATCHDOG_S, device=str(stage.device))


def test_distance_to_the_unsharded_op() -> None:
    """All of them near fp64; ``triton`` within 5e-3 of itself, ``cudnn`` as near as 16-bit results can be."""
    rows, wrong = [], []
    device = torch.device("cpu") if rig.REHEARSAL else torch.device("cuda", 0)
    dtype = "float32" if rig.REHEARSAL else "bfloat16"
    torch.linalg.inv(torch.ones(1, 1, device=device))  # loaded before threads start
    for gate in GATES:
        stage = Stage(kda_layer(KDAShape(*SIZE, gate)), Setup(RANKS, dtype, 7, 60.0), device)
        single = stage.single(stage.plan.total_rows)
        wide = {name: x.double() for name, x in stage.inputs.items()}
        right = stage.layer.explicit(wide, single, "torch", stage.grad.double())
        for way, (engine, setting) in WAYS.items():
            if engine == "cudnn" and find_spec("cudnn") is None:
                continue
            with asking(overlap=False, setting=setting):
                ranks = _sharded(stage, engine, way.partition(", ")[2])
                whole = stage.layer.explicit(stage.inputs, single, engine, stage.grad)
            for name, unsharded in whole.items():
                tolerance = rms_tolerance("output" if name == "o" else f"d{name}")
                mine = torch.cat([rank[name] for rank in ranks], 1)
                parts = [stage.plan.shard(unsharded, rank) for rank in range(RANKS)]
                row = {
                    "engine": way,
                    "gate": gate,
                    "name": "o" if name == "o" else f"d{name}",
                    "unsharded": max(
                        relative_rms(rank[name], part)
                        for rank, part in zip(ranks, parts, strict=True)
                    ),
                    "fp64": relative_rms(mine, right[name]),
                    "unsharded_fp64": relative_rms(unsharded, right[name]),
                }
                rows.append(row)
                limit = 2**0.5 * tolerance if engine == "cudnn" else LIMIT
                if not (row["unsharded"] <= limit and row["fp64"] <= tolerance):
                    wrong.append(row)
    rig.report("sharded", RANKS, world_size=RANKS, dtype=dtype, size=SIZE, limit=LIMIT, rows=rows)
    assert {row["name"] for row in rows} == {"o", "dq", "dk", "dv", "dg", "dbeta"}
    assert not wrong
