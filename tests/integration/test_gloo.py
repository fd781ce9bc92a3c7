# SPDX-License-Identifier: Apache-2.0
"""Ops on processes over gloo: the same bits as on threads, subgroups, and ranks that fail.

One pool of four processes serves the file; a process that is in no group of a case waits.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import cptransport
from cptransport import CPContext, OpInputError, PeerFailedError, TransportTimeoutError, ops
from cptransport.testing import Ranks, relative_error, run_ranks
from cptransport.testing.op_cases import INITIAL, OPS, OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import RankCall, RankRun, run_rank, run_specs, run_threads

RANKS = 4
GROUPINGS = [[[0, 2], [1, 3]], [[0, 1], [2, 3]], [[1, 2, 3], [0]]]

pytestmark = pytest.mark.backend("gloo")


def on_gloo(case: Any, **kwargs: Any) -> list[Any]:
    return run_ranks(case, backend="gloo", world_size=RANKS, timeout_s=120.0, **kwargs)


def spec_of(op: str, offsets: Sequence[int], world_size: int, **more: Any) -> OpSpec:
    options = {"chunk_size": 16} if op in ("ssd", "mixer") else {}
    return OpSpec(op, offsets, world_size, options=options, optional=(INITIAL[op],), **more)


def in_json(specs: Sequence[OpSpec]) -> list[dict[str, Any]]:
    return [spec.to_json() for spec in specs]


# ------------------------------------------------------------------------------- the same bits


def test_threads_and_gloo_give_the_same_bits() -> None:
    specs = [
        random_spec(random.Random(f"bits/{op}/{seed}"), op, world_size=RANKS, dtype=dtype)
        for op in OPS
        for seed in range(4)
        for dtype in ("float32", "bfloat16")
    ]
    by_rank = on_gloo(run_specs, specs=in_json(specs))
    for i, spec in enumerate(specs):
        case = OpCase.of(spec)
        processes, threads = [runs[i] for runs in by_rank], run_threads(case)
        for one, other in zip(processes, threads, strict=True):
            assert one.received == other.received, spec
            assert torch.equal(one.output, other.output), spec
            assert torch.equal(one.final, other.final), spec
            assert one.grads.keys() == other.grads.keys()
            for name, grad in one.grads.items():
                assert torch.equal(grad, other.grads[name]), (name, spec)
        if spec.dtype == "float32":
            check(case, processes)


# -------------------------------------------------------------------------------------- groups


def group_rank(groups: Sequence[Sequence[int]], rank: int) -> tuple[int, int]:
    """Return which group a rank is in, and its rank there."""
    return next((i, group.index(rank)) for i, group in enumerate(groups) if rank in group)


def in_groups(ranks: Ranks, specs: Mapping[str, Any], groupings: Any) -> list[list[RankRun]]:
    """Run every op in this rank's group of every grouping; all transports live at once."""
    transports = [ranks.create(ranks.subgroup(*groups)) for groups in groupings]
    done = []
    for groups, transport in zip(groupings, transports, strict=True):
        index, mine = group_rank(groups, ranks.rank)
        assert (transport.rank, transport.world_size) == (mine, len(groups[index]))
        done.append(run_specs(transport, specs[f"{len(groups[index])}/{index}"]))
    return done


def test_49_groups_that_are_not_the_first_ranks() -> None:
    """Report 49: strided, offset and uneven groups among four processes; each sees its own data."""
    calls = {
        f"{size}/{index}": [
            spec_of(op, [0, 5, 24], size, layout="zigzag", seed=10 * index + size) for op in OPS
        ]
        for size in (1, 2, 3)
        for index in (0, 1)
    }
    results = on_gloo(
        in_groups,
        transport=False,
        specs={key: in_json(specs) for key, specs in calls.items()},
        groupings=GROUPINGS,
    )
    compared = 0
    for i, groups in enumerate(GROUPINGS):
        for index, group in enumerate(groups):
            for j, spec in enumerate(calls[f"{len(group)}/{index}"]):
                compared += len(check(OpCase.of(spec), [results[rank][i][j] for rank in group]))
    assert compared > 200


def changing_groups(ranks: Ranks, specs: Mapping[str, Any]) -> dict[str, RankRun]:
    """Micro-batches whose group sizes differ, several in flight at once."""
    four = ranks.create()
    two = ranks.create(ranks.subgroup([0, 2], [1, 3]))
    transports = {"a": two, "b": four, "c": two, "d": four}
    calls = {
        name: RankCall(transport, OpCase.of(OpSpec(**specs[name])))
        for name, transport in transports.items()
    }
    done = {}
    for step in ["Fa", "Fb", "Ba", "Fc", "Bb", "Fd", "Bd", "Bc"]:
        name = step[1]
        if step[0] == "F":
            calls[name].forward()
        else:
            done[name] = calls[name].backward()
    return done


