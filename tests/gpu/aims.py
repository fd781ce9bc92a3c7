# SPDX-License-Identifier: Apache-2.0
"""What benches measured beside what is wanted, as a Markdown table.

::

    python tests/gpu/aims.py results/bench/*.json

Every line divides two medians of one document, or states one; rows of another shape, gate or machine
are never mixed. A document without a green gate, or not of its schema, gives no line.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from cptransport.bench.report import gate_is_green  # noqa: E402
from cptransport.bench.schema import read  # noqa: E402

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Aim:
    """A figure that is wanted to be small.

    Attributes:
        what: it is.
        must, aim: limits.
        own: picks the rows that it is measured on. other: the row to divide by; None: the figure
            itself.
        value: of a row.
    """

    what: str
    must: float
    aim: float
    own: Callable[[Row], bool]
    other: Callable[[Row, Row], bool] | None = None
    value: Callable[[Row], float | None] = lambda row: row["median_us"]


def _is(row: Row, **wanted: Any) -> bool:
    facts = {**row["options"], **row["shape"], **row}
    return all(facts.get(name) == value for name, value in wanted.items())


def _same(row: Row, other: Row, **changes: Any) -> bool:
    """Whether the other is a row of the same configuration but for what is named."""
    names = ("case", "op", "mode", "timer", "dtype")
    wanted = {name: row[name] for name in names}
    wanted |= {"T_local": row["shape"]["T_local"], "HV": row["shape"].get("HV")}
    wanted |= {"gate_mean": row["options"].get("gate_mean"), **changes}
    return _is(other, **wanted)


def _kda(**wanted: Any) -> Callable[[Row], bool]:
    return lambda row: _is(
        row, op="kda", provider="cptransport-cp", mode="fwd_bwd", overlap=False, **wanted
    )


def _over(provider: str, **changes: Any) -> Callable[[Row, Row], bool]:
    return lambda row, other: _same(row, other, provider=provider, **changes)


def _own_engine(provider: str, **changes: Any) -> Callable[[Row, Row], bool]:
    return lambda row, other: _same(
        row, other, provider=provider, engine=row["options"].get("engine"), **changes
    )


def _replay(row: Row, other: Row) -> bool:
    same = _same(row, other, provider=row["provider"], timer="profiler")
    return same and other["options"] == row["options"]


def _boundary(**wanted: Any) -> Callable[[Row], bool]:
    return lambda row: _is(
        row, case="boundary", timer="graph_replay", direction="forward", baseline=False, **wanted
    )


def _all_gather(row: Row, other: Row) -> bool:
    return _is(
        other, provider="all_gather", mode="merge", timer="graph_replay", direction="forward",
        beside=row["provider"], composition="gather", world_size=row["world_size"],
    )  # fmt: skip


def _fla_ranks(row: Row, other: Row) -> bool:
    return _same(row, other, provider="fla", beside=row["provider"])


def _mixer(row: Row, other: Row) -> bool:
    same = _same(row, other, provider="all_to_all", op="mixer", world_size=row["world_size"])
    return same and other["shape"].get("B") == row["shape"].get("B")


AIMS = (
    Aim(
        "KDA CP, device / FLA-CP, triton",
        0.62,
        0.45,
        _kda(timer="profiler", engine="triton"),
        _over("fla"),
    ),
    Aim(
        "KDA CP, device / FLA-CP, cudnn, gate -1",
        0.35,
        0.25,
        _kda(timer="profiler", engine="cudnn", gate_mean=-1.0),
        _over("fla"),
    ),
    Aim("KDA CP, eager wall / FLA-CP", 0.55, 0.40, _kda(timer="perf_counter"), _over("fla")),
    Aim(
        "KDA CP, device / own without CP",
        1.18,
        1.07,
        _kda(timer="profiler"),
        _own_engine("cptransport"),
    ),
    Aim("KDA CP, graph replay / device", 1.25, 1.10, _kda(timer="graph_replay"), _replay),
    Aim(
        "KDA without CP, device / FLA without CP, triton",
        1.0,
        0.75,
        lambda row: _is(
            row, op="kda", provider="cptransport", mode="fwd_bwd", timer="profiler", engine="triton"
        ),
        _over("fla-no-cp"),
    ),
    Aim(
        "KDA CP, kernels",
        24,
        16,
        _kda(timer="profiler", engine="triton"),
        value=lambda row: row["kernels"],
    ),
    Aim(
        "KDA CP, peak memory / FLA-CP",
        1.0,
        1.0,
        _kda(timer="perf_counter"),
        _over("fla"),
        lambda row: row["peak_mem_bytes"],
    ),
    Aim(
        "SSD CP, device / state-spaces/mamba without CP",
        0.85,
        0.70,
        lambda row: _is(
            row,
            op="ssd",
            provider="cptransport-cp",
            mode="fwd_bwd",
            timer="profiler",
            overlap=False,
        ),
        _over("mamba_ssm"),
    ),
    Aim(
        "SSD CP, eager wall / state-spaces/mamba without CP",
        0.60,
        0.45,
        lambda row: _is(
            row,
            op="ssd",
            provider="cptransport-cp",
            mode="fwd_bwd",
            timer="perf_counter",
            overlap=False,
        ),
        _over("mamba_ssm"),
    ),
    Aim("boundary, synchronisation, captured, us", 20, 12, _boundary(mode="publish_fetch")),
    Aim("boundary, fold, captured, us", 18, 9, _boundary(mode="fold", composition="gather")),
    Aim(
        "boundary, captured / all-gather and the same fold",
        0.8,
        0.6,
        _boundary(mode="merge", composition="gather"),
        _all_gather,
    ),
    Aim(
        "KDA among ranks, eager wall / FLA-CP",
        0.55,
        0.40,
        lambda row: (
            _is(
                row, case="kda", mode="fwd_bwd", timer="perf_counter", baseline=False, overlap=False
            )
            and not row["provider"].startswith("cptransport")
        ),
        _fla_ranks,
    ),
    Aim(
        "mixer, virtual / all_to_all",
        1 / 1.15,
        1 / 1.25,
        lambda row: _is(row, op="mixer", provider="virtual", mode="fwd_bwd", timer="perf_counter"),
        _mixer,
    ),
)


def lines(document: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """Yield the table's lines of a document."""
    if "problems" in document or not gate_is_green(document):
        return
    good = [row for row in document["rows"] if row["status"] == "ok"]
    shared = document["machine"]["ranks_per_device"]
    for aim in AIMS:
        for row in good:
            if not aim.own(row):
                continue
            others = [other for other in good if aim.other and aim.other(row, other)]
            if aim.other is not None and not others:
                continue
            mine = aim.value(row)
            theirs = aim.value(others[0]) if others else None
            if mine is None or (others and not theirs):
                continue
            figure = mine / theirs if theirs else mine
            met = "aim" if figure <= aim.aim else "must" if figure <= aim.must else "missed"
            yield (
                aim.what,
                _where(row, shared),
                f"{mine:,.1f}",
                "" if theirs is None else f"{theirs:,.1f}",
                f"{figure:.3f}" if theirs else f"{figure:.1f}",
                f"{aim.must:.3g}",
                f"{aim.aim:.3g}",
                met,
            )


def _where(row: Row, shared: int) -> str:
    shape, options = row["shape"], row["options"]
    words = [row["provider"]]
    if shape["T_local"]:
        words.append(f"{shape['T_local']} x {shape.get('HV')}")
    for name in ("gate_mean", "engine", "composition"):
        if options.get(name) is not None:
            words.append(f"{name} {options[name]}")
    words += [f"{name}={value}" for name, value in options.items() if name.startswith("CULA_")]
    if (shape.get("B") or 1) > 1:
        words.append(f"B {shape['B']}")
    if (
        row["case"] == "boundary"
        or row["op"] == "mixer"
        or not row["provider"].startswith("cptransport")
    ):
        words.append(f"{row['world_size']} ranks" + (" sharing a device" if shared > 1 else ""))
    return ", ".join(words)


def markdown(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of all documents."""
    header = ("what", "where", "ours", "other", "figure", "must", "aim", "met")
    rows = [line for document in documents for line in lines(document)]
    rule = ("---", "---", "---:", "---:", "---:", "---:", "---:", "---")
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rule, *rows))


def main(paths: Sequence[str]) -> int:
    """Print the table of documents."""
    print(markdown([read(Path(path)) for path in paths]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
