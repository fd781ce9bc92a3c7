# SPDX-License-Identifier: Apache-2.0
"""What users of such systems have reported, packing and boundaries; the number is the report's.

Not repeated here: 2 and 27 (test_peers, test_inputs), 8 (test_random), 13, 14, 40 (test_autograd),
49 (integration). H = 3, K = 8, V = 12 and random gates per head, channel and token throughout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport import CPContext, PlanError, build_plan, ops, threads
from cptransport.composition import COMPOSITIONS
from cptransport.testing import assert_close, relative_error
from cptransport.testing.op_cases import INITIAL, OPS, OpCase, OpSpec
from cptransport.testing.op_oracle import check, judge
from cptransport.testing.op_rank import RankRun, run_threads

INSIDE = {"use_gate_in_kernel": True}
LAYOUTS = ("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence")


def spec_of(op: str, offsets: Sequence[int], world_size: int, **more: Any) -> OpSpec:
    options = {"chunk_size": 16} if op in ("ssd", "mixer") else {}
    options.update(more.pop("options", {}))
    more.setdefault("optional", (INITIAL[op],))
    return OpSpec(op, offsets, world_size, options=options, **more)


def right(spec: OpSpec) -> list[RankRun]:
    """Run on threads, compare everything, return what the ranks brought."""
    case = OpCase.of(spec)
    runs = run_threads(case)
    check(case, runs)
    return runs


def finals(runs: list[RankRun]) -> Tensor:
    return torch.stack([run.final for run in runs]).sum(0)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_01_gradients_of_every_rank(world_size: int) -> None:
    """Last rank exact, the others about 10 % wrong: gates read without the head's offset."""
    for offsets in ([0, 64 * world_size], [0, 40, 64 * world_size]):
        optional = ("A_log", "dt_bias", "initial_state")
        right(spec_of("kda", offsets, world_size, options=INSIDE, optional=optional))


@pytest.mark.parametrize("op", OPS)
def test_02_both_meanings_of_contiguous(op: str) -> None:
    """The same shapes per rank, other tokens: flat, and per document."""
    plans = {
        name: build_plan([0, 8, 24], world_size=2, layout=name)
        for name in ("contiguous", "contiguous_per_sequence")
    }
    flat, inside = (plan.for_rank(0).index.tolist() for plan in plans.values())
    assert flat == list(range(12))
    assert inside == [*range(4), *range(8, 16)]
    for layout in plans:
        right(spec_of(op, [0, 8, 24], 2, layout=layout))


@pytest.mark.parametrize("op", OPS)
def test_03_offsets_that_halves_do_not_divide(op: str) -> None:
    for layout in LAYOUTS:
        right(spec_of(op, [0, 5, 12], 2, layout=layout))


@pytest.mark.parametrize(("total", "lengths"), [(10, [4, 3, 3]), (2, [1, 1, 0])])
@pytest.mark.parametrize("op", OPS)
def test_04_lengths_that_ranks_do_not_divide(op: str, total: int, lengths: list[int]) -> None:
    runs = right(spec_of(op, [0, total], 3))
    assert [run.output.shape[1] for run in runs] == lengths


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_06_padding(op: str, layout: str) -> None:
    """Whatever padding rows hold, not a bit of the valid rows changes."""
    spec = spec_of(op, [0, 3, 8], 2, layout=layout, padded_cu_seqlens=[0, 4, 12])
    by_content = [right(spec.with_(padding=value)) for value in (0.0, 1e4, math.nan)]
    for other in by_content[1:]:
        for one, two in zip(by_content[0], other, strict=True):
            assert torch.equal(one.output, two.output)
            assert torch.equal(one.final, two.final)
            assert all(torch.equal(one.grads[name], two.grads[name]) for name in one.grads)


