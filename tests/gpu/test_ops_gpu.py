# SPDX-License-Identifier: Apache-2.0
"""The op oracle on GPU transports with 2 and 4 ranks, and bits that are those of every other transport."""

from __future__ import annotations

import functools

import pytest
import rig
import torch
from specs import SPECS, why_not

from cptransport.testing.op_cases import OpCase
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import RankRun, run_specs

pytestmark = pytest.mark.gpu

_references: dict[tuple[int, str], list[RankRun]] = {}


@functools.cache
def runs(backend: str, ranks: int, name: str) -> tuple[list[RankRun], list[RankRun]]:
    """Run a call on the ranks of a backend, and over gloo on the same ranks."""
    spec = SPECS[name].with_(world_size=ranks).to_json()

    def run(playing: str) -> list[RankRun]:
        serving = rig.serving(backend, ranks, playing=playing)
        results = serving.run(run_specs, timeout_s=2 * rig.WATCHDOG_S, specs=[spec])
        return [rank[0] for rank in results]

    own = run(backend)
    if (ranks, name) not in _references:
        _references[ranks, name] = run("gloo")
    return own, _references[ranks, name]


def skip_unless_served(backend: str, ranks: int, name: str) -> None:
    reason = why_not(name)
    if reason is not None:
        pytest.skip(reason)
    claimed = rig.capabilities(backend, ranks)
    if SPECS[name].composition == "handoff" and not claimed.pairwise:
        pytest.skip("the transport lacks the capability pairwise")


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ranks", rig.RANKS)
@pytest.mark.parametrize("backend", rig.BACKENDS)
class TestOps:
    def test_oracle(self, backend: str, ranks: int, name: str) -> None:
        """Outputs, states, every gradient and the counted bytes, against fp64 on the whole."""
        skip_unless_served(backend, ranks, name)
        own, _ = runs(backend, ranks, name)
        dense = getattr(rig.capabilities(backend, ranks), "dense", False)
        check(OpCase.of(SPECS[name].with_(world_size=ranks)), own, exact_bytes=not dense)

    def test_bits_are_those_of_gloo(self, backend: str, ranks: int, name: str) -> None:
        """A transport does not change one bit."""
        skip_unless_served(backend, ranks, name)
        engine = SPECS[name].engine
        for rank, (mine, other) in enumerate(zip(*runs(backend, ranks, name), strict=True)):
            assert mine.record is not None
            assert mine.record.transport == rig.named(backend)
            assert engine in (None, mine.record.engine)
            found = {"output": mine.output, "final": mine.final, **mine.grads}
            right = {"output": other.output, "final": other.final, **other.grads}
            different = [key for key in right if not torch.equal(found[key], right[key])]
            assert not different, f"rank {rank}: {different}"
