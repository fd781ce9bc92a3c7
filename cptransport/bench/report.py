# SPDX-License-Identifier: Apache-2.0
"""What a report says about a document, as blocks that ``render`` writes as Markdown or HTML.

Two rules are kept here: ratios appear only under a green gate, beside both absolute times; and a
document whose ranks shared a device wears a banner.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cptransport.bench.formats import byte_size, command_line, microseconds, number, plain
from cptransport.bench.schema import identity
from cptransport.launch import banner

__all__ = [
    "Banner",
    "Block",
    "Code",
    "Heading",
    "Table",
    "Text",
    "blocks",
    "gate_is_green",
    "label",
    "shared_device",
    "varying",
]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the page's."""

    level: int
    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Banner:
    """A paragraph that must not be overlooked."""

    text: str


@dataclass(frozen=True)
class Code:
    """A command."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; numbers are right-aligned."""

    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numeric: frozenset[int] = frozenset()


Block = Heading | Text | Banner | Code | Table


def gate_is_green(document: Mapping[str, Any]) -> bool:
    """Whether something was checked and nothing failed."""
    gate = document["gate"]
    return bool(gate["passed"] > 0 and gate["failed"] == 0)


def shared_device(document: Mapping[str, Any]) -> str | None:
    """Return the warning of a document whose ranks shared a device, else None."""
    machine = document["machine"]
    ranks = machine["ranks_per_device"]
    if ranks <= 1:
        return None
    if machine["gpus_used"]:
        return banner(ranks)
    return (
        f"{ranks} ranks shared one host CPU with {machine['cpu_cores']} cores. These times compare "
        "backends with each other on this machine; they say nothing about a network or about NVLink."
    )


def blocks(document: Mapping[str, Any]) -> list[Block]:
    """Return what a report says about a document, figures aside."""
    machine = document["machine"]
    where = machine["gpu_name"] or machine["cpu"]
    made: list[Block] = [
        Heading(2, f"{' / '.join(_cases(document))} on {where}, {document['started_utc'][:10]}")
    ]
    warning = shared_device(document)
    if warning:
        made.append(Banner(warning))
    gate = document["gate"]
    counts = f"{gate['passed']} passed, {gate['failed']} failed"
    if gate_is_green(document):
        made.append(Text(f"Gate: {counts} ({gate['suite']})."))
    else:
        made.append(Banner(f"The gate is not green: {counts}. No ratios are shown."))
    made.append(Code(command_line(document["command"])))
    common = _common(document["rows"])
    if common:
        made.append(Text(f"All rows: {label(document['rows'][0], common)}."))
    made += _results(document)
    made += _comparisons(document)
    made += _overlaps(document)
    made += _kernels(document)
    made += _without_number(document)
    made += [Heading(3, "Conditions"), _conditions(document)]
    return made


# --------------------------------------------------------------------------------------------- rows


def _cases(document: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(f"bench {row['case']}" for row in document["rows"])) or ["bench"]


#: Facts whose values say what they are.
_SPEAKING = ("op", "dtype", "composition", "direction", "region", "layout")


def _facts(row: Row) -> dict[str, Any]:
    """Everything that tells rows apart beside case, mode, provider and timer."""
    shape = {name: value for name, value in row["shape"].items() if value is not None}
    if "T_local" in shape:
        shape.pop("T_global", None)  # follows from the world size
    facts = {"op": row["op"], "dtype": row["dtype"], "world_size": row["world_size"]}
    return {**facts, **shape, **row["options"]}


def varying(rows: Sequence[Row]) -> list[str]:
    """Return the names of facts that are not the same in all rows."""
    facts = [_facts(row) for row in rows]
    names = dict.fromkeys(name for fact in facts for name in fact)
    return [name for name in names if len({repr(fact.get(name)) for fact in facts}) > 1]


def _common(rows: Sequence[Row]) -> list[str]:
    different = set(varying(rows))
    return [name for name in (_facts(rows[0]) if rows else ()) if name not in different]


def label(row: Row, names: Sequence[str]) -> str:
    """Return the given facts of a row in words."""
    facts = _facts(row)
    return ", ".join(
        plain(facts[name]) if name in _SPEAKING else f"{name} {plain(facts[name])}"
        for name in names
        if name in facts
    )


