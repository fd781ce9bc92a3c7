# SPDX-License-Identifier: Apache-2.0
"""The demo: it is right when the library is, and says so when it is not."""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from cptransport.cli import demo as command
from cptransport.cli import main
from cptransport.context import CPContext
from cptransport.demo import LIMIT, Outcome, RankError, Settings, Step, run_demo, table
from cptransport.demo import train as train_module
from cptransport.demo.model import HybridModel
from cptransport.demo.text import load_documents, pack
from cptransport.ops import call as call_module

PARAMETERS = [name for name, _ in HybridModel(0).named_parameters()]
TINY = ["demo", "--backend", "threads", "--ranks", "3", "--steps", "2", "--tokens", "97"]


def lines(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(start)]


# ----------------------------------------------------------------------------------------------- text


def test_the_text_is_a_book_and_its_source_is_stated() -> None:
    documents = load_documents()
    assert 100_000 < sum(map(len, documents)) < 200_000
    assert all(b"\n\n" not in each and each.isascii() for each in documents)
    assert b"White Rabbit" in b"".join(documents)
    source = Path(train_module.__file__).with_name("data") / "SOURCE.txt"
    assert "public domain" in source.read_text(encoding="utf-8")


def test_packing_keeps_documents_apart() -> None:
    documents = (b"abc", b"de", b"fghij")
    batch = pack(documents, 12, torch.Generator().manual_seed(1))
    offsets = batch.cu_seqlens
    assert offsets[0] == 0
    assert offsets[-1] == len(batch.tokens) == len(batch.targets) == 12
    for start, stop in zip(offsets, offsets[1:], strict=False):
        tokens, targets = batch.tokens[start:stop].tolist(), batch.targets[start:stop].tolist()
        assert targets == [*tokens[1:], 0]
        assert any(document.startswith(bytes(tokens)) for document in documents)


