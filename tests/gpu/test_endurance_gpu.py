# SPDX-License-Identifier: Apache-2.0
"""Thousands of exchanges: random delays and nothing stale, many rounds and no growth."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import rig
import torch

from cptransport.testing import Ranks
from cptransport.testing.contract_lifetime import _rounds
from cptransport.testing.soak import _episode

pytestmark = pytest.mark.gpu

#: Exchanges that are wanted, and the seconds after which no further episode begins.
EXCHANGES, LIMIT_S = (200, 20.0) if rig.REHEARSAL else (20_000, 360.0)
#: Fewer than this in that time would show nothing.
FEWEST = EXCHANGES // 10
EPISODE = 100 if rig.REHEARSAL else 1000
ROUNDS = 200 if rig.REHEARSAL else 10_000


@pytest.mark.parametrize("ranks", rig.RANKS)
@pytest.mark.parametrize("backend", rig.BACKENDS)
def test_random_delays_leave_nothing_stale(backend: str, ranks: int) -> None:
    """Random slots, routes, orders and pauses; every payload is compared byte for byte.

    What is stale, lost or torn fails; a document is written only when all that it counts was right.
    """
    serving = rig.serving(backend, ranks)
    totals: Counter[str] = Counter()
    start, episode = time.monotonic(), 0
    while totals["generations"] < EXCHANGES and time.monotonic() - start < LIMIT_S:
        found = serving.run(
            _episode,
            transport=False,
            timeout_s=120,
            seed=1 + 10 * EPISODE * episode,
            rounds=EPISODE,
            victim=-1,
            long_pauses=0.001,  # else ranks do little but wait for one that sleeps
        )
        totals["payloads"] += sum(int(rank.get("payloads", 0)) for rank in found)
        totals["bytes"] += sum(int(rank.get("bytes", 0)) for rank in found)
        totals["generations"] += int(found[0]["generations"])
        episode += 1
    assert totals["generations"] >= FEWEST, totals
    rig.report(
        f"delays-{backend}-{ranks}",
        ranks,
        backend=backend,
        world_size=ranks,
        seconds=round(time.monotonic() - start, 1),
        wanted=EXCHANGES,
        **totals,
    )


def _no_growth(ranks: Ranks, rounds: int) -> tuple[int, int]:
    """Return what torch holds on the device before and after; the rest is asserted inside."""
    on_cuda = ranks.device.type == "cuda"
    before = torch.cuda.memory_reserved() if on_cuda else 0
    _rounds(ranks, rounds)
    return before, torch.cuda.memory_reserved() if on_cuda else 0


@pytest.mark.parametrize("ranks", rig.RANKS)
@pytest.mark.parametrize("backend", rig.BACKENDS)
def test_many_rounds_without_growth(backend: str, ranks: int) -> None:
    """File descriptors, threads, host and device memory."""
    serving = rig.serving(backend, ranks)
    found = serving.run(_no_growth, transport=False, timeout_s=150, rounds=ROUNDS)
    for before, after in found:
        assert after - before <= 64 << 20, (before, after)
