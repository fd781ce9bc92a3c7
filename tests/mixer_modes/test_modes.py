# SPDX-License-Identifier: Apache-2.0
"""Every mode against the recurrence: outputs, states, every gradient on every rank, and every byte."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport import CPContext, Plan, build_plan, ops, threads
from cptransport.ops import heads
from cptransport.ops.heads import MixerSizes, head_shares
from cptransport.relayout import RowMove, received_rows
from cptransport.testing import relative_error
from cptransport.testing.op_cases import OpCase, OpSpec, owned_states
from cptransport.testing.op_random import random_spec
from cptransport.testing.op_rank import RankCall, RankRun

Right = Callable[[str, OpSpec], list[RankRun]]

MODES = ("permute_p2p", "permute_a2a", "all_to_all")
LAYOUTS = ("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence")
OPTIONAL = ("conv1d_bias", "initial_states")


def mixer(offsets: Any, world_size: int, **more: Any) -> OpSpec:
    options = {"chunk_size": 16, **more.pop("options", {})}
    more = {"optional": OPTIONAL, "heads": 2, "value_heads": 4 * world_size, **more}
    return OpSpec("mixer", offsets, world_size, options=options, **more)


def divisible(rng: random.Random, world_size: int) -> dict[str, int]:
    """Heads for ``all_to_all``; groups that ranks share, split or cut across."""
    nheads = world_size * rng.choice((1, 2, 3))
    nheads *= 3 if nheads < 3 else 1
    return {
        "value_heads": nheads,
        "heads": rng.choice([g for g in range(1, nheads + 1) if nheads % g == 0]),
    }


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("mode", MODES)
def test_random_calls(mode: str, dtype: str, right: Right) -> None:
    for seed in range(10):
        rng = random.Random(f"{mode}/{dtype}/{seed}")
        world_size = 1 + seed % 5
        sizes = divisible(rng, world_size) if mode == "all_to_all" else {}
        right(mode, random_spec(rng, "mixer", world_size=world_size, dtype=dtype, **sizes))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mode", MODES)
def test_lengths_that_divide_by_nothing(mode: str, layout: str, right: Right) -> None:
    """Odd packed lengths, empty documents, single tokens, fewer tokens than ranks."""
    for offsets in ([0, 5, 5, 6, 37, 63], [0, 1], [0, 2], [0, 18], [0, 0, 17]):
        for world_size in (2, 3):
            right(mode, mixer(offsets, world_size, layout=layout, dtype="float64"))


@pytest.mark.parametrize("mode", MODES)
def test_uneven_and_empty_ranks(mode: str, right: Right) -> None:
    pieces = [(2, 0, 4), (0, 4, 21), (2, 21, 23), (0, 23, 31)]  # nothing on rank 1
    right(mode, mixer([0, 6, 23, 31], 3, layout="custom", boundaries=pieces, dtype="float64"))
    right(mode, mixer([0, 6, 23, 31], 4, boundaries=[0, 9, 9, 14, 31], dtype="float64"))


@pytest.mark.parametrize("mode", MODES)
def test_padding_never_shows(mode: str, right: Right) -> None:
    """Report 6, through conversions: padding rows travel, whatever they hold."""
    for layout in LAYOUTS:
        spec = mixer([0, 3, 8], 2, layout=layout, padded_cu_seqlens=[0, 5, 13])
        first, second = (right(mode, spec.with_(padding=p)) for p in (float("nan"), 1e4))
        for one, other in zip(first, second, strict=True):
            assert torch.equal(one.output, other.output)
            for name in one.grads:
                assert torch.equal(one.grads[name], other.grads[name]), name


@pytest.mark.parametrize(
    ("ngroups", "nheads", "world_size"),
    [(4, 8, 2), (2, 8, 4), (1, 4, 4), (3, 6, 2), (2, 6, 3), (4, 12, 3), (6, 6, 3), (2, 30, 5)],
)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_groups_that_ranks_share(
    ngroups: int, nheads: int, world_size: int, dtype: str, right: Right
) -> None:
    """Fewer groups than ranks, more, and group borders in the middle of a rank's heads."""
    spec = mixer([0, 9, 40], world_size, layout="zigzag", dtype=dtype, alternate=True)
    right("all_to_all", spec.with_(heads=ngroups, value_heads=nheads))


@pytest.mark.parametrize("mode", MODES)
def test_dense_rows(mode: str, right: Right) -> None:
    right(mode, mixer([0, 29], 3, batch=3, layout="zigzag", dtype="float64"))


@pytest.mark.parametrize("mode", ["virtual", *MODES])
def test_loss_on_one_output_or_one_rank(mode: str, right: Right) -> None:
    """Report 40, and a loss on final states alone; the others join."""
    for loss in (("output",), ("final",)):
        right(mode, mixer([0, 11, 40], 3, layout="zigzag", loss=loss, dtype="float64"))
    for rank in range(3):
        right(mode, mixer([0, 11, 40], 3, layout="zigzag", loss_ranks=(rank,), dtype="float64"))