# ---------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "zigzag_per_sequence"])
def test_demo_is_equal_and_says_so(
    layout: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "demo.png"
    assert main([*TINY, "--layout", layout, "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    for name in PARAMETERS:
        (row,) = lines(printed, f"d {name} ")
        assert float(row.split()[-1]) <= LIMIT
    (row,) = lines(printed, "last step (2)")
    assert row.split()[3] == row.split()[4]  # six digits of the loss, both ways
    (row,) = lines(printed, "transport ")
    assert "threads, asked for threads (argument); 3 ranks" in row
    (row,) = lines(printed, "last op ")
    assert "engine torch, transport threads" in row
    assert lines(printed, "received ")
    (row,) = lines(printed, "verdict ")
    assert f"all {len(PARAMETERS) + 1} within 1e-05" in row


def test_the_loss_falls() -> None:
    settings = Settings(ranks=2, steps=12, backend="threads", tokens=151)
    steps = run_demo(settings, lambda step: None).steps
    assert [step.number for step in steps] == list(range(1, 13))
    assert steps[0].sharded > 5
    assert steps[-1].sharded < steps[0].sharded - 1


def test_ranks_without_tokens_take_part() -> None:
    outcome = run_demo(Settings(ranks=4, steps=1, backend="threads", tokens=3), lambda step: None)
    assert outcome.equal
    assert len(outcome.ranks) == 4


# ------------------------------------------------------------------------- what is wrong is reported


def wrong_gradient(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Lose one rank's contribution to a gradient, where the sequence is sharded."""
    run_backward = call_module.run_backward

    def corrupted(call: Any, *args: Any) -> Any:
        grads, initial = run_backward(call, *args)
        transport = call.context.transport
        if transport.world_size > 1 and transport.rank == 1 and grads.get(name) is not None:
            grads[name] = torch.zeros_like(grads[name])
        return grads, initial

    monkeypatch.setattr(call_module, "run_backward", corrupted)


def test_a_wrong_gradient_fails_the_demo(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong_gradient(monkeypatch, "A_log")
    assert main([*TINY, "--plot", str(tmp_path / "demo.png")]) == 1
    printed = capsys.readouterr().out
    marked = [line for line in printed.splitlines() if line.endswith("ABOVE THE LIMIT")]
    assert [line.split()[1] for line in marked] == ["kda.A_log"]
    (row,) = lines(printed, "verdict ")
    assert f"DIFFERENT: 1 of {len(PARAMETERS) + 1}" in row
    assert row.endswith("kda.A_log")


def test_a_wrong_sum_over_ranks_fails_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    add_up = train_module._add_up
    monkeypatch.setattr(
        train_module, "_add_up", lambda total, *local: add_up(lambda each: total(each) / 2, *local)
    )
    outcome = run_demo(Settings(ranks=2, steps=1, backend="threads", tokens=41), lambda step: None)
    assert not outcome.equal
    assert outcome.largest() == pytest.approx(dict.fromkeys(["loss", *PARAMETERS], 0.5), rel=1e-3)


@pytest.mark.parametrize("reference", [math.nan, math.inf])
def test_a_reference_that_is_not_finite_is_a_difference(reference: float) -> None:
    expected = torch.full((3,), reference)
    assert train_module._difference(expected.clone(), expected) == math.inf


@pytest.mark.parametrize(
    ("actual", "difference"),
    [(0.0, 0.0), (-2e-3, 2e-3), (math.inf, math.inf), (math.nan, math.inf)],
)
def test_a_difference_to_zeros_is_absolute(actual: float, difference: float) -> None:
    found = train_module._difference(torch.tensor([0.0, actual]), torch.zeros(2))
    assert found == pytest.approx(difference)


def test_one_token_has_gates_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other zeros: in longer streams every reference shows something."""
    difference = train_module._difference
    zeros: list[bool] = []

    def noted(actual: torch.Tensor, expected: torch.Tensor) -> float:
        zeros.append(not expected.any())
        return difference(actual, expected)

    monkeypatch.setattr(train_module, "_difference", noted)
    for tokens, without in ((41, []), (1, ["A_log", "dt_bias", "gate.weight", "A_log"])):
        zeros.clear()
        settings = Settings(ranks=2, steps=1, backend="threads", tokens=tokens)
        assert run_demo(settings, lambda step: None).equal
        names = [n for n, zero in zip(["loss", *PARAMETERS], zeros, strict=True) if zero]
        assert [name.partition(".")[2] for name in names] == without


def test_the_worst_step_counts() -> None:
    steps = [Step(n, 1, 2.0, 2.0, {"loss": d}) for n, d in ((1, 1e-7), (2, 3e-5), (3, 1e-6))]
    shown = run_demo(Settings(ranks=1, steps=1, backend="threads", tokens=9), lambda step: None)
    outcome = Outcome(shown.settings, tuple(steps), shown.ranks)
    assert not outcome.equal
    assert "3.0e-05  ABOVE THE LIMIT" in table(outcome)


# ----------------------------------------------------------------------------------- ranks that fail


def test_a_failing_rank_ends_all_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward = HybridModel.forward

    def fails(self: HybridModel, tokens: Any, targets: Any, cp: CPContext) -> Any:
        if cp.transport.rank == 1:
            raise ValueError("broken\non purpose")
        return forward(self, tokens, targets, cp)

    monkeypatch.setattr(HybridModel, "forward", fails)
    assert main(TINY) == 3
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("rank 1 failed: ValueError: broken on purpose")


def test_cuda_without_a_device_is_said_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 3
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_processes_give_what_threads_give() -> None:
    settings = {"ranks": 2, "steps": 2, "tokens": 97}
    seen: list[Step] = []
    processes = run_demo(Settings(backend="gloo", **settings), seen.append)
    threads = run_demo(Settings(backend="threads", **settings), lambda step: None)
    assert processes.equal
    assert [rank.selection.chosen for rank in processes.ranks] == ["gloo", "gloo"]
    assert seen == list(processes.steps) == list(threads.steps)  # to the last bit
    assert [r.received for r in processes.ranks] == [r.received for r in threads.ranks]


def test_a_rank_that_dies_ends_the_others() -> None:
    def kill(step: Step) -> None:
        for child in multiprocessing.active_children():
            if child.name == "cpt-demo-1" and child.pid is not None:
                os.kill(child.pid, signal.SIGKILL)

    settings = Settings(ranks=2, steps=10_000, backend="gloo", tokens=97)
    with pytest.raises(RankError, match="rank 1 ended with exit code -9"):
        run_demo(settings, kill)
    assert not [c for c in multiprocessing.active_children() if c.name.startswith("cpt-demo")]


@pytest.mark.parametrize("backend", ["threads", "gloo"])
def test_ctrl_c_ends_all_ranks(backend: str) -> None:
    def interrupt(step: Step) -> None:
        if step.number == 2:
            main_thread = threading.main_thread().ident
            assert main_thread is not None
            signal.pthread_kill(main_thread, signal.SIGINT)

    before = set(threading.enumerate())  # another test may have left a rank hanging on purpose
    with pytest.raises(KeyboardInterrupt):
        run_demo(Settings(ranks=2, steps=10_000, backend=backend, tokens=97), interrupt)
    assert not [c for c in multiprocessing.active_children() if c.name.startswith("cpt-demo")]
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("cpt-rank")]


# ------------------------------------------------------------------------------------- on the screen


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "60")
    progress = command._Progress(Settings(steps=3))
    for number in (1, 2, 3):
        progress.step(Step(number, 5, 2.5, 2.5, {"loss": 0.0}))
    progress.end()
    first, *bars = screen.getvalue().split("\r")
    assert first.count("\n") == 1
    assert [bar.count("#") for bar in bars] == [10, 20, 30]
    assert all(len(bar.partition("\x1b")[0]) <= 59 for bar in bars)
    assert screen.getvalue().endswith("\n")


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*TINY, "--plot", str(tmp_path / "demo.png")]) == 0
    (row,) = lines(capsys.readouterr().out, "picture ")
    assert "cptransport[bench]" in row
