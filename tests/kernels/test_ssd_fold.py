# SPDX-License-Identifier: Apache-2.0
"""The fold of SSD's summaries by its kernel, against plain torch in float64."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cptransport import merge
from cptransport.composition import Fold, Source
from cptransport.transport import Gathered
from cptransport_kernels import ssd_fold
from cptransport_kernels.launch import count_launches

WORLD_SIZE, ROWS, BATCH, HEADS = 3, 2, 2, 3

Tables = dict[str, list[torch.Tensor]]


def tables(rounds: int, inner: tuple[int, int]) -> list[Tables]:
    """Return every rank's tables, by round; the last round lacks transitions."""
    generator = torch.Generator().manual_seed(rounds)
    made: list[Tables] = []
    for index in range(rounds):
        rows = [(ROWS * BATCH, HEADS, *inner), (ROWS * BATCH, HEADS)]
        state, transition = (
            [torch.randn(shape, generator=generator) for _ in range(WORLD_SIZE)] for shape in rows
        )
        decays = [-x.abs() for x in transition]
        decays[0][0, 0], decays[1][1, 1] = -math.inf, 0.0
        last = index == rounds - 1
        made.append({"state": state} if last else {"state": state, "transition": decays})
    return made


def fold(
    folds: tuple[Fold, ...], rounds: list[Tables], direction: str, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """Fold into a table of sevens."""
    gathered = [
        Gathered(
            {name: [x.to(device, dtype) for x in many] for name, many in one.items()},
            torch.device(device),
            {name: range(WORLD_SIZE) for name in one},
        )
        for one in rounds
    ]
    shape = rounds[0]["state"][0].shape
    table = torch.full(shape, 7.0, dtype=dtype, device=device)
    merge.fold_gathered("ssd", direction, "k_major", BATCH, folds, gathered, table)
    return table


SOURCES = (Source(0, 2, 1, round=2), Source(1, 0, 0, round=1), Source(2, 1, 1, round=0))


@pytest.mark.parametrize("inner", [(5, 6), (64, 32)])
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "folds",
    [
        (Fold(Source(3, 0, 1), SOURCES), Fold(Source(4, 0, 0), SOURCES[:1])),
        (Fold(Source(3, 0, 1), SOURCES[:2]),),
    ],
)
def test_one_launch_folds_sources_of_several_rounds(
    folds: tuple[Fold, ...],
    direction: str,
    inner: tuple[int, int],
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = tables(3, inner)
    exact = fold(folds, rounds, direction, torch.float64, "cpu")
    monkeypatch.setattr(merge, "_kernel_serves", lambda *_: True)
    with count_launches() as counter:
        actual = fold(folds, rounds, direction, torch.float32, device).cpu().double()
    assert counter == {"ssd_fold_kernel": 1}
    assert (actual - exact).abs().max() <= 1e-6 * exact.abs().max()
    untouched = {0, 1} - {one.target.row for one in folds}
    assert all((actual[row * BATCH : (row + 1) * BATCH] == 7.0).all() for row in untouched)


def test_parts_may_begin_anywhere(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "_kernel_serves", lambda *_: True)
    aligned, kernel = [], ssd_fold.ssd_fold
    monkeypatch.setattr(
        ssd_fold, "ssd_fold", lambda *a, **k: (aligned.append(k["aligned"]), kernel(*a, **k))
    )
    rounds, folds = tables(3, (8, 8)), (Fold(Source(3, 0, 1), SOURCES),)
    usual = fold(folds, rounds, "forward", torch.float32, device)
    part = rounds[1]["state"][0]
    memory = torch.empty(part.numel() + 1, device=device)
    rounds[1]["state"][0] = memory[1:].view_as(part).copy_(part)
    assert torch.equal(fold(folds, rounds, "forward", torch.float32, device), usual)
    assert aligned == [True, False]


def test_products_of_transitions_are_sums() -> None:
    facts: dict[str, Any] = {"is_cuda": True, "dtype": torch.float32}
    assert merge._kernel_serves("ssd", SimpleNamespace(dim=lambda: 4, **facts))
    assert not merge._kernel_serves("ssd", SimpleNamespace(dim=lambda: 2, **facts))
