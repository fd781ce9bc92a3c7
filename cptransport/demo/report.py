# SPDX-License-Identifier: Apache-2.0
"""The demo's outcome as text."""

from __future__ import annotations

from collections.abc import Iterator

from cptransport.demo.train import LIMIT, Outcome

__all__ = ["table"]


def table(outcome: Outcome) -> str:
    """Return the losses both ways, the largest difference of everything compared, and what ran."""
    return "\n".join([*_losses(outcome), "", *_differences(outcome), "", *_what_ran(outcome)])


def _losses(outcome: Outcome) -> Iterator[str]:
    yield f"{'loss, nats per byte':<28}{'sharded':>14}{'unsharded':>14}{'difference':>14}"
    for title, step in (("first step", outcome.steps[0]), ("last step", outcome.steps[-1])):
        yield (
            f"{f'{title} ({step.number})':<28}{step.sharded:>14.6f}{step.unsharded:>14.6f}"
            f"{step.differences['loss']:>14.1e}"
        )


def _differences(outcome: Outcome) -> Iterator[str]:
    shapes = outcome.ranks[0].shapes
    count = len(outcome.steps)
    title = f"largest over {count} step{'s' * (count != 1)}"
    yield f"{title:<28}{'shape':>14}{'difference':>28}"
    for name, difference in outcome.largest().items():
        what = name if name == "loss" else f"d {name}"
        shape = " x ".join(map(str, shapes.get(name, ())))
        mark = "" if difference <= LIMIT else "  ABOVE THE LIMIT"
        yield f"{what:<28}{shape:>14}{difference:>28.1e}{mark}"


def _what_ran(outcome: Outcome) -> Iterator[str]:
    first, settings = outcome.ranks[0], outcome.settings
    selection, run = first.selection, first.run
    yield (
        f"transport    {selection.chosen}, asked for {selection.requested} ({selection.source}); "
        f"{settings.ranks} rank{'s' * (settings.ranks != 1)}, layout {settings.layout}"
    )
    for name, reason in selection.passed_over:
        yield f"             not {name}: {reason}"
    if run is not None:
        yield (
            f"last op      {run.op}: engine {run.engine}, transport {run.transport}, "
            f"composition {run.composition}, overlap {'on' if run.overlap else 'off'}"
        )
        for name, reason in run.reasons:
            yield f"             not {name}: {reason}"
    parts = sorted({part for rank in outcome.ranks for part in rank.received})
    for part in parts:
        kilobytes = (
            rank.received.get(part, 0) / 1000 / len(outcome.steps) for rank in outcome.ranks
        )
        numbers = ", ".join(f"{each:.1f}" for each in kilobytes)
        yield f"received     {part}: {numbers} kB per step on ranks 0 to {settings.ranks - 1}"
    wrong = [name for name, each in outcome.largest().items() if each > LIMIT]
    total = len(outcome.largest())
    yield (
        f"verdict      equal: all {total} within {LIMIT:.0e}"
        if not wrong
        else f"verdict      DIFFERENT: {len(wrong)} of {total} above {LIMIT:.0e}: {', '.join(wrong)}"
    )
