# SPDX-License-Identifier: Apache-2.0
"""Whole ops among real ranks: every composition, every load-balancing mode, and checks that fail."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from benches import bench
from torch import Tensor

from cptransport.bench import layer_ranks
from cptransport.bench.launch import placement
from cptransport.bench.rank_runs import Candidate, run_candidates
from cptransport.bench.timing import Budget
from cptransport.env import MAMBA_LOAD_BALANCING
from cptransport.transports.loopback import LoopbackTransport

RANKS = ["--backend", "gloo", "--world-size", "2"]


def rows(made: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [row for row in made["rows"] if all(row[k] == v for k, v in wanted.items())]


def test_kda_in_every_composition() -> None:
    ways = ["--composition", "gather", "--composition", "handoff", "--composition", "scan"]
    small = ["--shape", "40x2", "--key-dim", "8", "--value-dim", "4", "--baseline", "fla"]
    made = bench("kda", *RANKS, *small, *ways, "--overlap", "--engine", "torch")
    assert rows(made, status="error") == []
    good = rows(made, status="ok")
    assert {(r["options"]["composition"], r["options"]["overlap"], r["mode"]) for r in good} == {
        (how, overlap, mode)
        for how in ways[1::2]
        for overlap in (False, True)
        for mode in ("fwd", "fwd_bwd")
    }
    for row in good:
        assert (row["provider"], row["world_size"], row["shape"]["T_global"]) == ("gloo", 2, 80)
        assert len(row["samples_us"]) == 4
        assert len(row["repeat_medians_us"]) == 2
        assert row["bytes_received"] > 0
    assert [r["reason"] for r in rows(made, provider="fla")] == [
        "fla is not installed: pip install fla-core==0.6.0"
    ] * 2


def test_all_modes_of_the_mixer_and_what_they_move() -> None:
    small = ["--groups", "2", "--headdim", "4", "--dstate", "8", "--chunk-size", "16"]
    shapes = ["--shape", "32x4", "--shape", "64x4"]
    made = bench("mamba2", *RANKS, *small, *shapes, "--batch", "2", "--baseline", "all_to_all")
    assert rows(made, status="error") == []
    good = rows(made, status="ok", mode="fwd_bwd")
    moved = {(r["provider"], r["shape"]["T_local"]): r["bytes_received"] for r in good}
    assert {mode for mode, _ in moved} == set(MAMBA_LOAD_BALANCING.values)
    for mode in ("none", "virtual"):  # states and halo, whatever the length
        assert moved[mode, 32] == moved[mode, 64] > 0
    assert moved["all_to_all", 64] == 2 * moved["all_to_all", 32]
    for mode in ("permute_p2p", "permute_a2a"):
        assert moved[mode, 64] > 1.5 * moved[mode, 32]
    assert {r["provider"] for r in rows(made, baseline=True)} == {"all_to_all"}


def test_heads_that_do_not_divide_are_skipped_not_wrong() -> None:
    small = ["--groups", "1", "--headdim", "4", "--dstate", "8", "--chunk-size", "16"]
    made = bench(
        "mamba2", *RANKS, *small, "--shape", "32x3", "--load-balancing", "virtual",
        "--baseline", "all_to_all",
    )  # fmt: skip
    assert {r["reason"] for r in rows(made, status="skipped")} == {
        "3 heads do not divide by 2 ranks"
    }
    assert {r["provider"] for r in rows(made, status="ok")} == {"virtual"}


def test_an_interrupt_keeps_the_configurations_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    real, ends = layer_ranks.measure_backends, iter([False, True, True])

    def measure_backends(*args: Any, **settings: Any) -> Any:
        if next(ends):
            raise KeyboardInterrupt
        return real(*args, **settings)

    monkeypatch.setattr(layer_ranks, "measure_backends", measure_backends)
    small = ["--shape", "16x1", "--shape", "24x1", "--key-dim", "4", "--value-dim", "4"]
    made = bench("kda", *RANKS, *small, "--engine", "torch")
    assert {row["shape"]["T_local"] for row in made["rows"]} == {16}
    assert "interrupted after 1 of 2 configurations" in made["method"]["interleaving"]
    with pytest.raises(KeyboardInterrupt):  # nothing came before it
        bench("kda", *RANKS, *small, "--engine", "torch")


def test_a_rank_whose_check_fails_goes_on() -> None:
    ran: list[str] = []

    def run(mode: str) -> list[Tensor]:
        ran.append(mode)
        return [torch.ones(1)]

    def wrong(results: Sequence[Tensor]) -> float:
        raise AssertionError("off by one")

    transport = LoopbackTransport(torch.device("cpu"), 5.0)
    found = run_candidates(
        [
            Candidate("bad", run, wrong),
            Candidate("peer", run, wrong, foreign=True),
            Candidate("good", run, lambda results: 0.0),
        ],
        transport,
        Budget(1, 2),
    )
    said = {(key.provider, key.mode): outcome for key, outcome in found}
    assert said["bad", "fwd"].error == "verification failed: off by one"
    assert said["bad", "fwd"].samples_us == []
    assert said["peer", "fwd"].skipped == "not measured: verification failed: off by one"
    assert (said["peer", "fwd"].error, said["peer", "fwd"].samples_us) == (None, [])
    assert len(said["good", "fwd_bwd"].samples_us) == 2
    assert ran.count("fwd") == 3 * (2 + 2 * 3)  # check, peak; per iteration an untimed one and one


def test_threads_and_ranks_that_share_several_gpus_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(ValueError, match="threads share one autograd"):
        bench("kda", "--backend", "threads", "--world-size", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    args = argparse.Namespace(device="cuda", world_size=4, ranks_per_device=2)
    with pytest.raises(ValueError, match="ranks share one GPU or none"):
        placement(args)
    args.ranks_per_device = None
    assert placement(args).shared
    args.world_size = 2
    assert (placement(args).per_device, placement(args).gpus_used) == (1, 2)
