# SPDX-License-Identifier: Apache-2.0
"""From raw samples to the figures of a row: maximum over ranks first, then order statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["STATISTICS", "quantile", "rank_maximum", "summarise"]

#: Field of a row -> which quantile of its samples it is.
STATISTICS = {"median_us": 0.5, "p20_us": 0.2, "p80_us": 0.8, "min_us": 0.0}


def rank_maximum(per_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return, per iteration, the time of the slowest rank.

    Raises:
        ValueError: ranks have different numbers of samples.
    """
    if len({len(samples) for samples in per_rank}) > 1:
        raise ValueError(f"ranks took {[len(samples) for samples in per_rank]} samples")
    return [max(iteration) for iteration in zip(*per_rank, strict=True)]


def quantile(samples: Sequence[float], q: float) -> float:
    """Return a quantile, linear between the two nearest samples."""
    ordered = sorted(samples)
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def summarise(samples: Sequence[float]) -> dict[str, float | None]:
    """Return the ``STATISTICS`` of samples in microseconds; None each without samples."""
    return {name: quantile(samples, q) if samples else None for name, q in STATISTICS.items()}
