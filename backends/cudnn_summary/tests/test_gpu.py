# SPDX-License-Identifier: Apache-2.0
"""Engine ``cudnn`` with cuDNN itself, on one GPU.

::

    pip install nvidia-cudnn-frontend==1.32.0 apache-tvm-ffi
    PYTHONPATH=.:kernels:backends/nccl:backends/cupy_ipc:backends/cudnn_summary \
        python3 -m pytest -q backends/cudnn_summary/tests/test_gpu.py -m gpu

Ranks share the GPU, through MPS where it starts. ``-k alone`` needs one process and a minute.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from packed import both_ways
from torch import Tensor

from cptransport.engine_registry import load_engine
from cptransport.engines import KDAInputs, KDAOptions, LocalSegment, Need, OpFacts, OutputGrads
from cptransport.launch import (
    MpsDaemon,
    MpsUnavailableError,
    daemon_environment,
    sharing_environment,
)
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check
from cptransport.testing.op_rank import RankRun, run_rank, run_specs
from cptransport.testing.pool import RankPool
from cptransport.transports import loopback, threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        find_spec("cudnn") is None,
        reason="cuDNN's frontend is not installed: pip install nvidia-cudnn-frontend",
    ),
]

WATCHDOG_S = 90.0
#: Chains over all ranks, a single token, an empty sequence.
PACKED = [0, 70, 71, 71, 200, 333]
ALL = {
    "use_gate_in_kernel": True,
    "lower_bound": -5.0,
    "safe_gate": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "state_v_first": True,
    "scale": 0.05,
}


def spec_of(**changes: Any) -> OpSpec:
    spec = OpSpec(
        "kda",
        PACKED,
        heads=2,
        value_heads=2,
        key_dim=128,
        value_dim=128,
        dtype="bfloat16",
        gate_dtype="float32",
        engine="cudnn",
        optional=("initial_state",),
        seed=3,
    )
    return spec.with_(**changes)


SPECS = {
    **{
        f"gate{gate:g}-{layout}": spec_of(gate=gate, layout=layout)
        for gate in (-0.01, -1.0, -5.0)
        for layout in ("contiguous", "zigzag")
    },
    "random-scan": spec_of(composition="scan"),
    "options": spec_of(
        options=ALL, optional=("A_log", "dt_bias", "initial_state"), value_heads=4, layout="zigzag"
    ),
    "long": spec_of(cu_seqlens=[0, 1024], layout="zigzag", optional=(), loss=("output",)),
}


def verify(spec: OpSpec, runs: list[RankRun], transport: str, *, dense: bool = False) -> None:
    """Check a call and what it ran on."""
    for each in runs:
        assert each.record is not None
        assert (each.record.engine, each.record.transport) == ("cudnn", transport)
        assert "cuDNN frontend" in each.record.detail
    check(OpCase.of(spec), runs, exact_bytes=not dense)


class TestAlone:
    """One process: one rank, and ranks that are threads on one GPU."""

    @pytest.mark.parametrize("name", SPECS)
    def test_one_rank(self, name: str) -> None:
        spec = SPECS[name].with_(world_size=1)
        with loopback.BACKEND.create(None, torch.device("cuda", 0), 30.0) as transport:
            verify(spec, [run_rank(transport, OpCase.of(spec))], "loopback")

    @pytest.mark.parametrize("interior", ["triton", "identity"])
    @pytest.mark.parametrize("name", SPECS)
    def test_four_threads(self, name: str, interior: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Both ways to summarise interior segments, with the explicit forward and backward."""
        monkeypatch.setenv("CULA_CP_CUDNN_INTERIOR", interior)
        spec = SPECS[name].with_(world_size=4, explicit=True)
        case = OpCase.of(spec)
        torch.linalg.inv(torch.ones(1, 1, device="cuda"))  # loaded before the threads start
        runs = threads.run(lambda t: run_rank(t, case), 4, WATCHDOG_S, device="cuda:0")
        for each in runs:
            assert each.record is not None
            assert f"interior segments by {interior}" in each.record.detail
        verify(spec, runs, "threads")

    @pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
    def test_packed_tokens_without_a_batch_axis(self, layout: str) -> None:
        case = OpCase.of(spec_of(world_size=3, layout=layout, gate=-1.0))
        torch.linalg.inv(torch.ones(1, 1, device="cuda"))  # loaded before the threads start
        for thd, batched in threads.run(
            lambda t: both_ways(t, case), 3, WATCHDOG_S, device="cuda:0"
        ):
            assert {name for name, x in batched.items() if x.any()} == {*batched}
            for name, x in batched.items():
                assert torch.equal(thd[name][None], x), name

    @pytest.mark.parametrize("gate", [-0.01, -5.0])
    @pytest.mark.parametrize("interior", ["triton", "identity"])
    def test_neither_waits_for_the_device_nor_breaks_capture(
        self, interior: str, gate: float, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CULA_CP_CUDNN_INTERIOR", interior)
        step = interior_rank(500, 2, gate)
        step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        eager = {name: x.clone() for name, x in eager.items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(3):
            for x in captured.values():
                x.fill_(torch.nan)
            graph.replay()
            torch.cuda.synchronize()
            different = [n for n, x in eager.items() if not torch.equal(captured[n], x)]
            assert not different

    def test_what_is_not_served_is_known_before_the_first_step(self) -> None:
        engine = load_engine("kda", "cudnn")
        assert engine.eligible(facts()) is None
        assert "nothing says" in str(engine.eligible(facts(named=False)))
        assert engine.eligible(facts(named=False, options={"safe_gate": True})) is None
        for changes in (
            {"dtypes": dict.fromkeys("qkv", torch.float32)},
            {"key_dim": 100},
            {"device_type": "cpu"},
        ):
            reason = engine.eligible(facts(**changes))
            assert reason, changes
        if torch.cuda.get_device_capability()[0] == 9:
            reason = engine.eligible(facts(options={"use_beta_sigmoid_in_kernel": True}))
            assert reason is None, "applied outside"
            negative = {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}
            assert "does not serve" in str(engine.eligible(facts(options=negative)))
        else:
            assert "interior segments by summary" in engine.detail(facts())  # type: ignore[attr-defined]


def facts(*, options: Any = None, **changes: Any) -> OpFacts:
    made = OpFacts(
        op="kda",
        device_type="cuda",
        world_size=2,
        batch=1,
        heads=2,
        value_heads=2,
        key_dim=128,
        value_dim=128,
        dtypes=dict.fromkeys("qkv", torch.bfloat16),
        state_dtype=torch.float32,
        max_segments=1,
        max_tokens=64,
        requires_grad=frozenset(),
        options=KDAOptions(scale=128**-0.5, **(options or {})),
        named=True,
    )
    return replace(made, **changes)


def interior_rank(tokens: int, heads: int, gate: float) -> Any:
    """Return an interior rank's forward and backward, ready to run: results by name."""
    engine = load_engine("kda", "cudnn")
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    unit = torch.nn.functional.normalize
    q, k = (unit(normal(1, tokens, heads, 128), dim=-1).bfloat16() for _ in range(2))
    v, do = (normal(1, tokens, heads, 128).bfloat16() for _ in range(2))
    g = gate * torch.rand(1, tokens, heads, 128, generator=generator, device="cuda")
    beta = normal(1, tokens, heads).sigmoid()
    inputs = KDAInputs(q, k, v, g, beta, None, None, None, KDAOptions(scale=128**-0.5))
    tables = [normal(1, heads, 128, 128) for _ in range(2)]
    out = {name: torch.empty_like(tables[0]) for name in ("state", "transition")}
    segments, need = [LocalSegment(0, tokens, 0, False, False)], [Need(True, True)]

    def step() -> dict[str, Tensor]:
        local = engine.forward_local(inputs, segments, need, out)
        results = {f"forward {name}": x.clone() for name, x in out.items()}
        finished = engine.forward_finish(local, lambda: tables[0])
        back = engine.backward_local(finished.saved, OutputGrads(do, None), need, out)
        results.update({f"backward {name}": x.clone() for name, x in out.items()})
        grads = engine.backward_finish(back, lambda: tables[1])
        results.update(o=finished.output, incoming=grads.incoming)
        results.update({n: x for n, x in grads.inputs.items() if x is not None})
        return results

    return step


@pytest.fixture(scope="module")
def mps() -> Iterator[None]:
    """Start MPS for the ranks, unless whoever started pytest has; without it they take turns."""
    if "CUDA_MPS_PIPE_DIRECTORY" in os.environ:
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
        _end_ranks()
        for name in daemon.environment:
            del os.environ[name]


_pools: dict[int, RankPool] = {}


def _end_ranks() -> None:
    while _pools:
        _pools.popitem()[1].close()


def ranks_of(ranks: int, backend: str) -> RankPool:
    """Return so many ranks whose transports are a backend's."""
    if ranks not in _pools:
        _end_ranks()  # shares of the GPU must not add up to more than all of it
        shared = sharing_environment(ranks, mps="CUDA_MPS_PIPE_DIRECTORY" in os.environ)
        _pools[ranks] = RankPool(backend, ranks, ranks, device="cuda", env=shared)
    _pools[ranks].backend = backend
    return _pools[ranks]


@functools.cache
def runs(backend: str, ranks: int) -> dict[str, list[RankRun]]:
    """Run all specs on the ranks of a backend, in one go."""
    specs = {name: spec.with_(world_size=ranks) for name, spec in SPECS.items()}
    results = ranks_of(ranks, backend).run(
        run_specs, timeout_s=WATCHDOG_S, specs=[spec.to_json() for spec in specs.values()]
    )
    return {name: [rank[i] for rank in results] for i, name in enumerate(specs)}


BACKENDS = ["gloo", "nccl", "cupy_ipc", "cudnn_summary"]


@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize("backend", ["nccl", "cudnn_summary"])
def test_auto_takes_what_the_backend_prefers_where_it_serves(backend: str) -> None:
    """Elsewhere ``triton``, with the reason; on a Hopper without preference what the table says."""
    bounded = SPECS["options"].with_(engine=None, layout="contiguous")
    cases = {
        "bounded": bounded,
        "unbounded": bounded.with_(options={**ALL, "safe_gate": False, "lower_bound": None}),
    }
    found = ranks_of(2, backend).run(
        run_specs,
        timeout_s=WATCHDOG_S,
        specs=[spec.with_(world_size=2).to_json() for spec in cases.values()],
    )
    for index, (name, spec) in enumerate(cases.items()):
        own = [rank[index] for rank in found]
        check(OpCase.of(spec.with_(world_size=2)), own, exact_bytes=backend != "cudnn_summary")
        records = [each.record for each in own]
        assert all(record is not None for record in records)
        if backend == "cudnn_summary":
            assert {record.engine for record in records} == {
                "cudnn" if name == "bounded" else "triton"
            }
            reasons = [dict(record.reasons).get("cudnn", "") for record in records]
            assert all(("nothing says" in reason) is (name == "unbounded") for reason in reasons)
        elif torch.cuda.get_device_capability()[0] == 9:
            assert {record.engine for record in records} == {"triton"}  # no such shape in the table


@pytest.mark.usefixtures("mps")
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [*((2, backend) for backend in BACKENDS), (4, "nccl"), (4, "cudnn_summary")],
)
class TestRanks:
    def test_oracle(self, ranks: int, backend: str, name: str) -> None:
        """Outputs, states, every gradient and the counted bytes, against fp64 on the whole."""
        found = runs(backend, ranks)[name]
        spec = SPECS[name].with_(world_size=ranks)
        verify(spec, found, backend, dense=backend == "cudnn_summary")

    def test_bits_are_those_of_the_first(self, ranks: int, backend: str, name: str) -> None:
        """A transport does not change one bit."""
        first = BACKENDS[0] if ranks == 2 else "nccl"
        for mine, other in zip(runs(backend, ranks)[name], runs(first, ranks)[name], strict=True):
            pairs = {"output": (mine.output, other.output), "final": (mine.final, other.final)}
            pairs.update({n: (grad, other.grads[n]) for n, grad in mine.grads.items()})
            assert not [n for n, (a, b) in pairs.items() if not torch.equal(a, b)]