@pytest.mark.parametrize("composition", ["gather", "handoff"])
def test_composition_and_overlap_are_those_of_the_inner_plan(
    composition: str, right: Right
) -> None:
    for overlap in (False, True):
        spec = mixer([0, 11, 61], 4, layout="zigzag", composition=composition, overlap=overlap)
        for mode in ("permute_p2p", "permute_a2a"):
            right(mode, spec)


def test_how_tokens_travel_changes_no_bit(right: Right) -> None:
    """p2p and a2a alike; and a plan that is contiguous already is computed in place."""
    spec = mixer([0, 11, 45], 3, layout="zigzag_per_sequence")
    even = mixer([0, 11, 45], 3)
    pairs = [(spec, "permute_p2p", "permute_a2a"), (even, "permute_p2p", "none")]
    for each, one, other in pairs:
        for a, b in zip(right(one, each), right(other, each), strict=True):
            assert torch.equal(a.output, b.output)
            assert torch.equal(a.final, b.final)
            for name, grad in a.grads.items():
                assert torch.equal(grad, b.grads[name]), name


def test_every_mode_says_the_same(right: Right) -> None:
    """To 1e-9 in fp64, rank by rank, whatever moved."""
    spec = mixer([0, 11, 45], 3, layout="zigzag", value_heads=6, dtype="float64")
    expected = right("virtual", spec)
    for mode in MODES:
        for a, b in zip(right(mode, spec), expected, strict=True):
            assert relative_error(a.output, b.output) < 1e-9
            assert relative_error(a.final, b.final) < 1e-9
            for name in ("zxbcdt", "initial_states"):
                assert relative_error(a.grads[name], b.grads[name]) < 1e-9, (mode, name)


# ------------------------------------------------------------------------------------------ bytes


def expected_bytes(mode: str, case: OpCase) -> tuple[list[int], list[int]]:
    """Bytes of activations and states that every rank receives, forward and backward, by hand."""
    spec, plan = case.spec, case.plan
    sizes = MixerSizes(spec.value_heads, spec.value_dim, spec.heads, spec.key_dim)
    item, wide = case.tokens["zxbcdt"].itemsize, spec.state_dtype.itemsize
    columns = case.tokens["zxbcdt"].shape[-1]
    ranks = range(plan.world_size)
    tokens = [plan.for_rank(r).num_tokens * spec.batch for r in ranks]
    head = wide * sizes.headdim * sizes.dstate
    first, last = (
        [len(owned_states(plan, r, spec.batch, first=end)) for r in ranks] for end in (True, False)
    )
    forward, backward = [], []
    if mode == "all_to_all":
        shares = head_shares(sizes, plan.world_size)
        mine = [sum(p.stop - p.start for p in share.columns) for share in shares]
        each = sizes.nheads // plan.world_size
        for r in ranks:
            others = sum(tokens) - tokens[r]
            states = sum(last) - last[r]
            out = (sizes.inner - each * sizes.headdim) * tokens[r] * item
            forward.append(others * mine[r] * item + out + last[r] * (sizes.nheads - each) * head)
            back = (sum(mine) - mine[r]) * tokens[r] * item
            back += others * each * sizes.headdim * item
            back += states * each * head + first[r] * (sizes.nheads - each) * head
            backward.append(back)
        return forward, backward
    straight = build_plan(plan.cu_seqlens, world_size=plan.world_size)
    there, back_again = received_rows(plan, straight), received_rows(straight, plan)

    def moved_states(source: Plan, target: Plan, first: bool) -> list[int]:
        owned = [
            [set(owned_states(p, r, spec.batch, first=first)) for r in ranks]
            for p in (source, target)
        ]
        return [len(owned[1][r] - owned[0][r]) * sizes.nheads * head for r in ranks]

    to_owner, to_straight = moved_states(straight, plan, False), moved_states(plan, straight, False)
    seeds = moved_states(straight, plan, True)
    for r in ranks:
        rows, outs = (n[r] * spec.batch * item for n in (there, back_again))
        forward.append(rows * columns + outs * sizes.inner + to_owner[r])
        backward.append(outs * columns + rows * sizes.inner + to_straight[r] + seeds[r])
    return forward, backward


