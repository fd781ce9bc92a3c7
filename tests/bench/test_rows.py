# SPDX-License-Identifier: Apache-2.0
"""Samples become figures, outcomes of ranks become rows, and nothing that failed gets a number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from documents import document, row

from cptransport.bench.memory import peak_bytes
from cptransport.bench.rows import Outcome, Subject, gate_of
from cptransport.bench.rows import row as make_row
from cptransport.bench.samples import quantile, rank_maximum, summarise
from cptransport.bench.schema import problems
from cptransport.bench.timing import Body, Budget, PerfCounter, Series, measure

CPU = torch.device("cpu")
SUBJECT = Subject(
    case="boundary",
    op="kda",
    mode="merge",
    provider="gloo",
    timer="perf_counter",
    world_size=2,
    dtype="float32",
    shape=dict.fromkeys(("T_global", "T_local", "H", "K", "V", "chunk_size", "N")),
)


def outcome(*samples: float, received: int = 10) -> Outcome:
    return Outcome(list(samples), max_abs_err=0.5, bytes_received=received, bytes_expected=received)


def test_the_slowest_rank_counts_in_every_iteration() -> None:
    assert rank_maximum([[1.0, 5.0], [3.0, 2.0]]) == [3.0, 5.0]
    with pytest.raises(ValueError, match=r"\[2, 1\] samples"):
        rank_maximum([[1.0, 2.0], [1.0]])


def test_figures_are_order_statistics() -> None:
    assert [quantile([4.0, 1.0, 3.0, 2.0], q) for q in (0.0, 0.5, 1.0)] == [1.0, 2.5, 4.0]
    samples = [float(i) for i in range(11)]
    expected = {"median_us": 5.0, "p20_us": 2.0, "p80_us": 8.0, "min_us": 0.0}
    assert summarise(samples) == expected
    assert set(summarise([]).values()) == {None}


def test_a_row_takes_maxima_over_ranks_and_derives_rates() -> None:
    made = make_row(
        SUBJECT,
        [outcome(100.0, 300.0), outcome(200.0, 100.0, received=2000)],
        bandwidth_gbytes_s=0.04,
        tokens=5,
    )
    assert made["samples_us"] == [200.0, 300.0]
    assert made["median_us"] == 250.0
    assert made["bytes_received"] == 2000
    assert made["bus_bw_gbytes_s"] == pytest.approx(0.008)
    assert made["tokens_s"] == pytest.approx(20_000)
    assert made["bound_us"] == pytest.approx(50.0)
    assert made["percent_of_bound"] == pytest.approx(20.0)
    assert problems(document(made)) == []


@pytest.mark.parametrize(
    ("second", "status", "says"),
    [
        (Outcome(error="RuntimeError: gone"), "error", "rank 1: RuntimeError: gone"),
        (Outcome(skipped="no graphs here"), "skipped", "rank 1: no graphs here"),
        (Outcome([1.0]), "error", "the result was not verified"),
        (Outcome(max_abs_err=0.0), "error", "ranks took"),
    ],
)
def test_one_rank_without_a_number_takes_the_row_with_it(
    second: Outcome, status: str, says: str
) -> None:
    if says == "ranks took":
        with pytest.raises(ValueError, match=says):
            make_row(SUBJECT, [outcome(1.0), second])
        return
    made = make_row(SUBJECT, [outcome(1.0), second])
    assert (made["status"], made["reason"]) == (status, says)
    assert made["samples_us"] == []
    assert made["median_us"] is None
    assert not made["verified"]
    assert problems(document(made)) == []


def test_the_same_reason_of_all_ranks_is_said_once() -> None:
    made = make_row(SUBJECT, [Outcome(skipped="not here"), Outcome(skipped="not here")])
    assert made["reason"] == "not here"


def test_an_error_in_one_repeat_stays() -> None:
    whole = outcome(1.0)
    whole.add(Outcome(error="broke"))
    whole.add(outcome(2.0))
    assert make_row(SUBJECT, [whole])["status"] == "error"


def test_the_gate_counts_verified_and_failed_rows() -> None:
    rows = [row(), row(provider="a"), row(provider="b", error="no"), row(provider="c", skipped="s")]
    gate = gate_of(rows, "boundary")
    assert (gate["passed"], gate["failed"]) == (2, 1)


def test_bodies_take_turns_and_one_that_raises_is_given_up() -> None:
    calls: list[str] = []

    def fails() -> None:
        calls.append("b")
        if calls.count("b") == 3:
            raise RuntimeError("third time")

    first = Series(PerfCounter(CPU), Body(lambda: calls.append("a"), lambda: calls.append("p")))
    second = Series(PerfCounter(CPU), Body(fails))
    measure([first, second], Budget(warmup=1, iterations=3), device=CPU)
    assert "".join(calls) == "pabpabpabpa"
    assert len(first.samples_us) == 3
    assert second.error == "RuntimeError: third time"
    assert second.samples_us == []


def test_preparation_alignment_and_context_are_not_timed() -> None:
    import time

    inside: list[str] = []

    @contextmanager
    def within() -> Iterator[None]:
        inside.append("in")
        time.sleep(0.2)
        yield
        inside.append("out")

    def timed() -> None:
        inside.append("timed")
        time.sleep(0.01)

    body = Body(timed, lambda: time.sleep(0.2), lambda: time.sleep(0.2), within)
    series = Series(PerfCounter(CPU), body)
    measure([series], Budget(warmup=1, iterations=1), device=CPU)
    assert 10_000 <= series.samples_us[0] < 150_000
    assert inside == ["in", "timed", "out"] * 2


def test_peak_memory_is_that_of_the_call() -> None:
    kept = torch.ones(40 << 20, dtype=torch.uint8)
    peak = peak_bytes(lambda: torch.ones(100 << 20, dtype=torch.uint8), CPU)
    assert kept.sum()
    if peak is None:
        pytest.skip("this system does not tell the peak of a process")
    assert 95 << 20 <= peak < 130 << 20
