# SPDX-License-Identifier: Apache-2.0
"""A stream of more than 2^31 bytes; report 31. Needs about 10 GB."""

from __future__ import annotations

import pytest
import torch

from cptransport import build_plan, convert_layout, threads
from cptransport.testing import Ranks, run_ranks
from cptransport.transport import BoundaryTransport

ROWS, WIDTH = 1040, 1 << 21

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def there(transport: BoundaryTransport, method: str) -> list[bool]:
    """Rows of one value each, so that a wrong byte shows in the row's least or largest."""
    source = build_plan([0, ROWS], world_size=2, layout="zigzag")
    target = build_plan([0, ROWS], world_size=2)
    rows = source.for_rank(transport.rank).index % 251
    x = rows.to(torch.uint8)[None, :, None].expand(1, -1, WIDTH).contiguous()
    y = convert_layout(x, source, target, transport, method=method)
    expected = (target.for_rank(transport.rank).index % 251).to(torch.uint8)
    assert y.shape == (1, len(expected), WIDTH)
    return [torch.equal(y.amin(2)[0], expected), torch.equal(y.amax(2)[0], expected)]


def there_in_processes(ranks: Ranks, method: str) -> list[bool]:
    return there(ranks.create(), method)


@pytest.mark.parametrize("method", ["p2p", "a2a"])
def test_31_between_threads(method: str) -> None:
    assert ROWS * WIDTH > 2**31
    results = threads.run(lambda transport: there(transport, method), 2, 300.0)
    assert results == [[True, True]] * 2


@pytest.mark.backend("gloo")
@pytest.mark.parametrize("method", ["p2p", "a2a"])
def test_31_between_processes(method: str) -> None:
    results = run_ranks(
        there_in_processes,
        backend="gloo",
        world_size=2,
        transport=False,
        timeout_s=400.0,
        transport_timeout_s=300.0,
        method=method,
    )
    assert results == [[True, True]] * 2