def test_group_sizes_that_change_between_micro_batches() -> None:
    specs = {
        name: spec_of(op, [0, 9, 30], size, seed=ord(name))
        for name, op, size in (("a", "kda", 2), ("b", "kda", 4), ("c", "mixer", 2), ("d", "ssd", 4))
    }
    given = {name: spec.to_json() for name, spec in specs.items()}
    results = on_gloo(changing_groups, transport=False, specs=given)
    for name, spec in specs.items():
        groups = [[0, 2], [1, 3]] if spec.world_size == 2 else [list(range(4))]
        for group in groups:
            check(OpCase.of(spec), [results[rank][name] for rank in group])


def with_tensor_parallelism(ranks: Ranks, spec: Mapping[str, Any], tp: int) -> RankRun:
    """Context parallel over two ranks, heads over ``tp``; the op is told its own group only."""
    groups = [[0, 2], [1, 3]] if tp == 2 else [[0, 1], [2, 3]]
    transport = ranks.create(ranks.subgroup(*groups))
    whole = OpCase.of(OpSpec(**spec))
    share = group_rank(groups, ranks.rank)[0] if tp == 2 else 0
    size = whole.spec.value_heads // tp
    mine = slice(share * size, (share + 1) * size)
    narrowed = OpCase(
        whole.spec.with_(heads=size, value_heads=size),
        whole.plan,
        {name: x[:, :, mine] for name, x in whole.tokens.items()},
        {},
        None,
        whole.grad_output[:, :, mine],
        whole.grad_final[:, mine],
    )
    return run_rank(transport, narrowed)


def test_30_the_answer_does_not_depend_on_another_axis_of_parallelism() -> None:
    """Report 30: CP = 2 with TP = 1 and TP = 2, the same tokens and heads."""
    spec = OpSpec("kda", [0, 9, 30], 2, heads=4, value_heads=4)
    alone = on_gloo(with_tensor_parallelism, transport=False, spec=spec.to_json(), tp=1)
    split = on_gloo(with_tensor_parallelism, transport=False, spec=spec.to_json(), tp=2)
    check(OpCase.of(spec), alone[:2])
    check(OpCase.of(spec), alone[2:])
    for rank in range(2):
        whole, halves = alone[rank], (split[2 * rank], split[2 * rank + 1])
        joined = torch.cat([half.output for half in halves], 2)
        assert relative_error(joined, whole.output) < 1e-6
        for name in ("q", "k", "v", "g", "beta"):
            joined = torch.cat([half.grads[name] for half in halves], 2)
            assert relative_error(joined, whole.grads[name]) < 1e-5


# ----------------------------------------------------------------------------------- micro-batches


def in_flight(transport: Any, specs: Sequence[Mapping[str, Any]]) -> list[RankRun]:
    cases = [OpCase.of(OpSpec(**spec)) for spec in specs]
    one, two = (RankCall(transport, case).forward() for case in cases[:2])
    runs = [one.backward(), two.backward()]
    one, two = (RankCall(transport, case).forward() for case in cases[2:4])
    late = two.backward()
    runs += [one.backward(), late]
    for case, use_reentrant in zip(cases[4:], (False, True), strict=True):
        runs.append(RankCall(transport, case).checkpointed(use_reentrant).backward())
    return runs


@pytest.mark.parametrize("op", ["kda", "mixer"])
def test_orders_checkpoints_and_ranks_without_a_loss(op: str) -> None:
    """F1 F2 B1 B2, F1 F2 B2 B1, both checkpointing modes; rank 1 has no tokens, 2 the only loss."""
    specs = [
        spec_of(op, [0, 6, 23, 31], RANKS, boundaries=[0, 9, 9, 14, 31], seed=seed)
        for seed in range(6)
    ]
    specs[1], specs[4] = (spec.with_(loss_ranks=(2,)) for spec in (specs[1], specs[4]))
    results = on_gloo(in_flight, specs=in_json(specs))
    for i, spec in enumerate(specs):
        check(OpCase.of(spec), [runs[i] for runs in results], exact_bytes=i < 4)


# ------------------------------------------------------------------------------------------ errors


def wrong_call(ranks: Ranks, spec: Mapping[str, Any], fault: str, checked: bool) -> tuple[str, ...]:
    """Rank 1 calls KDA wrongly; return what this rank raised, how long it took, what came after."""
    os.environ["CULA_CP_CHECK"] = str(int(checked))
    try:
        case = OpCase.of(OpSpec(**spec))
        transport = ranks.create(timeout_s=20.0)
        local = {name: case.plan.shard(x, ranks.rank) for name, x in case.tokens.items()}
        if ranks.rank == 1:
            local["q"] = {
                "dtype": local["q"].long(),
                "length": local["q"][:, 1:],
                "tokens": local["q"][:, :0],
            }[fault]
        start = time.monotonic()
        kind = text = ""
        try:
            ops.chunk_kda(**local, cp_context=CPContext(case.plan, transport))
        except cptransport.CPTransportError as error:
            kind, text = type(error).__name__, str(error)
        seconds = time.monotonic() - start
        after = "usable"
        if checked:
            run_rank(transport, case)
        else:
            ranks.sync()
            try:
                run_rank(transport, case)
            except cptransport.TransportError as error:
                after = type(error).__name__
        return kind, text, str(seconds), after
    finally:
        os.environ.pop("CULA_CP_CHECK")


