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
from cptransport.testing.pool import CaseError

pytestmark = pytest.mark.gpu

Runs = list[RankRun]

_references: dict[int, dict[str, Runs]] = {}


def runs(backend: str, ranks: int, name: str) -> tuple[Runs, Runs]:
    """Return what a call gave on the ranks of a backend, and over gloo on the same ranks."""
    together = tuple(
        other
        for other, spec in SPECS.items()
        if spec.engine == SPECS[name].engine and why_skip(backend, ranks, other) is None
    )
    own = _own(backend, ranks, together)[name]
    right = _references.setdefault(ranks, {})
    missing = tuple(other for other in together if other not in right)
    if name in missing:
        right.update(_run(backend, ranks, missing, "gloo"))
    return own, right[name]


@functools.cache
def _own(backend: str, ranks: int, names: tuple[str, ...]) -> dict[str, Runs]:
    """Run the calls on one transport; if that fails, each on its own, to see which."""
    try:
        return _run(backend, ranks, names, backend)
    except CaseError:
        return _Each(backend, ranks)


class _Each(dict[str, Runs]):
    """Runs a call when it is asked for."""

    def __init__(self, backend: str, ranks: int) -> None:
        super().__init__()
        self._where = backend, ranks

    def __missing__(self, name: str) -> Runs:
        backend, ranks = self._where
        self[name] = _run(backend, ranks, (name,), backend)[name]
        return self[name]


def _run(backend: str, ranks: int, names: tuple[str, ...], playing: str) -> dict[str, Runs]:
    specs = [SPECS[name].with_(world_size=ranks).to_json() for name in names]
    serving = rig.serving(backend, ranks, playing=playing)
    by_rank = serving.run(run_specs, timeout_s=rig.WATCHDOG_S + 8 * len(names), specs=specs)
    return {name: [rank[index] for rank in by_rank] for index, name in enumerate(names)}


def why_skip(backend: str, ranks: int, name: str) -> str | None:
    """Say why a call cannot be tried on a backend."""
    if SPECS[name].composition == "handoff" and not rig.capabilities(backend, ranks).pairwise:
        return "the transport lacks the capability pairwise"
    return why_not(name)


def skip_unless_served(backend: str, ranks: int, name: str) -> None:
    reason = why_skip(backend, ranks, name)
    if reason is not None:
        pytest.skip(reason)


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
