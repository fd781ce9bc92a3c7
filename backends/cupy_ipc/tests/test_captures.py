# SPDX-License-Identifier: Apache-2.0
"""When the generations of a graph may be overwritten: recorded verbs, replayed at random speeds, over stand-ins.

A capture does nothing but note what the kernels are given, as a graph does; replays do it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cptransport.testing import Ranks, pool
from cptransport.transport import PartSpec, Slot

_ELEMENTS = 64
_ROUTES = {
    "chain": frozenset({(0, 1), (1, 2)}),
    "back": frozenset({(1, 0), (2, 1)}),
    "all": frozenset((s, d) for s in range(3) for d in range(3) if s != d),
    "one": frozenset({(0, 2)}),
    "none": None,  # rank 0 publishes to 1
}
_TO_ONE = frozenset({(0, 1)})


class _Graph:
    """What captured verbs would do."""

    def __init__(self) -> None:
        self.nodes: list[Callable[[], object]] = []

    def replay(self, pause: Callable[[], None]) -> None:
        for node in self.nodes:
            pause()
            node()


class _Noting:
    """The kernels; in a capture they are noted."""

    def __init__(self, signals: Any) -> None:
        self._signals = signals
        self.graph: _Graph | None = None
        self.captures = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._signals, name)
        if name not in ("stage", "publish", "barrier", "locate"):
            return found

        def call(*args: Any, **kwargs: Any) -> None:
            if self.graph is None:
                found(*args, **kwargs)
            else:
                self.graph.nodes.append(lambda: found(*args, **kwargs))

        return call


def _replays(
    ranks: Ranks, routes: str, barrier: bool, uses: list[int], rounds: int, unpublished: int = -1
) -> int:
    """Capture graphs of so many uses; replay them in a random order, alike on all ranks, with eager uses between.

    The use of that index, if any, is staged and not published.
    """
    from host_cuda import bytes_at

    import cptransport.onesided as onesided

    transport: Any = ranks.create()
    transport._by_barrier = barrier
    transport._signals = noting = _Noting(transport._signals)
    cuda: Any = onesided.torch.cuda
    cuda.is_current_stream_capturing = lambda: noting.graph is not None
    before = onesided.capture_id
    onesided.capture_id = lambda device: noting.captures if noting.graph else 0
    part = PartSpec("x", (_ELEMENTS,), torch.int64, _ROUTES[routes])
    slot = Slot("s", (part,))
    ways = _ROUTES[routes] or _TO_ONE
    sources = sorted({s for s, d in ways if d == ranks.rank})
    to = None if _ROUTES[routes] else sorted({d for s, d in ways if s == ranks.rank})
    asked = None if _ROUTES[routes] else {"x": sources}
    turn = [0]
    checked = [0]

    def use(index: int, then: Callable[[Callable[[], object]], object]) -> None:
        staged = transport.stage(slot)["x"]
        then(lambda: staged.fill_(1000 * turn[0] + 100 * ranks.rank + index))
        if index == unpublished:
            return
        transport.publish(slot, to=to)
        if not sources:
            return
        table = transport.gather(slot, parts=asked).addresses["x"]

        def read() -> None:
            for source in sources:
                address = int(table[source])
                found = bytes_at(address, 8 * _ELEMENTS, transport.device).view(torch.int64)
                wanted = 1000 * turn[0] + 100 * source + index
                assert found.eq(wanted).all(), (ranks.rank, source, index, turn[0], found[:2])
                checked[0] += 1

        then(read)

    pace = random.Random(ranks.rank)
    ours = random.Random(7)

    def pause() -> None:
        if pace.random() < 0.3:
            time.sleep(pace.uniform(0, 0.004))

    def now(work: Callable[[], object]) -> None:
        pause()
        work()

    try:
        for index in range(2):
            use(index, now)
        graphs = []
        for count in uses:
            noting.graph = _Graph()
            noting.captures += 1
            for index in range(count):
                use(index, noting.graph.nodes.append)
            graphs.append(noting.graph)
            noting.graph = None
            for index in range(ours.randrange(3)):
                use(index, now)
        for turn[0] in range(1, rounds + 1):
            choice = ours.randrange(len(graphs) + 1)
            if choice < len(graphs):
                graphs[choice].replay(pause)
            else:
                use(0, now)
    finally:
        del cuda.is_current_stream_capturing
        onesided.capture_id = before
    ranks.sync()
    return checked[0]


def _checked(device_memory: str, **case: Any) -> list[int]:
    """Return by rank how many payloads were found right."""
    ranks = pool("fake_cupy:BACKEND", 3, 1, device="cpu", env={"FAKE_CUPY_FOLDER": device_memory})
    return ranks.run(
        _replays, transport=False, timeout_s=60, transport_timeout_s=15, rounds=40, **case
    )


@pytest.mark.parametrize("uses", [[1], [2], [3], [5], [4, 1, 3]])
@pytest.mark.parametrize("barrier", [False, True])
@pytest.mark.parametrize("routes", _ROUTES)
def test_nothing_is_overwritten_before_it_was_read(
    device_memory: str, routes: str, barrier: bool, uses: list[int]
) -> None:
    found = _checked(device_memory, routes=routes, barrier=barrier, uses=uses)
    receiving = {d for _, d in _ROUTES[routes] or _TO_ONE}
    assert {rank for rank, checked in enumerate(found) if checked > 20} == receiving


@pytest.mark.parametrize("uses", [[3], [5], [4, 2]])
@pytest.mark.parametrize("barrier", [False, True])
def test_a_use_that_is_not_published_lets_nobody_past(
    device_memory: str, barrier: bool, uses: list[int]
) -> None:
    found = _checked(device_memory, routes="all", barrier=barrier, uses=uses, unpublished=1)
    assert min(found) > 20
