# SPDX-License-Identifier: Apache-2.0
"""Peers of the whole-op benches: verified like ours, and a clear word where they cannot run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from test_among_ranks import bench, rows
from torch import Tensor

from cptransport.bench import baselines
from cptransport.bench.baselines import NotHereError, Peer, Place, load_peers
from cptransport.bench.report import blocks
from cptransport.bench.tuning import TuningLimitError, tuning
from cptransport.context import CPContext
from cptransport.ops import chunk_kda
from cptransport.plan import build_plan
from cptransport.transports.loopback import LoopbackTransport

SMALL = ["--shape", "40x2", "--key-dim", "8", "--value-dim", "4", "--engine", "torch"]


def plain(place: Place, factor: float = 1.0) -> list[Peer]:
    """A peer without context parallelism."""
    transport = LoopbackTransport(place.device, 5.0)
    cp = CPContext(build_plan([0, place.local(0)["q"].shape[1]], world_size=1), transport)

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        return factor * chunk_kda(**inputs, cp_context=cp, engine="torch")[0]

    return [Peer("fla-no-cp", call), Peer("fla", call, cp=True)]


def test_a_peer_is_compared_under_a_green_gate_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(baselines.BASELINES["kda"], "fla", lambda place: plain(place)[:1])  # type: ignore[index]
    made = bench("kda", *SMALL, "--baseline", "fla")
    assert rows(made, status="error") == []
    assert {r["baseline"] for r in rows(made, provider="fla-no-cp", status="ok")} == {True}
    text = repr(blocks(made))
    assert "Against baselines" in text
    assert "time ratio" in text


def test_a_peer_that_computes_something_else_has_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """And takes nothing from what was right."""
    monkeypatch.setitem(baselines.BASELINES["kda"], "fla", lambda place: plain(place, 1.01))  # type: ignore[index]
    made = bench("kda", *SMALL, "--baseline", "fla")
    skipped = rows(made, status="skipped", timer="perf_counter")
    assert {r["provider"] for r in skipped} == {"fla", "fla-no-cp"}
    assert all("not measured: AssertionError: " in r["reason"] for r in skipped)
    assert rows(made, status="error") == []
    assert {r["provider"] for r in rows(made, status="ok")} == {"cptransport", "cptransport-cp"}


def test_a_peer_without_its_context_parallelism_is_not_the_sharded_op(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What needs the incoming state is checked against ranks that have one."""
    monkeypatch.setitem(baselines.BASELINES["kda"], "fla", plain)  # type: ignore[index]
    made = bench("kda", *SMALL, "--gate-mean", "-0.01", "--baseline", "fla")
    (first, *_) = rows(made, provider="fla")
    assert "o of fla is off by" in first["reason"]
    assert len(rows(made, provider="fla-no-cp", status="ok")) == 2


