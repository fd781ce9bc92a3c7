# SPDX-License-Identifier: Apache-2.0
"""Who owns which rows, against a count row by row, and the refusal of malformed arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from cptransport.errors import PlanError
from cptransport.plan import build_plan


def rows(plan: Any) -> list[list[int]]:
    return [plan.for_rank(rank).index.tolist() for rank in range(plan.world_size)]


def lengths(plan: Any) -> list[int]:
    return [plan.for_rank(rank).num_tokens for rank in range(plan.world_size)]


def test_ranks_own_the_rows_that_the_layout_says(cases: list[Any]) -> None:
    for case in cases:
        expected = [
            [row for row, owner in enumerate(case.ranks) if owner == rank]
            for rank in range(case.plan.world_size)
        ]
        assert rows(case.plan) == expected, case.arguments
        assert lengths(case.plan) == [len(owned) for owned in expected]
        assert case.plan.max_tokens == max(map(len, expected))
        assert case.plan.total_rows == len(case.ranks)
        assert case.plan.has_padding == (None in case.sequences)


# The figures of the next tests come from failures that users of such systems have reported.


def test_contiguous_stream_and_contiguous_sequence_differ() -> None:
    flat = build_plan([0, 8, 24], world_size=2, layout="contiguous")
    assert rows(flat) == [[*range(12)], [*range(12, 24)]]
    each = build_plan([0, 8, 24], world_size=2, layout="contiguous_per_sequence")
    assert rows(each) == [[*range(4), *range(8, 16)], [*range(4, 8), *range(16, 24)]]
    assert flat.digest() != each.digest()


def test_odd_sequences_are_not_truncated() -> None:
    plan = build_plan([0, 5, 12], world_size=2, layout="contiguous_per_sequence")
    assert [plan.for_rank(rank).cu_seqlens.tolist() for rank in (0, 1)] == [[0, 3, 7], [0, 2, 5]]
    flat = build_plan([0, 5, 12], world_size=2)
    assert [flat.for_rank(rank).cu_seqlens.tolist() for rank in (0, 1)] == [[0, 5, 6], [0, 6]]


def test_lengths_need_not_divide() -> None:
    assert lengths(build_plan([0, 10], world_size=3)) == [4, 3, 3]
    assert lengths(build_plan([0, 2], world_size=3)) == [1, 1, 0]


def test_padded_stream_is_cut_not_the_tokens() -> None:
    plan = build_plan([0, 3, 8], world_size=2, padded_cu_seqlens=[0, 4, 12])
    assert rows(plan) == [[*range(6)], [*range(6, 12)]]
    found = [(s.sequence, s.start, s.stop, s.rank, s.local_start) for s in plan.segments]
    assert found == [(0, 0, 3, 0, 0), (1, 4, 6, 0, 4), (1, 6, 9, 1, 0)]
    each = build_plan(
        [0, 3, 8], world_size=2, layout="contiguous_per_sequence", padded_cu_seqlens=[0, 4, 12]
    )
    assert rows(each) == [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]
    found = [(s.sequence, s.start, s.stop, s.rank, s.local_start) for s in each.segments]
    assert found == [(0, 0, 2, 0, 0), (0, 2, 3, 1, 0), (1, 4, 8, 0, 2), (1, 8, 9, 1, 2)]


def test_zigzag_pieces_need_not_divide() -> None:
    plan = build_plan([0, 16], world_size=2, layout="zigzag")
    assert rows(plan) == [[0, 1, 2, 3, 12, 13, 14, 15], [*range(4, 12)]]
    assert [plan.segments[i].rank for i in plan.chain(0)] == [0, 1, 0]
    plan = build_plan([0, 18], world_size=2, layout="zigzag")
    assert [s.length for s in plan.segments] == [5, 5 + 4, 4]
    packed = build_plan([0, 7, 9], world_size=2, layout="zigzag_per_sequence")
    assert rows(packed) == [[0, 1, 6, 7], [2, 3, 4, 5, 8]]


MALFORMED = {
    "decreasing": ({"cu_seqlens": [0, 12, 8, 16]}, r"cu_seqlens must not decrease, got 8 at"),
    "not from 0": ({"cu_seqlens": [1, 5]}, r"cu_seqlens must start at 0, got 1"),
    "negative": ({"cu_seqlens": [0, -1]}, r"must not decrease"),
    "no offsets": ({"cu_seqlens": []}, r"at least two offsets"),
    "no sequence": ({"cu_seqlens": [0]}, r"at least two offsets"),
    "float": ({"cu_seqlens": [0, 5.0]}, r"cu_seqlens\[1\] must be an integer, got 5.0"),
    "bool": ({"cu_seqlens": [0, True]}, r"must be an integer, got True"),
    "text": ({"cu_seqlens": "05"}, r"sequence of integers or a tensor, got '05'"),
    "number": ({"cu_seqlens": 8}, r"sequence of integers or a tensor, got 8"),
    "none": ({"cu_seqlens": None}, r"sequence of integers or a tensor, got None"),
    "nested": ({"cu_seqlens": [[0, 5]]}, r"must be an integer, got list"),
    "scalar tensors": ({"cu_seqlens": [*torch.tensor([0, 5])]}, r"must be an integer, got Tensor"),
    "too large": ({"cu_seqlens": [0, 2**63]}, r"64 bits"),
    "2-D tensor": ({"cu_seqlens": torch.tensor([[0, 5]])}, r"1 dimension\(s\), got 2"),
    "0-D tensor": ({"cu_seqlens": torch.tensor(5)}, r"1 dimension\(s\), got 0"),
    "float tensor": ({"cu_seqlens": torch.tensor([0.0, 5.0])}, r"int32 or int64 tensor"),
    "bool tensor": ({"cu_seqlens": torch.tensor([False, True])}, r"int32 or int64 tensor"),
    "float array": ({"cu_seqlens": np.array([0.0, 5.0])}, r"must be an integer, got 0.0"),
    "no ranks": ({"world_size": 0}, r"world_size must be at least 1, got 0"),
    "negative ranks": ({"world_size": -2}, r"world_size must be at least 1"),
    "float ranks": ({"world_size": 2.0}, r"world_size must be an integer, got 2.0"),
    "bool ranks": ({"world_size": True}, r"world_size must be an integer, got True"),
    "layout": ({"layout": "zigzagg"}, r"unknown layout 'zigzagg'.*custom; did you mean 'zigzag'"),
    "strange layout": ({"layout": "qqq"}, r"unknown layout 'qqq'; valid layouts: [a-z_, ]*custom$"),
    "no layout": ({"layout": None}, r"unknown layout None"),
    "object layout": ({"layout": object()}, r"unknown layout object;"),
    "padding shorter": ({"padded_cu_seqlens": [0, 7]}, r"must have 3 offsets like cu_seqlens, got"),
    "padding tight": ({"padded_cu_seqlens": [0, 4, 13]}, r"sequence 0 has 5 tokens and does not"),
    "padding not from 0": ({"padded_cu_seqlens": [1, 6, 20]}, r"padded_cu_seqlens must start at 0"),
    "padding decreasing": ({"padded_cu_seqlens": [0, 9, 8]}, r"padded_cu_seqlens must not decr"),
    "zigzag boundaries": ({"layout": "zigzag", "boundaries": [(0, 0, 13)]}, r"takes no boundaries"),
    "few boundaries": ({"boundaries": [0, 13]}, r"world_size \+ 1 = 3 offsets, got 2"),
    "many boundaries": ({"boundaries": [0, 1, 2, 13]}, r"world_size \+ 1 = 3 offsets, got 4"),
    "boundaries end early": ({"boundaries": [0, 5, 12]}, r"must end at the number of rows 13, got"),
    "boundaries end late": ({"boundaries": [0, 5, 14]}, r"must end at the number of rows 13, got"),
    "boundaries start late": ({"boundaries": [1, 5, 13]}, r"boundaries must start at 0, got 1"),
    "boundaries decrease": ({"boundaries": [0, 14, 13]}, r"boundaries must not decrease"),
    "pieces for contiguous": ({"boundaries": [(0, 0, 13)]}, r"boundaries\[0\] must be an integer"),
    "custom without": ({"layout": "custom"}, r"'custom' needs boundaries"),
    "custom offsets": ({"boundaries": [0, 13]}, r"boundaries\[0\] of a custom layout must be \(r"),
    "custom pair": (
        {"boundaries": [(0, 13)]},
        r"boundaries\[0\] of a custom layout must be \(rank",
    ),
    "custom float": ({"boundaries": [(0, 0, 13.0)]}, r"stop of boundaries\[0\] must be an integer"),
    "custom bool": ({"boundaries": [(True, 0, 13)]}, r"rank of boundaries\[0\] must be an integer"),
    "custom rank": ({"boundaries": [(2, 0, 13)]}, r"boundaries\[0\]: rank 2 is outside 0..1"),
    "custom negative": ({"boundaries": [(-1, 0, 13)]}, r"rank -1 is outside"),
    "custom backwards": ({"boundaries": [(0, 0, 13), (1, 7, 5)]}, r"rows 7:5 do not lie in order"),
    "custom outside": ({"boundaries": [(0, 0, 14)]}, r"rows 0:14 do not lie in order within 0:13"),
    "custom gap": ({"boundaries": [(0, 0, 4), (1, 6, 13)]}, r"leave rows 4:6 to no rank"),
    "custom late": ({"boundaries": [(0, 2, 13)]}, r"leave rows 0:2 to no rank"),
    "custom early": ({"boundaries": [(0, 0, 12)]}, r"leave rows 12:13 to no rank"),
    "custom overlap": ({"boundaries": [(1, 4, 13), (0, 0, 6)]}, r"rows 4:6 to more than one piece"),
    "custom inside": ({"boundaries": [(0, 0, 13), (1, 4, 6)]}, r"rows 4:6 to more than one piece"),
    "custom empty": ({"boundaries": []}, r"leave rows 0:13 to no rank"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_arguments_are_refused(name: str) -> None:
    arguments, message = MALFORMED[name]
    given = {"cu_seqlens": [0, 5, 13], "world_size": 2, **arguments}
    if name.startswith("custom"):
        given["layout"] = "custom"
    errors = []
    for _ in range(2):
        with pytest.raises(PlanError, match=message) as caught:
            build_plan(**given)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
    assert "0x" not in errors[0]
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    "values",
    [
        (0, 5, 13),
        torch.tensor([0, 5, 13]),
        torch.tensor([0, 5, 13], dtype=torch.int32),
        torch.tensor([0, 1, 5, 2, 13, 3])[::2],
        np.array([0, 5, 13]),
        [np.int32(0), np.int64(5), 13],
    ],
    ids=["tuple", "int64", "int32", "strided", "array", "numpy integers"],
)
def test_offsets_come_in_any_integer_form(values: Any) -> None:
    plan = build_plan([0, 5, 13], world_size=2)
    assert build_plan(values, world_size=np.int64(2)) is plan
    assert build_plan(values, world_size=2, boundaries=[0, 7, 13]) == plan
    assert all(type(offset) is int for offset in build_plan(values, world_size=2).cu_seqlens)


def test_custom_pieces_come_in_any_order_and_form() -> None:
    pieces = [(1, 4, 9), (0, 0, 4), (2, 9, 9), (0, 9, 13)]
    plan = build_plan([0, 13], world_size=3, layout="custom", boundaries=pieces)
    assert rows(plan) == [[0, 1, 2, 3, 9, 10, 11, 12], [4, 5, 6, 7, 8], []]
    for other in (sorted(pieces), [list(piece) for piece in pieces], torch.tensor(pieces)):
        assert build_plan([0, 13], world_size=3, layout="custom", boundaries=other) == plan


@pytest.mark.gpu
def test_offsets_on_a_device_are_read_on_the_host() -> None:
    plan = build_plan(torch.tensor([0, 5, 13], device="cuda"), world_size=2)
    assert plan is build_plan([0, 5, 13], world_size=2)
    assert plan.for_rank(0).index.device.type == "cpu"
