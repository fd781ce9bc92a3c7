# SPDX-License-Identifier: Apache-2.0
"""Plots of a document: every sample as a dot, p20 to p80 as a bar, the median as a mark. Needs matplotlib."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cptransport.bench.report import label, shared_device, varying

__all__ = ["Figure", "figures"]

#: Colours that people with common colour blindness tell apart (Okabe and Ito).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_GREY = "#666666"


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        name: of its file, without suffix. title: in words. png: its bytes.
    """

    name: str
    title: str
    png: bytes


def figures(document: Mapping[str, Any]) -> list[Figure]:
    """Return one figure per op, mode and timer that has numbers.

    Raises:
        ImportError: matplotlib is not installed.
    """
    groups: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for row in document["rows"]:
        if row["status"] == "ok":
            groups.setdefault((row["op"], row["mode"], row["timer"]), []).append(row)
    made = []
    for (op, mode, timer), rows in groups.items():
        title = f"{rows[0]['case']}: {op} {mode}, {timer}"
        name = "-".join((rows[0]["case"], op, mode, timer, document["run_id"][:8]))
        made.append(Figure(name, title, _draw(title, rows, shared_device(document))))
    return made


def _draw(title: str, rows: Sequence[Mapping[str, Any]], warning: str | None) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas

    names = varying(rows)
    providers = list(dict.fromkeys(row["provider"] for row in rows))
    height = 1.1 + 0.42 * len(rows) + (0.35 if warning else 0)
    canvas = Canvas(figsize=(8, height), layout="constrained")
    FigureCanvasAgg(canvas)
    axes = canvas.add_subplot()
    for place, row in enumerate(rows):
        colour = _COLOURS[providers.index(row["provider"]) % len(_COLOURS)]
        samples = row["samples_us"]
        spread = [place + 0.22 * ((i * 0.618034) % 1 - 0.5) for i in range(len(samples))]
        axes.plot(samples, spread, ".", color=colour, alpha=0.35, markersize=5, markeredgewidth=0)
        axes.plot([row["p20_us"], row["p80_us"]], [place, place], color=colour, linewidth=4)
        axes.plot(row["median_us"], place, "|", color="black", markersize=14, markeredgewidth=2)
        axes.annotate(
            f"{row['median_us']:,.4g}",
            (row["median_us"], place),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.set_yticks(
        range(len(rows)),
        [" ".join(filter(None, (row["provider"], label(row, names)))) for row in rows],
        fontsize=8,
    )
    axes.set_ylim(len(rows) - 0.4, -0.75)
    lowest = min(min(row["samples_us"]) for row in rows)
    highest = max(max(row["samples_us"]) for row in rows)
    if lowest > 0 and highest / lowest > 20:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_xlabel("microseconds (mark: median; bar: p20 to p80; dots: samples)", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    canvas.suptitle(title, fontsize=10, ha="left", x=0.01)
    if warning:
        canvas.supxlabel(warning.partition(".")[0] + ".", fontsize=8, color="#b00020")
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()
