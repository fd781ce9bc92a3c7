# SPDX-License-Identifier: Apache-2.0
"""``causal_conv1d`` compiled for sm_90 on a machine without a GPU; a script as ``without_gpu`` is one.

It prints one JSON document::

    launches    names, in order, of a forward and backward of rank 2 of 4, columns of a projection
    operators   torch operators for them once everything is cached, name -> number
    handles     per launch whether Triton itself would have launched the same compiled kernel
    kernels     name -> bytes of shared memory, of all that was compiled, wide ones too
"""

from __future__ import annotations

import json
from collections.abc import Callable

import torch
from triton.runtime import driver
from without_gpu import _Driver, _Operators, compare_handles, kernels, launches

import cptransport
from cptransport.ops import causal_conv1d, conv1d_triton
from cptransport.testing.recorded import RecordedTransport, record
from cptransport.transport import BoundaryTransport

TOKENS, CHANNELS = 256, 320


def ready(
    transport: BoundaryTransport, dtype: torch.dtype, width: int, engine: str
) -> Callable[[], None]:
    """Return the forward and backward of one rank, its inputs in place."""
    plan = cptransport.build_plan([0, 4 * TOKENS], world_size=4)
    # Silu, a bias and neighbours, as in a mixer.
    x = torch.rand(1, TOKENS, CHANNELS + 64).to(dtype)[..., 32:-32].requires_grad_()
    weight = torch.rand(CHANNELS, width, requires_grad=True)
    bias = torch.rand(CHANNELS, requires_grad=True)
    dy = torch.ones_like(x)
    context = cptransport.CPContext(plan, transport)

    def run() -> None:
        y, _ = causal_conv1d(x, weight, bias, cp_context=context, activation="silu", engine=engine)
        torch.autograd.grad(y, [x, weight, bias], dy)

    return run


def interior(dtype: torch.dtype, width: int) -> Callable[[], None]:
    """Return the call of rank 2 of 4 on the kernels."""
    _, recordings = record(lambda t: ready(t, dtype, width, "torch")(), 4)
    return ready(RecordedTransport(recordings[2]), dtype, width, "triton")


def main() -> None:
    """Run everything and print what was found."""
    driver.set_active(_Driver())
    conv1d_triton.why_not = lambda *_: None  # type: ignore[assignment]
    run = interior(torch.bfloat16, 4)
    for _ in range(2):
        run()
    launches.clear()
    run()
    found = {"launches": list(launches)}
    with _Operators() as operators:
        run()
    handles = compare_handles(run)
    interior(torch.float32, 9)()
    print(
        json.dumps({**found, "operators": operators.seen, "handles": handles, "kernels": kernels})
    )


if __name__ == "__main__":
    main()
