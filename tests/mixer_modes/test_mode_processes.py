# SPDX-License-Identifier: Apache-2.0
"""The modes between processes: the same bits as on threads, and groups that are not the first ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from cptransport.testing import Ranks, run_ranks
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import RankCall, RankRun, run_specs

RANKS = 4
MODES = ("permute_p2p", "permute_a2a", "all_to_all")
GROUPINGS = [[[0, 2], [1, 3]], [[0, 1], [2, 3]]]

pytestmark = pytest.mark.backend("gloo")


def in_modes(ranks: Ranks, specs: Mapping[str, Any]) -> dict[str, list[RankRun]]:
    """Run the specs of every mode on one transport."""
    transport = ranks.create()
    try:
        runs = {}
        for mode, given in specs.items():
            os.environ["CULA_CP_MAMBA_LOAD_BALANCING"] = mode
            ranks.sync()  # threads share the environment
            runs[mode] = run_specs(transport, given)
            ranks.sync()
        return runs
    finally:
        os.environ.pop("CULA_CP_MAMBA_LOAD_BALANCING", None)


def test_threads_and_processes_give_the_same_bits(compare: Any) -> None:
    specs = {
        mode: [
            random_spec(
                random.Random(f"{mode}/{i}"),
                "mixer",
                world_size=RANKS,
                heads=(1, 2, 8, 4)[i],
                value_heads=8,
                dtype=("float32", "float64", "bfloat16", "float32")[i],
            )
            for i in range(4)
        ]
        for mode in MODES
    }
    given = {mode: [spec.to_json() for spec in each] for mode, each in specs.items()}
    by_backend = {
        backend: run_ranks(
            in_modes,
            backend=backend,
            world_size=RANKS,
            transport=False,
            timeout_s=120.0,
            specs=given,
        )
        for backend in ("gloo", "threads")
    }
    for mode, each in specs.items():
        for i, spec in enumerate(each):
            processes, threads = (
                [run[mode][i] for run in by_backend[backend]] for backend in ("gloo", "threads")
            )
            compare(mode, OpCase.of(spec), processes)
            for one, other in zip(processes, threads, strict=True):
                assert one.received == other.received
                assert torch.equal(one.output, other.output), spec
                assert torch.equal(one.final, other.final), spec
                assert one.grads.keys() == other.grads.keys()
                for name, grad in one.grads.items():
                    assert torch.equal(grad, other.grads[name]), (name, spec)


def in_groups(
    ranks: Ranks, specs: Mapping[str, Any], groupings: Sequence[Any]
) -> list[list[RankRun]]:
    """Run every mode in this rank's group of every grouping; all transports live at once."""
    transports = [ranks.create(ranks.subgroup(*groups)) for groups in groupings]
    runs = []
    for groups, transport in zip(groupings, transports, strict=True):
        index = next(i for i, group in enumerate(groups) if ranks.rank in group)
        for mode in MODES:
            os.environ["CULA_CP_MAMBA_LOAD_BALANCING"] = mode
            runs.append(run_specs(transport, [specs[f"{mode}/{index}"]]))
    os.environ.pop("CULA_CP_MAMBA_LOAD_BALANCING")
    return runs


def test_30_49_context_parallel_groups_beside_tensor_parallel_ones(compare: Any) -> None:
    """Reports 30 and 49: each group moves its own activations, whatever the other dimension's size."""
    calls = {
        f"{mode}/{index}": OpSpec(
            "mixer",
            [0, 5, 30],
            2,
            layout="zigzag_per_sequence",
            value_heads=4,
            heads=1,
            options={"chunk_size": 16},
            optional=("initial_states",),
            seed=index,
        )
        for mode in MODES
        for index in (0, 1)
    }
    results = run_ranks(
        in_groups,
        backend="gloo",
        world_size=RANKS,
        transport=False,
        timeout_s=120.0,
        specs={name: spec.to_json() for name, spec in calls.items()},
        groupings=GROUPINGS,
    )
    for i, groups in enumerate(GROUPINGS):
        for j, mode in enumerate(MODES):
            for index, group in enumerate(groups):
                runs = [results[rank][3 * i + j][0] for rank in group]
                compare(mode, OpCase.of(calls[f"{mode}/{index}"]), runs)


def changing_groups(ranks: Ranks, specs: Mapping[str, Any], mode: str) -> dict[str, RankRun]:
    """Micro-batches of two and of four ranks in flight at once."""
    four, two = ranks.create(), ranks.create(ranks.subgroup([0, 2], [1, 3]))
    os.environ["CULA_CP_MAMBA_LOAD_BALANCING"] = mode
    calls = {
        name: RankCall(transport, OpCase.of(OpSpec(**specs[name])))
        for name, transport in {"a": two, "b": four, "c": two}.items()
    }
    done = {}
    for step in ["Fa", "Fb", "Fc", "Bb", "Ba", "Bc"]:
        if step[0] == "F":
            calls[step[1]].forward()
        else:
            done[step[1]] = calls[step[1]].backward()
    os.environ.pop("CULA_CP_MAMBA_LOAD_BALANCING")
    return done


@pytest.mark.parametrize("mode", MODES)
def test_group_sizes_that_change_between_micro_batches(mode: str, compare: Any) -> None:
    specs = {
        name: OpSpec(
            "mixer",
            [0, 9, 30],
            size,
            layout="zigzag",
            value_heads=8,
            heads=2,
            options={"chunk_size": 16},
            optional=("initial_states",),
            seed=size,
        )
        for name, size in {"a": 2, "b": 4, "c": 2}.items()
    }
    results = run_ranks(
        changing_groups,
        backend="gloo",
        world_size=RANKS,
        transport=False,
        timeout_s=120.0,
        specs={name: spec.to_json() for name, spec in specs.items()},
        mode=mode,
    )
    for name, spec in specs.items():
        groups = [[0, 2], [1, 3]] if spec.world_size == 2 else [list(range(RANKS))]
        for group in groups:
            compare(mode, OpCase.of(spec), [results[rank][name] for rank in group])
