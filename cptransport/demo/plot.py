# SPDX-License-Identifier: Apache-2.0
"""The demo's outcome as a picture: losses both ways, and how far apart. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from cptransport.demo.train import LIMIT, Outcome

__all__ = ["plot"]

#: Where exact equality is drawn, which has no place on a logarithmic axis.
_FLOOR = 1e-9


def plot(outcome: Outcome, path: Path) -> None:
    """Write a picture; the file's ending says its format.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError, ValueError: the file cannot be written in that place or format.
    """
    from matplotlib.figure import Figure

    numbers = [step.number for step in outcome.steps]
    figure = Figure(figsize=(8, 6), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True)
    losses.plot(
        numbers, [step.unsharded for step in outcome.steps], lw=4, alpha=0.35, label="unsharded"
    )
    ranks = outcome.settings.ranks
    label = f"sharded over {ranks} rank{'s' * (ranks != 1)}, {outcome.settings.layout}"
    losses.plot(numbers, [step.sharded for step in outcome.steps], lw=1.2, label=label)
    losses.set_ylabel("loss, nats per byte")
    losses.legend()

    def shown(values: list[float]) -> list[float]:
        return [max(value, _FLOOR) for value in values]

    worst = [max(v for n, v in s.differences.items() if n != "loss") for s in outcome.steps]
    loss = [step.differences["loss"] for step in outcome.steps]
    differences.semilogy(numbers, shown(worst), ".-", label="worst gradient")
    differences.semilogy(numbers, shown(loss), ".", label=f"loss (at {_FLOOR:.0e}: none)")
    differences.axhline(LIMIT, color="black", lw=1, ls="--", label=f"limit {LIMIT:.0e}")
    differences.set_ylabel("relative difference")
    differences.set_xlabel("optimizer step")
    differences.set_ylim(bottom=_FLOOR / 2)
    differences.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False)
    figure.savefig(path, dpi=120)
