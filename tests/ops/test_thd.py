# SPDX-License-Identifier: Apache-2.0
"""Packed tokens without a batch axis, through the explicit forward and backward of KDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cptransport.context import CPContext
from cptransport.errors import OpInputError
from cptransport.ops import kda_backward, kda_forward
from cptransport.plan import build_plan
from cptransport.transports import threads

TOKENS = ("q", "k", "v", "g", "beta")


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, tokens, *shape, generator=made, dtype=torch.float64)

    return {
        "q": normal(2, 4),
        "k": normal(2, 4) / 2,
        "v": normal(4, 6),
        "g": normal(4, 4),
        "beta": normal(4).sigmoid(),
    }


@pytest.mark.parametrize("world_size", [1, 3])
def test_thd_is_the_same_without_the_axis(world_size: int) -> None:
    plan = build_plan([0, 5, 23], world_size=world_size)
    x, do = inputs(23), torch.randn(1, 23, 4, 6, dtype=torch.float64)
    initial = torch.randn(2, 4, 4, 6, dtype=torch.float64)
    a_log = torch.randn(4, dtype=torch.float64)

    def step(transport: Any, thd: bool) -> list[torch.Tensor]:
        def local(value: torch.Tensor) -> torch.Tensor:
            mine = plan.shard(value, transport.rank)
            return mine[0] if thd else mine

        result = kda_forward(
            **{name: local(value) for name, value in x.items()},
            cp_context=CPContext(plan, transport),
            use_gate_in_kernel=True,
            A_log=a_log,
            initial_state=initial,
            output_final_state=True,
        )
        grads = kda_backward(result.saved, local(do), result.final_state)
        names = [*TOKENS, "A_log", "initial_state"]
        found = [result.o, *(getattr(grads, f"d{name}") for name in names), result.final_state]
        assert all(isinstance(each, torch.Tensor) for each in found)
        return found  # type: ignore[return-value]

    for rank, (packed, dense) in enumerate(
        zip(
            threads.run(lambda t: step(t, True), world_size),
            threads.run(lambda t: step(t, False), world_size),
            strict=True,
        )
    ):
        tokens = plan.for_rank(rank).num_tokens
        assert packed[0].shape == (tokens, 4, 6)
        assert packed[1].shape == (tokens, 2, 4)
        assert packed[5].shape == (tokens, 4)
        for mine, other in zip(packed, dense, strict=True):
            assert torch.equal(mine.reshape(other.shape), other)


def test_wrong_shapes_are_named() -> None:
    plan = build_plan([0, 8], world_size=1)
    x = {name: value[0] for name, value in inputs(8).items()}

    def step(transport: Any) -> None:
        context = CPContext(plan, transport)
        with pytest.raises(OpInputError, match=r"beta must be \[B, T, HV\]"):
            kda_forward(**{**x, "beta": x["beta"][:, :2]}, cp_context=context)
        with pytest.raises(OpInputError, match=r"q: rank 0 has 7 local rows"):
            kda_forward(**{name: value[:7] for name, value in x.items()}, cp_context=context)
        saved = kda_forward(**{**x, "g": -x["g"].abs()}, cp_context=context).saved
        with pytest.raises(OpInputError, match=r"do must be \[T, HV, V\] = \[8, 4, 6\]"):
            kda_backward(saved, torch.zeros(1, 8, 4, 6))

    threads.run(step, 1)
