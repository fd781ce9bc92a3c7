# SPDX-License-Identifier: Apache-2.0
"""Packed tokens without a batch axis, on cuDNN's stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed import both_ways

from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.transports import threads


@pytest.mark.parametrize("variant", ["hopper", "blackwell"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_thd_is_the_same_call(use: Callable[..., Any], variant: str, layout: str) -> None:
    """Every output and gradient of every rank, bit for bit, in the shape of what was given."""
    use(variant)
    spec = OpSpec("kda", [0, 50, 51, 51, 53, 110], world_size=3, layout=layout, engine="cudnn")
    spec = spec.with_(heads=2, value_heads=2, key_dim=6, value_dim=6, dtype="float64")
    case = OpCase.of(spec)
    for thd, batched in threads.run(lambda t: both_ways(t, case), 3, 60.0):
        assert {name for name, x in batched.items() if x.any()} == {*batched}
        for name, x in batched.items():
            assert torch.equal(thd[name][None], x), name
