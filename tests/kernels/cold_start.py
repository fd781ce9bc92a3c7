# SPDX-License-Identifier: Apache-2.0
"""The first forward and backward of KDA in a process, on one shape; prints its seconds and a checksum as JSON."""

from __future__ import annotations

import json
import time

import torch

import cptransport
from cptransport.ops import chunk_kda


def main() -> None:
    """Compile, run and print."""
    shape = (1, 512, 2, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, g = (
        torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    )
    beta = torch.rand(shape[:3], generator=generator, device="cuda")
    inputs = [x.requires_grad_() for x in (q, k, v, -g.float().abs(), beta)]
    transport = cptransport.create_transport(backend="loopback", device="cuda")
    plan = cptransport.build_plan([0, 200, 512], world_size=1)
    context = cptransport.CPContext(plan, transport)
    torch.cuda.synchronize()
    start = time.perf_counter()
    o, _ = chunk_kda(*inputs, cp_context=context, use_qk_l2norm_in_kernel=True, engine="triton")
    grads = torch.autograd.grad(o.float().square().sum(), inputs)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    checksum = sum(float(grad.double().abs().sum()) for grad in grads)
    print(json.dumps({"seconds": seconds, "checksum": checksum}))


if __name__ == "__main__":
    main()