def activation_bytes(mode: str, case: OpCase, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CULA_CP_MAMBA_LOAD_BALANCING", mode)

    def body(transport: threads.ThreadTransport) -> tuple[int, int, int]:
        call = RankCall(transport, case)
        call.forward()
        middle = transport.activation_bytes_received
        call.backward()
        slots = transport.stats().bytes_received
        return middle, transport.activation_bytes_received - middle, slots

    forward, backward, slots = zip(*threads.run(body, case.plan.world_size, 20.0), strict=True)
    return list(forward), list(backward), list(slots)


@pytest.mark.parametrize("layout", ["zigzag", "zigzag_per_sequence", "contiguous_per_sequence"])
@pytest.mark.parametrize("mode", MODES)
def test_every_byte_is_a_function_of_the_plan(
    mode: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for offsets, batch, dtype in (([0, 9, 9, 43], 1, "float32"), ([0, 31], 2, "bfloat16")):
        case = OpCase.of(mixer(offsets, 3, layout=layout, batch=batch, dtype=dtype))
        forward, backward, _ = activation_bytes(mode, case, monkeypatch)
        assert (forward, backward) == expected_bytes(mode, case)


def test_state_passing_moves_what_does_not_grow_with_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The counters: state passing independent of L, everything else proportional to it."""
    moved: dict[str, list[tuple[int, int]]] = {}
    for mode in ("virtual", *MODES):
        for length in (64, 128, 256):
            case = OpCase.of(mixer([0, length], 4, layout="zigzag", optional=(), loss=("output",)))
            forward, backward, slots = activation_bytes(mode, case, monkeypatch)
            moved.setdefault(mode, []).append((sum(forward) + sum(backward), sum(slots)))
    assert {activations for activations, _ in moved["virtual"]} == {0}
    assert len({slots for _, slots in moved["virtual"]}) == 1
    for mode in ("permute_p2p", "permute_a2a"):
        assert len({slots for _, slots in moved[mode]}) == 1
    assert {slots for _, slots in moved["all_to_all"]} == {0}
    for mode in MODES:
        # What is left over are final states, which do not grow.
        one, two, four = (activations for activations, _ in moved[mode])
        assert four - two == 2 * (two - one) > 0
    assert moved["permute_p2p"] == moved["permute_a2a"]


# ---------------------------------------------------------------------------------------- mutants


def keeps_the_last(self: heads.HeadsToTokens, parts: Any) -> Tensor:
    """A group's gradient of one rank only, in place of the sum."""
    total = parts[0].new_zeros((*parts[0].shape[:-1], self.width))
    for part, pieces in zip(parts, self.columns, strict=True):
        lengths = [piece.stop - piece.start for piece in pieces]
        for piece, values in zip(pieces, part.split(lengths, -1), strict=True):
            total[..., piece] = values
    return total


def in_source_order(self: RowMove, parts: Any) -> Tensor:
    """Rows as they come, not where they belong."""
    return torch.cat([part.movedim(0, self.dim) for part in parts], self.dim)


@pytest.mark.parametrize(
    ("mode", "target", "name", "fault"),
    [
        ("all_to_all", heads.HeadsToTokens, "join", keeps_the_last),
        ("permute_p2p", RowMove, "join", in_source_order),
        ("permute_p2p", RowMove, "reverse", property(lambda self: self)),
    ],
)
def test_the_oracle_catches(
    mode: str, target: Any, name: str, fault: Any, right: Right, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = mixer([0, 40], 2, layout="zigzag", heads=1, value_heads=4)
    right(mode, spec)
    monkeypatch.setattr(target, name, fault)
    with pytest.raises((AssertionError, RuntimeError)):
        right(mode, spec)


def test_no_grad_hands_states_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward only, in pieces: final states of one call are the initial states of the next."""
    whole = OpCase.of(mixer([0, 60], 2, layout="zigzag", dtype="float64", width=1))
    sizes: Mapping[str, Any] = {"chunk_size": 16, "headdim": 12, "ngroups": 2}

    def body(transport: threads.ThreadTransport, mode: str) -> tuple[Tensor, Tensor]:
        def call(x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
            plan = build_plan([0, x.shape[1]], world_size=2, layout="zigzag")
            y, final = ops.mamba_split_conv1d_scan_combined(
                plan.shard(x, transport.rank),
                **whole.parameters,
                **sizes,
                cp_context=CPContext(plan, transport),
                initial_states=state,
                load_balancing=mode,
                return_final_states=True,
            )
            return y, final

        with torch.no_grad():
            tokens = whole.tokens["zxbcdt"]
            _, first = call(tokens[:, :22], whole.initial)
            parts = threads_sum(transport, first)
            y, last = call(tokens[:, 22:], parts)
            _, expected = call(tokens, whole.initial)
            assert not y.requires_grad
        return last, expected

    for mode in ("virtual", *MODES):
        results = threads.run(lambda transport, mode=mode: body(transport, mode), 2, 20.0)
        for last, expected in results:
            assert last.shape == expected.shape
            assert relative_error(last, expected) < 1e-9 or not expected.any()
        assert sum(int(expected.any()) for _, expected in results) == 1


def threads_sum(transport: threads.ThreadTransport, x: Tensor) -> Tensor:
    """Sum over ranks, through the transport's own mail."""
    others = [torch.empty_like(x) for _ in range(transport.world_size)]
    transport.move([x] * transport.world_size, others, "a2a")
    others[transport.rank] = x
    return torch.stack(others).sum(0)
