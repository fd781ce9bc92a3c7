# SPDX-License-Identifier: Apache-2.0
"""Small forward and backward calls of one op in one process, for ``compute-sanitizer``.

::

    compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/sanitized.py kda

Every tensor is an allocation of its own, so that an access beyond it is one beyond memory; results
are compared with the torch engine's, so that a run that computed nothing is not clean. A rank inside a
chain of four runs summaries, folds and cut segments.
"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")

import torch

from cptransport.bench import mamba2
from cptransport.bench.kda_op import KDAShape, kda_layer
from cptransport.bench.layer_stage import Setup, Stage, asking
from cptransport.context import CPContext
from cptransport.plan import build_plan
from cptransport.testing.numerics import TOLERANCES, relative_error
from cptransport.testing.op_cases import INITIAL, OPTIONAL, OpCase, OpSpec
from cptransport.testing.op_rank import call
from cptransport.testing.recorded import RecordedTransport, record
from cptransport.transport import BoundaryTransport
from cptransport.transports.loopback import LoopbackTransport

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
#: Lengths around chunks, an empty and a single-token sequence.
SEQUENCES = [0, 70, 71, 71, 135]
SPECS = {
    "kda": [
        OpSpec("kda", SEQUENCES, key_dim=64, value_dim=32, dtype="float32"),
        OpSpec(
            "kda", SEQUENCES, key_dim=128, value_dim=128, dtype="bfloat16", gate_dtype="float32"
        ),
    ],
    "ssd": [
        OpSpec(
            "ssd",
            SEQUENCES,
            heads=1,
            value_heads=2,
            key_dim=32,
            value_dim=32,
            dtype=dtype,
            options={"chunk_size": 32, "dt_softplus": True},
            optional=OPTIONAL["ssd"],
        )
        for dtype in ("float32", "bfloat16")
    ],
    "conv1d": [
        OpSpec("conv1d", SEQUENCES, width=width, options={"activation": "silu"})
        for width in (2, 4, 7)
    ],
}
#: Long enough for a GPU to cut a rank's segment.
LAYERS = {
    "kda": kda_layer(KDAShape(300, 1, 2, 64, 32, -0.5)),
    "ssd": mamba2.layer(mamba2.Shape(300, 2, 1, 32, 32, 32)),
}


def run(spec: OpSpec, dtype: str, device: torch.device, engine: str | None) -> list[torch.Tensor]:
    """Return output, final states and gradients of a call on one rank."""
    spec = spec.with_(world_size=1, engine=engine)
    case = OpCase.of(spec)
    inputs = {**case.tokens, **case.parameters}
    if case.initial is not None:
        inputs[INITIAL[spec.op]] = case.initial
    wanted = None if dtype == spec.dtype else getattr(torch, dtype)
    leaves = {n: x.to(device, wanted or x.dtype).requires_grad_() for n, x in inputs.items()}
    context = CPContext(build_plan(SEQUENCES, world_size=1), LoopbackTransport(device, 60.0))
    output, final = call(spec, context, leaves)
    grads = [case.grad_output.to(output), case.grad_final.to(final)]
    found = torch.autograd.grad([output, final], list(leaves.values()), grads)
    return [output.detach(), final.detach(), *found]


def inside_a_chain(op: str, engine: str | None) -> int:
    """Run an interior rank on what its peers sent on the CPU; return in how many compositions it was wrong.

    Alone: racecheck loses track of kernels that several threads launch.
    """
    layer, rank = LAYERS[op], 2
    stage = Stage(layer, Setup(4, "float32", 0, 60.0), torch.device("cpu"))

    def step(transport: BoundaryTransport) -> dict[str, torch.Tensor]:
        context = CPContext(stage.plan, transport)
        inputs = {n: x.to(transport.device) for n, x in stage.local(transport.rank).items()}
        grad = stage.local_grad(transport.rank).to(transport.device)
        alone = isinstance(transport, RecordedTransport)
        return layer.explicit(inputs, context, engine if alone else "torch", grad)

    wrong = 0
    for composition in ("gather", "scan"):
        with asking(overlap=False, composition=composition):
            right, recordings = record(step, 4)
            found = step(RecordedTransport(recordings[rank], DEVICE))
        worst = max(relative_error(x, right[rank][name]) for name, x in found.items())
        limit = TOLERANCES[torch.float32]
        print(
            f"{op} inside a chain, {composition}: largest relative error {worst:.1e}, limit {limit:.0e}"
        )
        wrong += not worst <= limit
    return wrong


def main(op: str) -> int:
    """Run an op's calls; return 1 if a result is wrong."""
    wrong = 0
    engine = "triton" if DEVICE.type == "cuda" and op != "conv1d" else None
    for spec in SPECS[op]:
        found = run(spec, spec.dtype, DEVICE, engine)
        right = run(spec, "float64", torch.device("cpu"), None if op == "conv1d" else "torch")
        limit = TOLERANCES[getattr(torch, spec.dtype)]
        worst = max(relative_error(a, b) for a, b in zip(found, right, strict=True))
        print(f"{op} {spec.dtype}: largest relative error {worst:.1e}, limit {limit:.0e}")
        wrong += not worst <= limit
    if op in LAYERS:
        wrong += inside_a_chain(op, engine)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