def _ok(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


_COLUMNS: tuple[tuple[str, Callable[[Row], Any]], ...] = (
    ("median us", lambda row: microseconds(row["median_us"])),
    (
        "p20 to p80 us",
        lambda row: f"{microseconds(row['p20_us'])} to {microseconds(row['p80_us'])}",
    ),
    ("median of repeats us", lambda row: _repeats(row)),
    ("min us", lambda row: microseconds(row["min_us"])),
    ("received", lambda row: byte_size(row["bytes_received"])),
    ("GB/s", lambda row: number(row["bus_bw_gbytes_s"])),
    ("tokens/s", lambda row: number(row["tokens_s"])),
    ("peak mem", lambda row: byte_size(row["peak_mem_bytes"])),
    ("kernels", lambda row: number(row["kernels"])),
    ("% of bound", lambda row: number(row["percent_of_bound"])),
    ("max error", lambda row: f"{row['max_abs_err']:.1e}"),
)


def _repeats(row: Row) -> str:
    value = row.get("median_of_repeats_us")
    return "" if value is None else microseconds(value)


def _results(document: Mapping[str, Any]) -> Iterator[Block]:
    """One table per mode; columns that no row fills are left out."""
    rows = _ok(document["rows"])
    everywhere = _common(document["rows"])
    for mode in dict.fromkeys(row["mode"] for row in rows):
        group = [row for row in rows if row["mode"] == mode]
        names = varying(group)
        cells = [[make(row) for _, make in _COLUMNS] for row in group]
        used = [i for i in range(len(_COLUMNS)) if any(line[i] for line in cells)]
        configured = any(label(row, names) for row in group)
        lead = ("provider", "configuration", "timer") if configured else ("provider", "timer")
        lines = []
        for row, line in zip(group, cells, strict=True):
            what = (label(row, names),) if configured else ()
            lines.append(
                (row["provider"], *what, row["timer"], *(str(line[i] or "-") for i in used))
            )
        yield Heading(3, _MODES.get(mode, mode))
        here = label(group[0], [name for name in _common(group) if name not in everywhere])
        if here:
            yield Text(f"All of these: {here}.")
        yield Table(
            (*lead, *(_COLUMNS[i][0] for i in used)),
            tuple(lines),
            frozenset(range(len(lead), len(lead) + len(used))),
        )


_MODES = {
    "fwd": "Forward",
    "bwd": "Backward",
    "fwd_bwd": "Forward and backward",
    "publish_fetch": "Published to received (synchronisation and movement)",
    "fold": "Fold alone, on recorded summaries",
    "merge": "Published to merged",
    "gather": "Gather",
    "barrier": "Barrier",
}


def _comparisons(document: Mapping[str, Any]) -> Iterator[Block]:
    """Every row beside the baselines of the same measurement: both times, and the ratio if it may be shown."""
    rows = _ok(document["rows"])
    green = gate_is_green(document)
    names = varying(rows)
    lines = []
    for row in rows:
        for other in rows:
            if row is other or not other["baseline"] or not _comparable(row, other):
                continue
            if row["baseline"] and rows.index(row) > rows.index(other):
                continue  # two baselines meet once
            line = (
                label(row, names),
                row["mode"],
                row["timer"],
                row["provider"],
                microseconds(row["median_us"]),
                other["provider"],
                microseconds(other["median_us"]),
            )
            ratio = row["median_us"] / other["median_us"]
            lines.append((*line, f"{ratio:.3f}") if green else line)
    if lines:
        header = (
            "configuration",
            "mode",
            "timer",
            "provider",
            "median us",
            "baseline",
            "baseline median us",
        )
        yield Heading(3, "Against baselines")
        yield Table(
            (*header, "time ratio") if green else header, tuple(lines), frozenset((4, 6, 7))
        )


def _overlaps(document: Mapping[str, Any]) -> Iterator[Block]:
    """What ``CULA_CP_OVERLAP=1`` hides: each row with it beside the same row without."""
    rows = _ok(document["rows"])
    without = {_apart(row): row for row in rows if row["options"].get("overlap") is False}
    pairs = [
        (row, without[_apart(row)])
        for row in rows
        if row["options"].get("overlap") is True and _apart(row) in without
    ]
    if not pairs:
        return
    names = [name for name in varying([row for row, _ in pairs]) if name != "overlap"]
    yield Heading(3, "Hidden by overlap")
    yield Table(
        ("provider", "configuration", "mode", "timer", "without us", "with us", "hidden us"),
        tuple(
            (
                row["provider"],
                label(row, names),
                row["mode"],
                row["timer"],
                microseconds(plain_row["median_us"]),
                microseconds(row["median_us"]),
                f"{plain_row['median_us'] - row['median_us']:.1f}",
            )
            for row, plain_row in pairs
        ),
        frozenset((4, 5, 6)),
    )


def _kernels(document: Mapping[str, Any]) -> Iterator[Block]:
    """Where the time of each row on the device goes, longest first."""
    rows = [row for row in _ok(document["rows"]) if row.get("kernel_us")]
    if not rows:
        return
    names = varying(rows)
    yield Heading(3, "Times by kernel")
    yield Table(
        ("provider", "configuration", "mode", "us"),
        tuple(
            (
                row["provider"],
                label(row, names),
                row["mode"],
                ", ".join(
                    f"{_short(kernel)} {us:.1f}"
                    for kernel, us in sorted(row["kernel_us"].items(), key=lambda pair: -pair[1])
                ),
            )
            for row in rows
        ),
    )


def _short(kernel: str) -> str:
    """Return a kernel's name without what a C++ compiler adds to it; C++ kernels are told apart by that."""
    plain_name = re.sub(r"^void |\(.*", "", kernel)
    return re.sub(r"[|`]", " ", plain_name if len(plain_name) <= 80 else f"{plain_name[:77]}...")


def _apart(row: Row) -> str:
    """The identity of a row, whatever its overlap."""
    options = {name: value for name, value in row["options"].items() if name != "overlap"}
    return identity({**row, "options": options})


def _comparable(row: Row, baseline: Row) -> bool:
    """Whether two rows measure the same thing: alike in everything that both of them say."""
    for name in ("case", "op", "mode", "timer", "dtype"):
        if row[name] != baseline[name]:
            return False
    sizes, others = dict(row["shape"]), dict(baseline["shape"])
    for shape in (sizes, others):
        shape.pop("T_global", None)
    if sizes != others:
        return False
    options = dict(baseline["options"])
    if options.pop("beside", row["provider"]) != row["provider"]:  # measured on another's ranks
        return False
    own = row["options"]
    return all(own[name] == value for name, value in options.items() if name in own)


def _without_number(document: Mapping[str, Any]) -> Iterator[Block]:
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in document["rows"]:
        if row["status"] != "ok":
            groups.setdefault((row["provider"], row["status"], row["reason"]), []).append(row)
    if groups:
        yield Heading(3, "Rows without a number")
        yield Table(
            ("provider", "status", "rows", "reason"),
            tuple(
                (provider, status, _kinds(rows), reason)
                for (provider, status, reason), rows in groups.items()
            ),
        )


def _kinds(rows: Sequence[Row]) -> str:
    timers: dict[str, list[str]] = {}
    for row in rows:
        timers.setdefault(row["timer"], []).append(row["mode"])
    return "; ".join(f"{timer}: {', '.join(dict.fromkeys(m))}" for timer, m in timers.items())


def _conditions(document: Mapping[str, Any]) -> Table:
    git, machine = document["git"], document["machine"]
    commit = git["commit"] or "unknown"
    state = {True: " with local changes", False: "", None: ""}[git["dirty"]]
    lines = [("started", document["started_utc"]), ("commit", commit + state)]
    lines += [("run", document["run_id"])]
    for name in ("machine", "software", "method"):
        lines += _flat(document[name])
    if machine["clocks"]["sm_mhz_before"] is None:
        lines = [line for line in lines if not line[0].startswith("clocks")]
    return Table(("", ""), tuple(lines))


def _flat(block: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in block.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name} ")
        elif value is not None:
            yield f"{prefix}{name.replace('_', ' ')}", plain(value)
