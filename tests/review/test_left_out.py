# SPDX-License-Identifier: Apache-2.0
"""A rank that leaves a backward out is found out, though nobody waits for that very backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cptransport import CPContext, TransportError, build_plan, threads
from cptransport.errors import PeerFailedError, TransportTimeoutError
from cptransport.ops import chunk_kda
from cptransport.testing import run_ranks


def steps(transport: Any, count: int = 2) -> None:
    """Train on two ranks; in step 0 the loss of rank 0, for whose backward nobody waits, is not of the op."""
    plan = build_plan([0, 40], world_size=transport.world_size)
    for step in range(count):
        torch.manual_seed(step)
        x = plan.shard(torch.randn(1, 40, 2, 16), transport.rank).requires_grad_()
        context = CPContext(plan, transport)
        o, _ = chunk_kda(
            x, x, x, -x.abs(), x[..., 0].sigmoid(), cp_context=context, use_qk_l2norm_in_kernel=True
        )
        forgotten = step == 0 and transport.rank == 0
        (x.sum() if forgotten else o.sum()).backward()


def test_threads_say_so_at_once() -> None:
    with pytest.raises(TransportError, match="left a forward or a backward out"):
        threads.run(steps, 2, timeout_s=20)


def over_gloo(transport: Any) -> str:
    """Train until an error, and say which."""
    try:
        steps(transport)
    except (TransportTimeoutError, PeerFailedError) as error:
        return type(error).__name__
    return "none"


def test_gloo_does_not_take_one_generation_for_another() -> None:
    found = run_ranks(over_gloo, backend="gloo", world_size=2, transport_timeout_s=3)
    assert "TransportTimeoutError" in found
    assert "none" not in found
