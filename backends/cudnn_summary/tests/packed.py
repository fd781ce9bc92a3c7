# SPDX-License-Identifier: Apache-2.0
"""The explicit forward and backward on THD tokens, beside ``[1, T, ...]``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cptransport import CPContext
from cptransport.ops import kda_backward, kda_forward, last_run
from cptransport.testing.op_cases import OpCase
from cptransport.transport import BoundaryTransport

GRADS = ("dq", "dk", "dv", "dg", "dbeta")


def both_ways(transport: BoundaryTransport, case: OpCase) -> tuple[dict[str, Tensor], ...]:
    """Return what a rank gets from THD tokens and from ``[1, T, ...]``, by name; collective."""
    plan, device = case.plan, transport.device
    context = CPContext(plan, transport)
    batched = {n: plan.shard(x, transport.rank).to(device) for n, x in case.tokens.items()}
    grad = plan.shard(case.grad_output, transport.rank).to(device)
    return tuple(
        _run(context, case, {n: x[pick] for n, x in batched.items()}, grad[pick])
        for pick in (0, slice(None))
    )


def _run(
    context: CPContext, case: OpCase, tokens: dict[str, Tensor], grad: Tensor
) -> dict[str, Tensor]:
    options: dict[str, Any] = dict(case.spec.options)
    forward = kda_forward(**tokens, **options, cp_context=context, engine=case.spec.engine)
    ran = last_run()
    assert ran is not None
    assert ran.engine == case.spec.engine
    back = kda_backward(forward.saved, grad)
    return {"o": forward.o, **{name: getattr(back, name) for name in GRADS}}
