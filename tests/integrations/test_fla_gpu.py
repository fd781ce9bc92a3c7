# SPDX-License-Identifier: Apache-2.0
"""FLA's own KDA over our transports on a GPU: not one bit differs from FLA over NCCL."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptransport.integrations import fla as integration
from cptransport.launch import sharing_environment
from cptransport.testing import Ranks, close_pools, pool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("fla") is None, reason="FLA is not installed: pip install fla-core"
    ),
]


@pytest.fixture(autouse=True, scope="module")
def _end_ranks() -> Any:
    yield
    close_pools()


def _first_configurations() -> None:
    """Let FLA's kernels take their first configuration: trying all out takes minutes, and shows nothing here."""
    from triton.runtime.autotuner import Autotuner

    importlib.import_module("fla.ops.kda")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "fla":
            continue
        for kernel in list(vars(module).values()):
            while kernel is not None:
                if isinstance(kernel, Autotuner):
                    kernel.configs = kernel.configs[:1]
                kernel = vars(kernel).get("fn") if hasattr(kernel, "__dict__") else None


def _step(context: Any, packed: dict[str, torch.Tensor], rank: int) -> list[torch.Tensor]:
    """Output and gradients of this rank's half of FLA's KDA."""
    from fla.ops.kda import chunk_kda

    leaves = {name: x.detach().clone().requires_grad_() for name, x in packed.items()}
    o, _ = chunk_kda(**leaves, cp_context=context, use_qk_l2norm_in_kernel=True)
    weights = torch.Generator(o.device).manual_seed(rank)
    o.backward(torch.randn(o.shape, generator=weights, device=o.device, dtype=o.dtype))
    torch.cuda.synchronize()
    return [o.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]


def _kda(ranks: Ranks, layout: str) -> list[float]:
    """Return the largest differences inside and after the routed block, and the number of calls."""
    from fla.ops.cp import build_cp_context

    _first_configurations()
    tokens, heads, size = 512, 4, 64
    parts = ranks.world_size * (2 if layout == "zigzag" else 1)
    cu_seqlens = torch.tensor([0, 100, 700, tokens * parts], dtype=torch.int32, device=ranks.device)
    group = dist.group.WORLD
    context = build_cp_context(cu_seqlens, group, layout=layout)
    local = tokens * parts // ranks.world_size
    made = torch.Generator(ranks.device).manual_seed(7 + ranks.rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, local, heads, *shape, generator=made, device=ranks.device)

    packed = {name: normal(size).bfloat16() for name in ("q", "k", "v")}
    packed["g"] = -normal(size).abs() / 8
    packed["beta"] = normal().sigmoid().bfloat16()

    def worst(found: list[torch.Tensor]) -> float:
        assert len(found) == 6
        assert all(bool(x.abs().max() > 1e-3) for x in found)
        return max(
            (a.double() - b.double()).abs().max().item() for a, b in zip(plain, found, strict=True)
        )

    plain = _step(context, packed, ranks.rank)
    transport = ranks.create()
    with integration.routed(transport, group) as routing:
        inside = worst(_step(context, packed, ranks.rank))
        again = worst(_step(context, packed, ranks.rank))
    assert transport.stats().bytes_received > 0
    after = worst(_step(context, packed, ranks.rank))
    return [inside, again, after, routing.calls]


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("backend", ["cupy_ipc", "nccl", "gloo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_kda_has_the_same_bits(backend: str, layout: str, ranks: int) -> None:
    served = pool(backend, ranks, ranks, device="cuda", env=sharing_environment(ranks))
    rows = served.run(_kda, transport=False, timeout_s=120, layout=layout)
    # Two calls in the forward and backward of a step, two steps inside.
    assert rows == [[0.0, 0.0, 0.0, 4]] * ranks