@pytest.mark.parametrize("op", ["kda", "mixer"])
@pytest.mark.parametrize("kind", ["list", "int32", "int64"])
def test_07_two_equal_documents(op: str, kind: str) -> None:
    """The second one begins in the middle of rank 1 and must equal the first."""
    offsets: Any = [0, 12, 24]
    if kind != "list":
        offsets = torch.tensor(offsets, dtype=getattr(torch, kind))
    plan = build_plan(offsets, world_size=2, boundaries=[0, 6, 24])
    case = OpCase.of(spec_of(op, [0, 12], 1, optional=()))
    twice = {name: torch.cat([x, x], 1) for name, x in case.tokens.items()}

    def body(transport: threads.ThreadTransport) -> Tensor:
        local = {name: plan.shard(x, transport.rank) for name, x in twice.items()}
        context = CPContext(plan, transport)
        if op == "kda":
            return ops.chunk_kda(**local, cp_context=context)[0]
        return ops.mamba_split_conv1d_scan_combined(
            **local,
            **case.parameters,
            conv1d_bias=None,
            chunk_size=16,
            headdim=12,
            ngroups=3,
            cp_context=context,
        )

    first, second = plan.unshard(threads.run(body, 2, 20.0)).split(12, 1)
    assert first.abs().max() > 0.1
    assert_close(second, first, dtype=torch.float32)


def test_07_half_given_metadata() -> None:
    for more in (
        {"padded_cu_seqlens": [0, 12]},
        {"padded_cu_seqlens": [0, 4, 6]},
        {"layout": "zigzag", "boundaries": [0, 4, 8]},
        {"layout": "custom"},
        {"layout": "custom", "boundaries": [(0, 0, 4), (1, 5, 8)]},
        {"boundaries": [0, 4]},
    ):
        with pytest.raises(PlanError):
            build_plan([0, 3, 8], world_size=2, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [1, 2, 3])
def test_09_shards_shorter_than_the_halo(length: int) -> None:
    """Kernel 4 on four ranks: the halo comes from two or three ranks back."""
    for layout in ("contiguous", "zigzag"):
        runs = right(spec_of("conv1d", [0, 4 * length], 4, layout=layout, width=4))
        assert all(run.grads["x"].isfinite().all() for run in runs)


@pytest.mark.parametrize("loss", [("output", "final"), ("final",)])
@pytest.mark.parametrize("length", [1, 2])
def test_10_loss_on_the_final_state_of_short_chunks(length: int, loss: tuple[str, ...]) -> None:
    for world_size in (1, 2, 3):
        spec = spec_of("conv1d", [0, length * world_size], world_size, width=4, loss=loss)
        runs = right(spec)
        if length * world_size < 3:  # part of the initial state survives in the final one
            total = sum(run.grads["initial_state"] for run in runs)
            assert isinstance(total, Tensor)
            assert total.abs().max() > 1e-2


def test_11_width_one() -> None:
    optional = ("residual", "bias", "initial_state")
    runs = right(spec_of("conv1d", [0, 7, 24], 2, width=1, optional=optional))
    assert all(not sum(moved.values()) for run in runs for moved in run.received.values())
    assert all(run.final.shape[-1] == 0 for run in runs)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_22_initial_states(op: str, world_size: int) -> None:
    """Its gradient lives on the first segment's owner, the final state on the last one's."""
    spec = spec_of(op, [0, 9, 24], world_size)
    plan, name = spec.plan(), INITIAL[op]
    runs = right(spec)
    for rank, run in enumerate(runs):
        for sequence in range(2):
            chain = plan.chain(sequence)
            first, last = plan.segments[chain[0]].rank, plan.segments[chain[-1]].rank
            assert bool(run.grads[name][sequence].count_nonzero()) == (rank == first)
            assert bool(run.final[sequence].count_nonzero()) == (rank == last)


