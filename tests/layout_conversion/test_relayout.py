# SPDX-License-Identifier: Apache-2.0
"""Which rows go where between two plans: against a search by row, for random plans."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from cptransport import Plan, PlanError, build_plan
from cptransport.ops.heads import MixerSizes, head_shares
from cptransport.relayout import received_rows, relayout, state_move

LAYOUTS = ("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence", "custom")


def random_plans(seed: int) -> tuple[Plan, Plan]:
    """Two plans of one stream: any layout, empty sequences, padding, ranks without rows."""
    rng = random.Random(seed)
    world_size, total = rng.randint(1, 5), rng.choice((0, 1, 7, 40))
    offsets = [0, *sorted(rng.randint(0, total) for _ in range(rng.randint(0, 4))), total]
    padded = None
    if rng.random() < 0.4:
        padded = [0]
        for start, stop in zip(offsets, offsets[1:], strict=False):
            padded.append(padded[-1] + stop - start + rng.choice((0, 2)))
    rows = total if padded is None else padded[-1]

    def plan() -> Plan:
        layout = rng.choice(LAYOUTS)
        boundaries: Any = None
        if layout == "custom":
            cuts = sorted(rng.randint(0, rows) for _ in range(6))
            pieces = zip([0, *cuts], [*cuts, rows], strict=True)
            boundaries = [(rng.randrange(world_size), a, b) for a, b in pieces]
        elif layout == "contiguous" and rng.random() < 0.5:
            boundaries = [0, *sorted(rng.randint(0, rows) for _ in range(world_size - 1)), rows]
        return build_plan(
            offsets,
            world_size=world_size,
            layout=layout,
            boundaries=boundaries,
            padded_cu_seqlens=padded,
        )

    return plan(), plan()


@pytest.mark.parametrize("seed", range(60))
def test_every_row_arrives_once_in_its_place(seed: int) -> None:
    before, after = random_plans(seed)
    ranks = range(before.world_size)
    moves = [relayout(before, after, rank) for rank in ranks]
    stream = torch.arange(before.total_rows)
    sent = [move.split(before.shard(stream, r, 0)[None]) for r, move in enumerate(moves)]
    crossing = [0] * before.world_size
    for rank, move in enumerate(moves):
        parts = [sent[source][rank] for source in ranks]
        assert [tuple(part.shape) for part in parts] == move.shapes(stream[None])
        assert torch.equal(move.join(parts)[0], after.for_rank(rank).index)
        for source, part in enumerate(parts):
            assert part.flatten().tolist() == sorted(part.flatten().tolist())
            crossing[rank] += len(part) * (source != rank)
        # The rows that a rank keeps are all those that both plans give it.
        both = set(before.for_rank(rank).index.tolist()) & set(after.for_rank(rank).index.tolist())
        assert move.send_counts[rank] == move.receive_counts[rank] == len(both)
    assert received_rows(before, after) == crossing


@pytest.mark.parametrize("seed", range(60))
def test_the_reverse_is_the_move_back(seed: int) -> None:
    before, after = random_plans(seed)
    for rank in range(before.world_size):
        there, back = relayout(before, after, rank).reverse, relayout(after, before, rank)
        assert torch.equal(there.send, back.send)
        assert torch.equal(there.receive, back.receive)
        assert (there.send_counts, there.receive_counts) == (back.send_counts, back.receive_counts)
        assert (there.before, there.after) == (back.before, back.after)


@pytest.mark.parametrize("end", ["first", "last"])
@pytest.mark.parametrize("seed", range(30))
def test_states_go_to_the_owner_under_the_other_plan(seed: int, end: str) -> None:
    before, after = random_plans(seed)
    batch = 3 if before.num_sequences == 1 else 1
    ranks = range(before.world_size)
    states = torch.arange(1.0, 1 + before.num_sequences * batch)
    at = -1 if end == "last" else 0

    def owned(plan: Plan, rank: int) -> torch.Tensor:
        rows = [plan.segments[plan.chain(s)[at]].rank == rank for s in range(plan.num_sequences)]
        return states * torch.tensor(rows).repeat_interleave(batch)

    moves = [state_move(before, after, rank, batch, end) for rank in ranks]
    # What a rank does not own must not travel.
    dirty = [torch.where(owned(before, r) > 0, states, torch.nan) for r in ranks]
    sent = [move.split(dirty[rank]) for rank, move in enumerate(moves)]
    for rank, move in enumerate(moves):
        assert torch.equal(move.join([sent[s][rank] for s in ranks]), owned(after, rank))


def test_tables_are_made_once() -> None:
    plans = [build_plan([0, 9, 40], world_size=3, layout=layout) for layout in LAYOUTS[:4]]
    for rank in range(3):
        first = relayout(plans[0], plans[2], rank)
        assert relayout(plans[0], plans[2], rank) is first
        first.split(torch.zeros(1, plans[0].for_rank(rank).num_tokens))
        tables = first._tables(torch.device("cpu"))
        assert first._tables(torch.device("cpu"))[0] is tables[0]
        assert first.along(2)._tables(torch.device("cpu"))[0] is tables[0]
        assert first.reverse._tables(torch.device("cpu"))[1] is tables[0]


def test_zigzag_to_contiguous_moves_what_it_must() -> None:
    """Two ranks: 0 has pieces 0 and 3, 1 has 1 and 2; each sends one of its two."""
    before = build_plan([0, 16], world_size=2, layout="zigzag")
    after = build_plan([0, 16], world_size=2)
    assert received_rows(before, after) == [4, 4]
    assert received_rows(after, after) == [0, 0]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"world_size": 3}, "world sizes differ: 2 and 3"),
        ({"cu_seqlens": [0, 6, 12]}, "cu_seqlens differ"),
        ({"cu_seqlens": [0, 5, 13]}, "cu_seqlens differ"),
        ({"padded_cu_seqlens": [0, 6, 14]}, "padded_cu_seqlens differ: None and"),
    ],
)
def test_plans_of_other_streams_are_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"cu_seqlens": [0, 5, 12], "world_size": 2}
    before = build_plan(**given)
    after = build_plan(**{**given, **change})
    for call in (lambda: relayout(before, after, 0), lambda: received_rows(before, after)):
        with pytest.raises(PlanError, match=words):
            call()


@pytest.mark.parametrize(
    ("nheads", "ngroups", "world_size"),
    [(8, 4, 2), (8, 2, 4), (6, 3, 2), (6, 1, 3), (12, 4, 3), (30, 6, 5), (5, 5, 5), (4, 2, 1)],
)
def test_a_share_has_its_heads_and_the_groups_they_read(
    nheads: int, ngroups: int, world_size: int
) -> None:
    sizes = MixerSizes(nheads, 3, ngroups, 2)
    group_of = [head // (nheads // ngroups) for head in range(nheads)]
    seen: list[int] = []
    for share in head_shares(sizes, world_size):
        heads = list(range(nheads)[share.heads])
        seen += heads
        read = [group_of[head] for head in heads]
        held = sorted(set(read))
        assert share.sizes == MixerSizes(len(heads), 3, len(held), 2)
        scanned = share.repeat or tuple(range(len(held)))
        each = len(heads) // len(scanned)
        assert [held[scanned[i // each]] for i in range(len(heads))] == read
        # z, x, B, C, dt; x, B, C of the convolution.
        labels = [("z", h) for h in range(nheads) for _ in range(3)]
        channels = [("x", h) for h in range(nheads) for _ in range(3)]
        channels += [(part, g) for part in "BC" for g in range(ngroups) for _ in range(2)]
        labels += [*channels, *(("dt", h) for h in range(nheads))]
        mine = {*((part, h) for part in ("z", "x", "dt") for h in heads)}
        mine |= {(part, g) for part in "BC" for g in held}
        for all_labels, pieces in ((labels, share.columns), (channels, share.channels)):
            picked = [label for piece in pieces for label in all_labels[piece]]
            assert picked == [label for label in all_labels if label in mine]
    assert seen == list(range(nheads))
