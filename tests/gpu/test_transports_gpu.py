# SPDX-License-Identifier: Apache-2.0
"""The contract suite and the op oracle on GPU transports, with 2 and 4 ranks on one GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cptransport.errors import BackendUnavailableError
from cptransport.launch import sharing_environment
from cptransport.select import create_transport
from cptransport.testing import Ranks, close_pools, pool
from cptransport.testing.contract import TransportContract
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import RankRun, run_specs

pytestmark = pytest.mark.gpu

#: A case that hangs must not use up the time of a leased GPU.
WATCHDOG_S = 40.0


def shared(ranks: int) -> dict[str, str]:
    return sharing_environment(ranks, mps="CUDA_MPS_PIPE_DIRECTORY" in os.environ)


class SharedGpu(TransportContract):
    """All ranks on one GPU."""

    __test__ = False
    device = "cuda"
    timeout_s = 8.0

    def make_options(self) -> dict[str, str]:
        return shared(self.ranks_per_device)

    def run(
        self, case: Callable[..., Any], world_size: int, *, watchdog_s: float = 0, **kwargs: Any
    ) -> list[Any]:
        return super().run(case, world_size, watchdog_s=watchdog_s or WATCHDOG_S, **kwargs)


class TestNccl2(SharedGpu):
    backend, world_sizes, ranks_per_device = "nccl", (2,), 2


class TestNccl4(SharedGpu):
    backend, world_sizes, ranks_per_device = "nccl", (4,), 4


class TestCupyIpc2(SharedGpu):
    backend, world_sizes, ranks_per_device = "cupy_ipc", (2,), 2


class TestCupyIpc4(SharedGpu):
    backend, world_sizes, ranks_per_device = "cupy_ipc", (4,), 4


class TestGloo2(SharedGpu):
    """CUDA tensors through the host."""

    backend, world_sizes, ranks_per_device = "gloo", (2,), 2


# ----------------------------------------------------------------------------------------------- ops

SEQUENCES = [0, 70, 71, 71, 200, 333]
OPTIONAL = {
    "kda": ("A_log", "dt_bias", "initial_state"),
    "ssd": ("D", "z", "dt_bias", "initial_states"),
    "conv1d": ("bias", "residual", "initial_state"),
    "mixer": ("conv1d_bias", "initial_states"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "kda": {"use_gate_in_kernel": True, "use_qk_l2norm_in_kernel": True},
    "ssd": {"chunk_size": 16, "dt_softplus": True},
    "conv1d": {"activation": "silu"},
    "mixer": {"chunk_size": 16},
}


def spec_of(op: str, **changes: Any) -> OpSpec:
    spec = OpSpec(
        op, SEQUENCES, layout="zigzag", optional=OPTIONAL[op], options=OPTIONS[op], seed=3
    )
    return spec.with_(**changes)


SPECS = {
    **{
        f"{op}-torch-{how}": spec_of(op, engine="torch", composition=how, overlap=how == "gather")
        for op in ("kda", "ssd")
        for how in ("gather", "handoff")
    },
    "conv1d": spec_of("conv1d"),
    "mixer-torch": spec_of("mixer", engine="torch"),
    "kda-torch-fp64": spec_of("kda", engine="torch", dtype="float64", layout="contiguous"),
    "kda-triton-fp32": spec_of("kda", engine="triton", key_dim=32, value_dim=64),
    "kda-triton-bf16": spec_of(
        "kda", engine="triton", key_dim=128, value_dim=128, dtype="bfloat16", gate_dtype="float32"
    ),
}


@functools.cache
def runs(backend: str, ranks: int, name: str) -> list[RankRun]:
    """Run a spec on the ranks of a backend, forward and backward."""
    spec = SPECS[name].with_(world_size=ranks)
    serving = pool(backend, ranks, ranks, device="cuda", env=shared(ranks))
    results = serving.run(run_specs, timeout_s=2 * WATCHDOG_S, specs=[spec.to_json()])
    return [rank[0] for rank in results]


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["nccl", "cupy_ipc"])
class TestOps:
    def test_oracle(self, backend: str, ranks: int, name: str) -> None:
        """Outputs, states, every gradient and the counted bytes, against fp64 on the whole."""
        check(OpCase.of(SPECS[name].with_(world_size=ranks)), runs(backend, ranks, name))

    def test_bits_are_those_of_gloo(self, backend: str, ranks: int, name: str) -> None:
        """A transport does not change one bit."""
        for rank, (mine, other) in enumerate(
            zip(runs(backend, ranks, name), runs("gloo", ranks, name), strict=True)
        ):
            assert mine.record is not None
            assert (mine.record.transport, mine.record.engine) == (backend, _engine(name))
            found = {"output": mine.output, "final": mine.final, **mine.grads}
            right = {"output": other.output, "final": other.final, **other.grads}
            different = [key for key in right if not torch.equal(found[key], right[key])]
            assert not different, f"rank {rank}: {different}"


def _engine(name: str) -> str | None:
    engine = SPECS[name].engine
    return "torch" if engine is None else engine


# ------------------------------------------------------------------------------------------ choosing


def _nccl_without_help(ranks: Ranks) -> list[str]:
    try:
        create_transport(backend="nccl", device=ranks.device, strict=True, timeout_s=20)
    except BackendUnavailableError as error:
        refusal = str(error)
    else:
        refusal = "it served"
    with pytest.warns(UserWarning, match="cannot serve here, 'gloo' runs instead"):
        transport = create_transport(backend="nccl", device=ranks.device, strict=False)
    with transport:  # type: ignore[attr-defined]
        transport.barrier()
        return [refusal, transport.selection.chosen, transport.selection.passed_over[0][1]]


def test_nccl_refuses_ranks_that_share_a_gpu_without_help() -> None:
    """Strict: an error on all ranks that says the way out; else all fall back together."""
    plain = {**shared(2), "NCCL_HOSTID": ""}
    try:
        rows = pool("nccl", 2, 2, device="cuda", env=plain).run(_nccl_without_help, transport=False)
    finally:
        close_pools()
    for refusal, chosen, reason in rows:
        assert "ranks [0, 1] share one GPU" in refusal
        assert "NCCL_HOSTID" in refusal
        assert chosen == "gloo"
        assert "share one GPU" in reason