@pytest.mark.parametrize("op", ["kda", "ssd", "mixer"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_24_nothing_comes_from_later_ranks(op: str, world_size: int) -> None:
    """A predecessor of index -1 is none: NaN on a later rank leaves earlier outputs clean."""
    spec = spec_of(op, [0, 8 * world_size], world_size, optional=())
    clean, case = run_threads(OpCase.of(spec)), OpCase.of(spec)
    for x in case.tokens.values():
        x[:, 8 * (world_size - 1) :] = torch.nan
    spoilt = run_threads(case)
    assert spoilt[-1].output.isnan().any()
    for rank in range(world_size - 1):
        assert torch.equal(spoilt[rank].output, clean[rank].output)


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_25_final_states_per_document(op: str) -> None:
    whole = spec_of(op, [0, 20, 84], 2)
    together = finals(right(whole))
    case = OpCase.of(whole)
    for sequence, (start, stop) in enumerate([(0, 20), (20, 84)]):
        single = OpCase.of(spec_of(op, [0, stop - start], 1, optional=()))
        for name, x in single.tokens.items():
            x.copy_(case.tokens[name][:, start:stop])
        for name, x in single.parameters.items():
            x.copy_(case.parameters[name])
        assert case.initial is not None
        single = replace(single, initial=case.initial[sequence : sequence + 1])
        (alone,) = run_threads(single)
        assert_close(together[sequence], alone.final[0], dtype=torch.float32)


def test_29_zigzag_of_lengths_that_do_not_divide() -> None:
    plan = build_plan([0, 16], world_size=2, layout="zigzag")
    rows = [plan.for_rank(rank).index.tolist() for rank in range(2)]
    assert rows == [[*range(4), *range(12, 16)], list(range(4, 12))]
    assert [segment.rank for segment in plan.segments] == [0, 1, 0]
    plan = build_plan([0, 18], world_size=2, layout="zigzag")
    assert [run[1:] for run in plan.for_rank(0).runs] == [(0, 5), (14, 18)]
    for op in OPS:
        for offsets in ([0, 16], [0, 18], [0, 7, 18]):
            for layout in ("zigzag", "zigzag_per_sequence"):
                for composition in COMPOSITIONS:
                    right(spec_of(op, offsets, 2, layout=layout, composition=composition))


@pytest.mark.parametrize("chunk_size", [16, 64, 256])
def test_32_chunks_that_do_not_divide_the_length(chunk_size: int) -> None:
    right(spec_of("ssd", [0, 400], 2, options={"chunk_size": chunk_size}, optional=("D",)))


@pytest.mark.parametrize("length", [63, 64, 65, 127, 129])
def test_35_packed_with_a_halo_from_the_left(length: int) -> None:
    offsets = [0, length // 3, length + 5, 2 * length]
    right(spec_of("mixer", offsets, 2))
    right(spec_of("kda", offsets, 2))


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("op", OPS)
def test_38_the_sum_over_ranks_is_the_unsharded_gradient(op: str, world_size: int) -> None:
    """No factor of the world size is hidden anywhere."""
    optional = {"kda": ("A_log", "dt_bias"), "ssd": ("D", "dt_bias"), "conv1d": ("bias",)}
    options = INSIDE if op == "kda" else {}
    spec = spec_of(op, [0, 11, 32], world_size, options=options, optional=optional.get(op, ()))
    runs, alone = right(spec), run_threads(OpCase.of(spec.with_(world_size=1)))[0]
    for name in OpCase.of(spec).parameters:
        total = torch.stack([run.grads[name] for run in runs]).sum(0)
        assert relative_error(total, alone.grads[name]) < 1e-5


def test_all_layouts_and_world_sizes_of_one_packed_stream() -> None:
    """Parity on one dense sequence proves nothing: odd packed lengths, everything, everywhere."""
    for op in OPS:
        for layout in LAYOUTS:
            for world_size in (1, 2, 3, 4, 5):
                case = OpCase.of(spec_of(op, [0, 3, 3, 14, 27, 28], world_size, layout=layout))
                wrong = [str(each) for each in judge(case, run_threads(case)) if not each.ok]
                assert not wrong, wrong
