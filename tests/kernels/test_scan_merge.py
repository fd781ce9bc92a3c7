# SPDX-License-Identifier: Apache-2.0
"""The kernel's side of a scan's merge, windows and sources over several rounds, against plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cptransport import merge
from cptransport.composition import Fold, Source
from cptransport.testing import relative_error
from cptransport.transport import Gathered

WORLD_SIZE, ROWS, BATCH, HEADS, KEYS, VALUES = 3, 2, 2, 2, 16, 32


def shape(columns: int, layout: str) -> tuple[int, ...]:
    """Of a table of states (``columns`` V) or transitions (K)."""
    inner = (KEYS, columns) if layout == "k_major" else (columns, KEYS)
    return (ROWS * BATCH, HEADS, *inner)


def gathered(
    rounds: int, device: str, *, last_without: bool, layout: str = "k_major"
) -> list[Gathered]:
    """Return what rounds brought: every rank's tables; the last round may lack transitions."""
    generator = torch.Generator().manual_seed(rounds)
    made = []
    for index in range(rounds):
        names = {"state": VALUES, "transition": KEYS}
        if last_without and index == rounds - 1:
            del names["transition"]
        tables = {
            name: [
                (
                    torch.randn(*shape(n, layout), generator=generator).to(device) / KEYS**0.5
                ).contiguous()
                for _ in range(WORLD_SIZE)
            ]
            for name, n in names.items()
        }
        present = {name: range(WORLD_SIZE) for name in names}
        made.append(Gathered(tables, torch.device(device), present))
    return made


def both(
    monkeypatch: pytest.MonkeyPatch, how: Any, width: int, *arguments: Any, layout: str = "k_major"
) -> list[torch.Tensor]:
    results = []
    for served in (True, False):
        monkeypatch.setattr(merge, "_kernel_serves", lambda *_, served=served: served)
        table = torch.full(shape(width, layout), 7.0, device=arguments[-1].device)
        direction, folds, rounds, _ = arguments
        how("kda", direction, layout, BATCH, folds, rounds, table)
        results.append(table)
    return results


@pytest.mark.parametrize("layout", ["k_major", "v_major"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_sources_from_several_rounds(
    monkeypatch: pytest.MonkeyPatch, device: str, direction: str, layout: str
) -> None:
    rounds = gathered(3, device, last_without=True, layout=layout)
    sources = (Source(0, 2, 1, round=2), Source(1, 0, 0, round=1), Source(2, 1, 1, round=0))
    folds = (Fold(Source(3, 0, 1), sources), Fold(Source(4, 0, 0), sources[1:]))
    where = torch.empty(0, device=device)
    arguments = (monkeypatch, merge.fold_gathered, VALUES, direction, folds, rounds, where)
    kernel, plain = both(*arguments, layout=layout)
    assert relative_error(kernel, plain) <= 2e-6
    assert not (kernel == 7.0).any()


@pytest.mark.parametrize("layout", ["k_major", "v_major"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_windows(monkeypatch: pytest.MonkeyPatch, device: str, direction: str, layout: str) -> None:
    rounds = gathered(2, device, last_without=False, layout=layout)
    pair = (Source(0, 2, 1, round=1), Source(1, 0, 0, round=1))
    windows = (Fold(Source(1, 0, 0, round=2), pair, transition=True),)
    where = torch.empty(0, device=device)
    for how, width in ((merge.fold_gathered, VALUES), (merge.compose_gathered, KEYS)):
        arguments = (monkeypatch, how, width, direction, windows, rounds, where)
        kernel, plain = both(*arguments, layout=layout)
        assert relative_error(kernel, plain) <= 2e-6
        assert (kernel[BATCH:] == 7.0).all()  # no other row is touched
    earlier, later = (rounds[1].tensor("transition", s.rank)[s.row * BATCH :][:BATCH] for s in pair)
    later_first = (direction == "forward") == (layout == "k_major")
    right = later @ earlier if later_first else earlier @ later
    assert relative_error(kernel[:BATCH], right) <= 2e-6


def test_a_window_that_did_not_grow_is_copied(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    rounds = gathered(1, device, last_without=True)
    windows = (Fold(Source(0, 1, 1, round=1), (Source(0, 1, 1, round=0),)),)
    where = torch.empty(0, device=device)
    kernel, plain = both(
        monkeypatch, merge.fold_gathered, VALUES, "forward", windows, rounds, where
    )
    assert torch.equal(kernel, plain)
    assert torch.equal(kernel[BATCH:], rounds[0].tensor("state", 1)[BATCH:])
