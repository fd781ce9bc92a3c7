# SPDX-License-Identifier: Apache-2.0
"""FLA's own KDA over our transports on a GPU: not one bit differs from FLA over NCCL.

FLA lets Triton time its candidate kernels, more than a hundred for a forward and backward, on every
rank by itself. That takes minutes and shows nothing here, so each kernel takes the first of its
candidates. Within a process the choice is the same for all runs either way: only the transport
changes between the runs that are compared.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptransport.bench.launch import advised_environment
from cptransport.integrations import fla as integration
from cptransport.launch import sharing_environment
from cptransport.select import create_transport
from cptransport.testing import Ranks
from cptransport.testing.pool import RankPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(280),
    pytest.mark.skipif(
        find_spec("fla") is None, reason="FLA is not installed: pip install fla-core"
    ),
]

#: Transports whose ranks can have the same environment, and those that need one of their own.
TOGETHER = ("nccl", "cupy_ipc", "gloo")
NVSHMEM = ("nvshmem_signal", "nvshmem_barrier")
APART = ("cudnn_summary", *NVSHMEM)
#: (global tokens, heads): small with sequences that end anywhere, and those of the published results.
SMALL = (2048, 4)
PUBLISHED = ((1024, 4), (4096, 8), (8192, 16))
#: Limit of a case; the first one compiles FLA's kernels.
WATCHDOG_S = 150.0


@pytest.fixture(scope="module", autouse=True)
def _mps() -> Iterator[None]:
    """Start a daemon, unless the one that started pytest has."""
    from cptransport.launch import MpsDaemon, MpsUnavailableError, daemon_environment

    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ or torch.cuda.device_count() != 1:
        yield
        return
    try:
        daemon = MpsDaemon(daemon_environment())
    except MpsUnavailableError:
        yield
        return
    with daemon:
        os.environ.update(daemon.environment)
        yield
        for name in daemon.environment:
            del os.environ[name]


def _ranks(backend: str, ranks: int) -> RankPool:
    """Return fresh ranks with what a backend wants to be set, sharing a GPU if there are too few."""
    per_device = 1 if torch.cuda.device_count() >= ranks else ranks
    env = advised_environment(backend, torch.device("cuda"))
    if per_device > 1:
        env.update(sharing_environment(ranks, mps="CUDA_MPS_PIPE_DIRECTORY" in os.environ))
    return RankPool(backend, ranks, per_device, device="cuda", env=env)


def _first_configurations() -> None:
    """Let FLA's kernels take their first candidate."""
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
    """Output and gradients of this rank's part of FLA's KDA."""
    from fla.ops.kda import chunk_kda

    leaves = {name: x.detach().clone().requires_grad_() for name, x in packed.items()}
    o, _ = chunk_kda(**leaves, cp_context=context, use_qk_l2norm_in_kernel=True)
    weights = torch.Generator(o.device).manual_seed(rank)
    o.backward(torch.randn(o.shape, generator=weights, device=o.device, dtype=o.dtype))
    torch.cuda.synchronize()
    return [o.detach(), *(leaf.grad for leaf in leaves.values() if leaf.grad is not None)]


def _differences(
    ranks: Ranks,
    backends: Sequence[str],
    layout: str,
    tokens: int,
    heads: int,
    size: int,
    packed: bool,
) -> dict[str, list[float]]:
    """Return per transport the largest differences inside and after the routed block, and its calls."""
    from fla.ops.cp import build_cp_context

    _first_configurations()
    ends = [0, tokens // 20, tokens // 3, tokens] if packed else [0, tokens]
    cu_seqlens = torch.tensor(ends, dtype=torch.int32, device=ranks.device)
    group = dist.group.WORLD
    context = build_cp_context(cu_seqlens, group, layout=layout)
    local = tokens // ranks.world_size
    made = torch.Generator(ranks.device).manual_seed(7 + ranks.rank)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(1, local, heads, *shape, generator=made, device=ranks.device)

    inputs = {name: normal(size).bfloat16() for name in ("q", "k", "v")}
    inputs["g"] = -normal(size).abs() / 8
    inputs["beta"] = normal().sigmoid().bfloat16()
    plain = _step(context, inputs, ranks.rank)

    def worst(found: list[torch.Tensor]) -> float:
        assert len(found) == 6
        assert all(bool(x.abs().max() > 1e-3) for x in found)
        return max(
            (a.double() - b.double()).abs().max().item() for a, b in zip(plain, found, strict=True)
        )

    told = {"again": [worst(_step(context, inputs, ranks.rank))]}
    for backend in backends:
        transport: Any = create_transport(
            backend=backend, device=ranks.device, strict=True, timeout_s=ranks.timeout_s
        )
        with transport:
            with integration.routed(transport, group) as routing:
                inside = worst(_step(context, inputs, ranks.rank))
                again = worst(_step(context, inputs, ranks.rank))
            assert transport.stats().bytes_received > 0
            after = worst(_step(context, inputs, ranks.rank))
        told[backend] = [inside, again, after, routing.calls]
    return told


def _check(rows: list[dict[str, list[float]]], backends: Sequence[str]) -> None:
    # Two calls in the forward and backward of a step, two steps inside.
    right = {"again": [0.0], **{backend: [0.0, 0.0, 0.0, 4] for backend in backends}}
    for rank, row in enumerate(rows):
        assert row == right, f"rank {rank}"


@pytest.mark.parametrize("backends", [TOGETHER, *((one,) for one in APART)], ids=",".join)
@pytest.mark.parametrize("ranks", [2, 4, 8] if torch.cuda.device_count() >= 8 else [2, 4])
def test_kda_has_the_same_bits(backends: Sequence[str], ranks: int) -> None:
    """Packed sequences, contiguous and zigzag, over every transport."""
    tokens, heads = SMALL
    with _ranks(backends[0], ranks) as serving:
        for layout in ("contiguous", "zigzag"):
            rows = serving.run(
                _differences,
                transport=False,
                timeout_s=WATCHDOG_S,
                backends=list(backends),
                layout=layout,
                tokens=tokens,
                heads=heads,
                size=64,
                packed=True,
            )
            _check(rows, backends)


@pytest.mark.parametrize("launch", range(3))
@pytest.mark.parametrize("backend", NVSHMEM)
def test_published_shapes_in_fresh_launches(backend: str, launch: int) -> None:
    """The shapes of the published results, K = V = 128, in processes that have done nothing else."""
    ranks = 2 if backend == "nvshmem_signal" else 4
    with _ranks(backend, ranks) as serving:
        for tokens, heads in PUBLISHED:
            rows = serving.run(
                _differences,
                transport=False,
                timeout_s=WATCHDOG_S,
                backends=[backend],
                layout="contiguous",
                tokens=tokens,
                heads=heads,
                size=128,
                packed=False,
            )
            _check(rows, [backend])
