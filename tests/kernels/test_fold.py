# SPDX-License-Identifier: Apache-2.0
"""The fold of summaries against float64: address tables and local parts, both directions,
prefixes."""

from __future__ import annotations

import pytest
import torch

from cptransport_kernels.fold import FoldSteps, _columns, fold


def summaries(n: int, rows: int, K: int, V: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(0)
    state = torch.randn(n, rows, 2, K, V, generator=gen).to(device)
    transition = (torch.randn(n, rows, 2, K, K, generator=gen) / K**0.5).to(device)
    return state, transition


def an_element_on(parts: torch.Tensor) -> torch.Tensor:
    """Return a copy that begins at no multiple of 16 bytes."""
    memory = torch.empty(parts.numel() + 1, device=parts.device)
    return memory[1:].view_as(parts).copy_(parts)


@pytest.mark.parametrize("aligned", [False, True])
@pytest.mark.parametrize("v_major", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "tf32x3"])
@pytest.mark.parametrize(("K", "V"), [(16, 32), (64, 16), (32, 64), (128, 64)])
def test_folds_out_of_address_tables(
    K: int, V: int, precision: str, transposed: bool, v_major: bool, aligned: bool, device: str
) -> None:
    B, ranks = 2, 4
    state, transition = summaries(ranks, 2 * B, K, V, device)
    # What ranks hold: V-major tables are those of the transposes.
    held = [part.mT.contiguous() if v_major else part for part in (state, transition)]
    if not aligned:
        held = [an_element_on(parts) for parts in held]
    # Row 0 from ranks 3, 0, 1 (rows 1, 0, 1), row 2 from nobody, row 1 from rank 2 alone.
    lists = [[(3, 1), (0, 0), (1, 1)], [], [(2, 0)]]
    steps = FoldSteps(
        [[(rank, row, row if i else -1, -1) for i, (rank, row) in enumerate(x)] for x in lists],
        device,
        results=[0, 2, 1],
    )
    addresses = [
        torch.tensor([part[i].data_ptr() for i in range(ranks)], device=device) for part in held
    ]
    out = torch.full((3 * B, 2, V, K) if v_major else (3 * B, 2, K, V), torch.nan, device=device)
    fold(
        steps, *addresses, shape=(2, K, V), batch=B, out=out, v_major=v_major,
        transposed=transposed, precision=precision, aligned=aligned,
    )  # fmt: skip
    out = out.mT if v_major else out
    for sources, target in zip(lists, (0, 2, 1), strict=True):
        for b in range(B):
            want = torch.zeros(2, K, V, dtype=torch.float64, device=device)
            for i, (rank, row) in enumerate(sources):
                M = transition[rank, row * B + b].double()
                want = (M.mT if transposed else M) @ want if i else want
                want = want + state[rank, row * B + b].double()
            error = (out[target * B + b].double() - want).abs().max()
            assert error <= 2e-6 * want.abs().max(), (target, b, error)


@pytest.mark.parametrize("v_major", [False, True])
def test_start_and_prefixes(v_major: bool, device: str) -> None:
    K, V = 32, 64

    def stored(x: torch.Tensor) -> torch.Tensor:
        return x.mT.contiguous() if v_major else x

    state, transition = (part[0] for part in summaries(1, 3, K, V, device))
    start = torch.randn(1, 2, K, V, device=device)
    prefix = stored(torch.full((3, 2, K, V), torch.nan, device=device))
    steps = FoldSteps([[(0, 0, 0, 2), (0, -1, 1, 0), (0, 2, 2, -1)]], device)
    out = fold(
        steps,
        stored(state),
        stored(transition),
        shape=(2, K, V),
        start=stored(start),
        prefix=prefix,
        v_major=v_major,
    )
    out, prefix = (x.mT if v_major else x for x in (out, prefix))
    first = transition[0].double() @ start[0].double() + state[0].double()
    second = transition[1].double() @ first
    want = transition[2].double() @ second + state[2].double()
    torch.testing.assert_close(out[0].double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(prefix[2], start[0], rtol=0, atol=0)
    torch.testing.assert_close(prefix[0].double(), first, rtol=0, atol=2e-5)
    assert prefix[1].isnan().all()


def test_unknown_precision_is_refused(device: str) -> None:
    steps = FoldSteps([[]], device)
    with pytest.raises(ValueError, match="not 'tf32'"):
        fold(steps, torch.zeros(1), None, shape=(1, 16, 16), precision="tf32")


def test_across_a_link_a_program_folds_as_many_columns_as_it_can() -> None:
    assert _columns(128, 8, 132, linked=False) == 16
    assert _columns(128, 8, 132, linked=True) == 64
    assert _columns(16, 8, 132, linked=True) == 16
