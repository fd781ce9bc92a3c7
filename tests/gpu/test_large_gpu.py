# SPDX-License-Identifier: Apache-2.0
"""Activations of more than 2^31 bytes between layouts: no offset wraps."""

from __future__ import annotations

import pytest
import rig
import torch

from cptransport import build_plan, convert_layout
from cptransport.plan import Plan
from cptransport.testing import Ranks

pytestmark = pytest.mark.gpu

#: int32 values of all tokens, a little above 2^31 bytes.
TOKENS, COLUMNS = (1000, 37) if rig.REHEARSAL else ((1 << 17) + 1000, 4096)


def _part(plan: Plan, rank: int, device: torch.device) -> torch.Tensor:
    """Return a rank's rows; every value says where it belongs."""
    rows = plan.for_rank(rank).index.to(device)
    columns = torch.arange(COLUMNS, device=device)
    return (rows[:, None] * COLUMNS + columns).to(torch.int32)[None]


def _convert(ranks: Ranks, method: str) -> int:
    """Convert there and back; return the bytes of all ranks' parts."""
    transport = ranks.create()
    size = ranks.world_size
    there = build_plan([0, TOKENS], world_size=size, layout="zigzag")
    here = build_plan([0, TOKENS], world_size=size)
    x = _part(there, ranks.rank, ranks.device)
    y = convert_layout(x, there, here, transport, method=method)
    assert torch.equal(y, _part(here, ranks.rank, ranks.device))
    back = convert_layout(y, here, there, transport, method=method)
    assert torch.equal(back, x)
    return TOKENS * COLUMNS * 4


@pytest.mark.parametrize("method", ["p2p", "a2a"])
def test_more_than_two_gib(method: str) -> None:
    """Both methods, over NCCL."""
    serving = rig.serving("nccl", 2)
    found = serving.run(
        _convert, transport=False, timeout_s=140, transport_timeout_s=100, method=method
    )
    assert rig.REHEARSAL or min(found) > 1 << 31
