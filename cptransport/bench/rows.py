# SPDX-License-Identifier: Apache-2.0
"""From what every rank measured to one row of a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cptransport.bench.samples import quantile, rank_maximum, summarise

__all__ = ["Outcome", "Subject", "gate_of", "row"]


@dataclass(frozen=True)
class Subject:
    """What a row measures; the fields are those of the schema."""

    case: str
    op: str
    mode: str
    provider: str
    timer: str
    world_size: int
    dtype: str
    shape: Mapping[str, int | None]
    message_bytes: int | None = None
    baseline: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a measurement went on one rank.

    Attributes:
        samples_us: of this rank.
        error: what failed, verification included. skipped: why there was nothing to measure.
        max_abs_err: largest deviation that verification found; None: nothing was verified.
        bytes_received, bytes_expected: payload of one iteration by the counters and by the plan.
        peak_mem_bytes, kernels: where they were measured.
        kernel_us: times of kernels and copies by name, where they were measured; of the last repeat.
        repeat_medians_us: of this rank, where repeats were added one by one.
    """

    samples_us: list[float] = field(default_factory=list)
    error: str | None = None
    skipped: str | None = None
    max_abs_err: float | None = None
    bytes_received: int | None = None
    bytes_expected: int | None = None
    peak_mem_bytes: int | None = None
    kernels: int | None = None
    kernel_us: dict[str, float] = field(default_factory=dict)
    repeat_medians_us: list[float] = field(default_factory=list)

    def pass_over(self) -> None:
        """Let a failure of what is not ours be no failure, but the reason why there is no number."""
        if self.error:
            self.skipped, self.error = f"not measured: {self.error}", None

    def add(self, later: Outcome) -> None:
        """Append a later repeat of the same measurement."""
        self.samples_us += later.samples_us
        if later.samples_us:
            self.repeat_medians_us += later.repeat_medians_us or [quantile(later.samples_us, 0.5)]
        self.kernel_us = later.kernel_us or self.kernel_us
        self.error = self.error or later.error
        self.skipped = self.skipped or later.skipped
        for name in (
            "max_abs_err",
            "bytes_received",
            "bytes_expected",
            "peak_mem_bytes",
            "kernels",
        ):
            setattr(self, name, _largest([getattr(self, name), getattr(later, name)]))


def row(
    subject: Subject,
    outcomes: Sequence[Outcome],
    *,
    bandwidth_gbytes_s: float | None = None,
    moved_bytes: int | None = None,
    tokens: int | None = None,
    moves: bool = True,
) -> dict[str, Any]:
    """Return the row of a measurement.

    Args:
        subject: what was measured.
        outcomes: by rank; never empty. One rank's error is the row's.
        bandwidth_gbytes_s: the bound is the time that the bytes take at this rate; None: no bound.
        moved_bytes: bytes of the bound; None: what the busiest rank received.
        tokens: per iteration, for ``tokens_s``.
        moves: what is received does come from somewhere while the time runs, so that a rate makes sense.
    """
    reasons = {
        "error": _reason([outcome.error for outcome in outcomes]),
        "skipped": _reason([outcome.skipped for outcome in outcomes]),
    }
    status = next((name for name, reason in reasons.items() if reason), "ok")
    verified = all(outcome.max_abs_err is not None for outcome in outcomes)
    samples = rank_maximum([outcome.samples_us for outcome in outcomes]) if status == "ok" else []
    if status == "ok" and not (verified and samples):
        status, samples = "error", []
        reasons["error"] = "nothing was measured" if verified else "the result was not verified"
    medians = _repeat_medians(outcomes) if samples else []
    received = _largest([outcome.bytes_received for outcome in outcomes])
    bound_bytes = received if moved_bytes is None else moved_bytes
    figures = summarise(samples)
    median = figures["median_us"]
    bound = None
    if bandwidth_gbytes_s and bound_bytes and median:
        bound = bound_bytes / bandwidth_gbytes_s / 1e3
    return {
        **asdict(subject),
        "status": status,
        "reason": reasons.get(status),
        "verified": status == "ok",
        "max_abs_err": _largest([outcome.max_abs_err for outcome in outcomes]),
        "samples_us": samples,
        **figures,
        "repeat_medians_us": medians,
        "median_of_repeats_us": quantile(medians, 0.5) if medians else None,
        "bytes_received": received,
        "bytes_expected": _largest([outcome.bytes_expected for outcome in outcomes]),
        "bus_bw_gbytes_s": received / median / 1e3 if median and received and moves else None,
        "tokens_s": tokens / median * 1e6 if median and tokens else None,
        "peak_mem_bytes": _largest([outcome.peak_mem_bytes for outcome in outcomes]),
        "kernels": _largest([outcome.kernels for outcome in outcomes]),
        "sms_used": None,
        "bound_us": bound,
        "percent_of_bound": 100 * bound / median if bound and median else None,
        "kernel_us": next((one.kernel_us for one in outcomes if one.kernel_us and samples), {}),
    }


def _repeat_medians(outcomes: Sequence[Outcome]) -> list[float]:
    """Return, per repeat, the median of the rank whose median was largest; empty if ranks differ in repeats."""
    of_ranks = [outcome.repeat_medians_us for outcome in outcomes]
    return rank_maximum(of_ranks) if len(set(map(len, of_ranks))) == 1 else []


def gate_of(rows: Sequence[Mapping[str, Any]], case: str) -> dict[str, Any]:
    """Return the gate that a run's own checks make: rows that were verified, and rows that failed."""
    return {
        "suite": f"verification of every configuration in the run (bench {case})",
        "passed": sum(bool(r["verified"]) for r in rows),
        "failed": sum(r["status"] == "error" for r in rows),
        "report_path": None,
    }


def _reason(texts: Sequence[str | None]) -> str | None:
    """Join what ranks said, each text once with the ranks that said it."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if text is not None:
            ranks.setdefault(text, []).append(rank)
    if len(texts) == 1 or list(map(len, ranks.values())) == [len(texts)]:
        return next(iter(ranks), None)
    return (
        "; ".join(f"rank {', '.join(map(str, who))}: {text}" for text, who in ranks.items()) or None
    )


def _largest(values: Sequence[Any]) -> Any:
    return max((value for value in values if value is not None), default=None)
