# SPDX-License-Identifier: Apache-2.0
"""The mixer in one load-balancing mode against the token-by-token recurrence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from cptransport import build_plan, env
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import judge, planned_bytes
from cptransport.testing.op_rank import RankRun, run_threads

Compare = Callable[[str, OpCase, Sequence[RankRun]], int]
Right = Callable[[str, OpSpec], list[RankRun]]


def slot_bytes(mode: str, case: OpCase, direction: str, composition: str) -> dict[str, list[int]]:
    """What goes through slots: all that the plan moves which the mode computes on."""
    plan = case.plan
    if mode == "all_to_all" and plan.world_size > 1:
        return {}
    if mode.startswith("permute") and plan.layout != "contiguous":
        straight = build_plan(
            plan.cu_seqlens, world_size=plan.world_size, padded_cu_seqlens=plan.padded_cu_seqlens
        )
        case = replace(case, plan=straight)
    return planned_bytes(case, direction, composition)


@pytest.fixture
def compare() -> Compare:
    """Return a function that compares what all ranks brought, bytes included; how much it compared."""

    def check(mode: str, case: OpCase, runs: Sequence[RankRun]) -> int:
        judged = [each for each in judge(case, runs) if each.measure != "bytes"]
        wrong = [str(each) for each in judged if not each.ok]
        record = runs[0].record
        assert record is not None
        for direction in ("forward", "backward"):
            planned = slot_bytes(mode, case, direction, record.composition)
            for rank, run in enumerate(runs):
                expected = {part: counts[rank] for part, counts in planned.items() if counts[rank]}
                if (found := dict(run.received[direction])) != expected:
                    wrong.append(f"rank {rank}, {direction}: {found} bytes, planned {expected}")
        assert not wrong, "\n".join([mode, *wrong, repr(case.spec)])
        return len(judged)

    return check


@pytest.fixture
def right(monkeypatch: pytest.MonkeyPatch, compare: Compare) -> Right:
    """Return a function that runs a call on threads in a mode and compares everything."""

    def run(mode: str, spec: OpSpec) -> list[RankRun]:
        monkeypatch.setenv(env.MAMBA_LOAD_BALANCING.name, mode)
        case = OpCase.of(spec)
        runs = run_threads(case)
        compare(mode, case, runs)
        return runs

    return run