@pytest.mark.parametrize("fault", ["dtype", "length", "tokens"])
def test_52_with_the_check_all_processes_raise_the_same(fault: str) -> None:
    spec = spec_of("kda", [0, 30], RANKS).with_(optional=())
    results = on_gloo(wrong_call, transport=False, spec=spec.to_json(), fault=fault, checked=True)
    assert {kind for kind, *_ in results} == {OpInputError.__name__}
    (text,) = {text for _, text, *_ in results}
    assert text.startswith("rank 1: q")
    assert max(float(seconds) for *_, seconds, _ in results) < 10
    assert {after for *_, after in results} == {"usable"}


@pytest.mark.parametrize("fault", ["dtype", "length", "tokens"])
def test_52_without_the_check_peers_hear_of_it(fault: str) -> None:
    spec = spec_of("kda", [0, 30], RANKS).with_(optional=())
    results = on_gloo(wrong_call, transport=False, spec=spec.to_json(), fault=fault, checked=False)
    kind, own, *_ = results[1]
    assert kind == OpInputError.__name__
    for rank in (2, 3):  # they need what rank 1 did not send
        kind, text, seconds, after = results[rank]
        assert kind == PeerFailedError.__name__
        assert own in text
        assert float(seconds) < 10
        assert after == "TransportClosedError"
    assert "usable" not in {after for *_, after in results}


def without_a_backward(ranks: Ranks, spec: Mapping[str, Any]) -> str:
    case = OpCase.of(OpSpec(**spec))
    transport = ranks.create(timeout_s=1.5)
    call = RankCall(transport, case).forward()
    if ranks.rank == 3:
        ranks.ask("done")  # stays, and takes no part
        return "no backward"
    try:
        call.backward()
    except (TransportTimeoutError, PeerFailedError) as error:
        return str(error)
    finally:
        ranks.tell(f"left {ranks.rank}", "")
        if ranks.rank == 0:
            for other in (1, 2):
                ranks.ask(f"left {other}")
            ranks.tell("done", "")
    return "done"


def test_a_rank_that_ignores_the_op_is_named() -> None:
    spec = spec_of("kda", [0, 30], RANKS)
    results = on_gloo(without_a_backward, transport=False, spec=spec.to_json())
    assert results[3] == "no backward"
    # Whose wait ends first is a matter of milliseconds; the others hear of that one.
    assert all("waited" in text for text in results[:3]), results
    assert any("rank 3" in text or "3]" in text for text in results[:3]), results


# ------------------------------------------------------------------------------------- contexts


def contexts(ranks: Ranks) -> dict[str, Any]:
    """``build_cp_context`` on subgroups, as a user writes it."""
    group = ranks.subgroup([0, 2], [1, 3])
    torch.manual_seed(0)
    q = torch.randn(1, 20, 3, 8)
    v = torch.randn(1, 20, 3, 12)
    found: dict[str, Any] = {}
    for layout in ("contiguous", "zigzag"):
        context = cptransport.build_cp_context([0, 7, 20], group, layout=layout)
        local = [context.plan.shard(x, context.rank) for x in (q, q / 3, v, -q.abs(), v[..., 0])]
        with torch.no_grad():
            o, _ = ops.chunk_kda(*local[:4], local[4].sigmoid(), cp_context=context)
        record = cptransport.last_run()
        assert record is not None
        found[layout] = (o, context.transport.selection.chosen, record.transport)
        context.transport.close()
    with pytest.raises(cptransport.PlanError):
        cptransport.build_cp_context([0, 7, 5], group)
    transport, plan = ranks.create(group), cptransport.build_plan([0, 7], world_size=3)
    with pytest.raises(cptransport.PlanError, match="the plan is for 3 ranks"):
        CPContext(plan, transport)
    assert dist.get_world_size() == RANKS
    return found


def test_build_cp_context_on_subgroups() -> None:
    results = on_gloo(contexts, transport=False)
    outputs: list[Tensor] = []
    for layout in ("contiguous", "zigzag"):
        plan = cptransport.build_plan([0, 7, 20], world_size=2, layout=layout)
        for group in ([0, 2], [1, 3]):
            outputs.append(plan.unshard([results[rank][layout][0] for rank in group]))
            assert {results[rank][layout][1:] for rank in group} == {("gloo", "gloo")}
    assert torch.equal(outputs[0], outputs[1])
    assert relative_error(outputs[2], outputs[0]) < 1e-5