def place(**changes: Any) -> Place:
    x = {
        "q": torch.zeros(1, 8, 2, 128, dtype=torch.bfloat16),
        "v": torch.zeros(1, 8, 2, 128, dtype=torch.bfloat16),
        "g": torch.full((1, 8, 2, 128), -1.0),
    }
    values: dict[str, Any] = {
        "op": "kda",
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "rank": 1,
        "world_size": 2,
        "local": lambda rank: x,
        "grad": lambda rank: x["v"],
        "options": {},
        "limit_s": 5.0,
    }
    return Place(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"op": "ssd"}, "no Mamba2 on this GPU"),
        ({"dtype": torch.float32}, "takes bfloat16"),
        (
            {
                "local": lambda rank: {
                    "q": torch.zeros(1, 8, 1, 128),
                    "v": torch.zeros(1, 8, 2, 128),
                }
            },
            "value heads",
        ),
        (
            {
                "local": lambda rank: {
                    "q": torch.zeros(1, 8, 2, 128),
                    "v": torch.zeros(1, 8, 2, 128),
                    "g": torch.full((1, 8, 2, 128), -6.0),
                }
            },
            "overflow",
        ),
    ],
)
def test_what_cudnn_does_not_take(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(baselines, "peer_module", lambda *_: SimpleNamespace())
    (peer,) = load_peers("cudnn", place(**changes))
    assert peer.call is None
    assert peer.absent is not None
    assert says in peer.absent


def test_absent_peers_say_how_to_get_them() -> None:
    for name, op, says in (
        ("fla", "kda", "pip install fla-core"),
        ("cudnn", "kda", "pip install nvidia-cudnn-frontend"),
        ("mamba_ssm", "ssd", "pip install mamba-ssm"),
    ):
        if name in sys.modules:
            continue
        (peer,) = load_peers(name, place(op=op, options={"chunk_size": 64}))
        assert says in str(peer.absent)


def test_tuning_compiles_all_candidates_and_ends_at_its_limit() -> None:
    autotuner = pytest.importorskip("triton.runtime.autotuner")
    compiled: list[dict[str, Any]] = []
    configs = [SimpleNamespace(all_kwargs=lambda n=n: {"num_warps": n}) for n in (1, 2)]
    kernel = SimpleNamespace(run=lambda **kwargs: compiled.append(kwargs))
    tuner = SimpleNamespace(
        configs=configs, early_config_prune=None, perf_model=None, nargs={"x": 3}, fn=kernel
    )
    prune, bench_one = autotuner.Autotuner.prune_configs, autotuner.Autotuner._bench
    with tuning(30.0):
        assert autotuner.Autotuner.prune_configs(tuner, {"grid": (1,), "warmup": False}) == configs
    assert [c["num_warps"] for c in compiled] == [1, 2]
    assert all(c["warmup"] and c["x"] == 3 for c in compiled)
    with tuning(0.01):
        time.sleep(0.05)
        with pytest.raises(TuningLimitError, match="more than 0.01 s"):
            autotuner.Autotuner._bench(tuner, config=configs[0])
    assert (autotuner.Autotuner.prune_configs, autotuner.Autotuner._bench) == (prune, bench_one)


@pytest.fixture
def fake_fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """FLA's modules as far as ``Alone`` touches them."""
    names = ("fla", "fla.ops", "fla.ops.cp", "fla.ops.cp.context", "fla.ops.cp.chunk_delta_h")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["fla.ops.cp.context"].get_cp_cu_seqlens = (  # type: ignore[attr-defined]
        lambda whole, world_size, rank: SimpleNamespace(group=None, rank=rank)
    )
    recurrences = modules["fla.ops.cp.chunk_delta_h"]
    recurrences.dist = torch.distributed  # type: ignore[attr-defined]
    recurrences.all_gather_into_tensor = lambda *_, **__: "over a group"  # type: ignore[attr-defined]
    return recurrences


def test_fla_alone_gets_what_every_rank_contributed(fake_fla: Any) -> None:
    from cptransport.bench.fla_cp import Alone

    alone = Alone(3, 16, torch.device("cpu"))
    gather = fake_fla.all_gather_into_tensor

    def step() -> tuple[Tensor, Tensor]:
        with alone.forward() as context:
            assert context.rank == alone.rank == fake_fla.dist.get_rank(context.group)
            assert fake_fla.dist.get_world_size(context.group) == 3
            there, _ = gather(torch.full((2,), 1.0 + alone.rank), group=context.group)
        back, _ = gather(torch.full((2,), 10.0 + alone.rank), group=alone)
        return there, back

    for rank in range(3):
        with alone.recorded(rank):
            step()
    alone.replay(1)
    for _ in range(2):
        there, back = step()
        assert there.tolist() == [[1.0] * 2, [2.0] * 2, [3.0] * 2]
        assert back.tolist() == [[10.0] * 2, [11.0] * 2, [12.0] * 2]
    assert gather(torch.zeros(1), group="another") == "over a group"
    assert alone.cu_seqlens.tolist() == [0, 16]


def test_a_reason_is_no_error() -> None:
    def absent(place: Place) -> list[Peer]:
        raise NotHereError("not today")

    before = dict(baselines.BASELINES["kda"])
    try:
        baselines.BASELINES["kda"]["cudnn"] = absent  # type: ignore[index]
        made = bench("kda", *SMALL, "--baseline", "cudnn")
    finally:
        baselines.BASELINES["kda"].update(before)  # type: ignore[attr-defined]
    assert {(r["status"], r["reason"]) for r in rows(made, provider="cudnn")} == {
        ("skipped", "not today")
    }
