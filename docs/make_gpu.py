# SPDX-License-Identifier: Apache-2.0
"""What runs of the GPU programme showed.

::

    python docs/make_gpu.py add h200 DIR...   # copy what tests/gpu/run_all.py wrote to results/h200
    python docs/make_gpu.py                   # render gpu.md and the pages of the benches

Documents are kept as they were written. Of two of the same name the later call's stays; each has its own
machine and commit, so results may hold steps of several runs. Rehearsals are refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

DOCS = Path(__file__).resolve().parent
RESULTS = DOCS / "results"
sys.path += [str(path) for path in (DOCS.parent, DOCS, DOCS.parent / "tests" / "gpu")]

from aims import markdown as aims_table  # noqa: E402
from make_scaling import fill  # noqa: E402

from cptransport.bench.formats import byte_size, microseconds  # noqa: E402
from cptransport.bench.render import markdown  # noqa: E402
from cptransport.bench.report import Banner, Block, Heading, Table, Text, blocks, gate_is_green  # noqa: E402
from cptransport.bench.schema import validate  # noqa: E402

Document = Mapping[str, Any]
Documents = Mapping[Path, Document]

#: What a step's document has; it names no schema.
STEP = {"step", "group", "command", "seconds", "code", "outcomes", "git", "machine", "software"}


def kind(document: Document) -> str | None:
    """Return what a document is about, None if nothing that is shown here."""
    schemas = {f"cptransport.{name}/1": name for name in PARTS}
    return "step" if document.keys() >= STEP else schemas.get(document.get("schema", ""))


def checked(path: Path) -> Document:
    """Read a document of a run; ValueError: it is none, or of a rehearsal."""
    document: Document = json.loads(path.read_text(encoding="utf-8"))
    if kind(document) is None:
        raise ValueError("of no schema that is known here")
    if kind(document) == "bench":
        validate(document, str(path))
    # Two kinds do not say that they were rehearsed, but then there was no GPU.
    on_gpu = document.get("device", "cuda") == "cuda" and gpu(document) is not None
    if document.get("rehearsal") or not on_gpu:
        raise ValueError("a rehearsal")
    return document


def gpu(document: Document) -> str | None:
    """Return the GPU's name."""
    machine = document["machine"]
    name: str | None = next(iter(machine.get("gpus", [])), machine.get("gpu_name"))
    return name


def gpus(document: Document) -> int:
    """Return how many GPUs were used."""
    if kind(document) == "conformance":
        return int(max(document["world_sizes"]) // document["ranks_per_device"])
    return int(document["machine"]["gpus_used"])


def add(name: str, folders: Sequence[Path]) -> list[str]:
    """Copy the documents of runs to ``results/name``; return what was refused, and why."""
    target, refused = RESULTS / name, []
    for folder in folders:
        good = {}
        for path in sorted([*folder.glob("*.json"), *folder.glob("bench/*.json")]):
            try:
                if path.name != "results.json":  # the steps once more
                    good[path] = checked(path)
            except (ValueError, KeyError, AttributeError) as error:
                refused.append(f"{path}: {error or type(error).__name__}")
        target.mkdir(parents=True, exist_ok=True)
        for path in sorted(good, key=lambda path: kind(good[path]) != "step"):
            document, kept = good[path], target / path.name
            if kind(document) == "step":
                if kept.exists() and not document["seconds"]:
                    continue  # there was no time for it: nothing newer is known
                # What it wrote in an earlier run must not stand beside a run that wrote none.
                for word in map(PurePath, document["command"]):
                    if word.suffix == ".json":
                        (target / word.name).unlink(missing_ok=True)
            shutil.copyfile(path, kept)
    return refused


def _about(documents: Documents) -> Text:
    """Say once what the documents of a table ran on."""
    said: dict[str, None] = {}
    for document in documents.values():
        machine, versions = document["machine"], document.get("software", document.get("versions"))
        words = [f"{gpus(document)} x {gpu(document)}"]
        words += [f"driver {machine['driver']}"] if "driver" in machine else []
        words += [f"{machine.get('cpu_cores', machine.get('cpus'))} CPU cores"]
        words += [f"{name} {v}" for name, v in (versions or {}).items() if isinstance(v, str)]
        said[f"On {', '.join(words)}."] = None
    return Text("\n\n".join(said))


def _table(header: str, lines: Iterable[Sequence[object]]) -> Table:
    """Make a table; columns whose names end in ``#`` are numbers."""
    names = header.split(" | ")
    numeric = frozenset(i for i, name in enumerate(names) if name.endswith("#"))
    cells = tuple(tuple(map(str, line)) for line in lines)
    return Table(tuple(name.rstrip("#") for name in names), cells, numeric)


def _commit(document: Document) -> str:
    git = document["git"]
    return (git["commit"] or "unknown")[:7] + (" with local changes" if git["dirty"] else "")


def _counts(step: Document) -> tuple[int, int, int]:
    ends = list(step["outcomes"].values())
    return ends.count("PASSED"), ends.count("FAILED") + ends.count("ERROR"), ends.count("SKIPPED")


def _ended(step: Document) -> str:
    if step["code"] == 0:
        return "passed" if _counts(step)[0] or not step["outcomes"] else "all skipped"
    return step["code"] if isinstance(step["code"], str) else f"FAILED, exit code {step['code']}"


def _steps(found: Documents) -> Iterator[Block]:
    lines, failures = [], []
    for step in found.values():
        how = (_commit(step), f"{step['seconds']:.0f}", step["beside"] or "alone", _ended(step))
        lines.append((step["step"], *_counts(step), *how))
        tests = [test for test, how in step["outcomes"].items() if how in ("FAILED", "ERROR")]
        words = [f"`{test.partition('::')[2]}`" for test in tests]
        words += [f"ended in `{step['running'].partition('::')[2]}`"] if step["running"] else []
        if words or _ended(step) != "passed":
            failures.append(f"* {step['step']}: {', '.join(words) or _ended(step)}")
    yield _table("step | passed# | failed# | skipped# | commit | seconds# | how | ended", lines)
    yield Text("What failed:\n\n" + ("\n".join(failures) or "* nothing"))


def _conformance(found: Documents) -> Iterator[Block]:
    lines = []
    for document in found.values():
        counts = (document["counts"].get(how, 0) for how in ("passed", "failed", "skipped"))
        ranks = ", ".join(map(str, document["world_sizes"]))
        lines.append((document["backend"], ranks, *counts, document["finished_utc"]))
    yield _table("backend | ranks# | passed# | failed# | skipped# | finished", lines)


def _benches(found: Documents) -> Iterator[Block]:
    lines = []
    for path, document in found.items():
        gate, rows = document["gate"], [row["status"] for row in document["rows"]]
        link = f"[{path.stem}]({path.with_suffix('.md').relative_to(DOCS).as_posix()})"
        checks = f"{'green' if gate_is_green(document) else '**RED**'}, {gate['failed']} failed"
        counts = (rows.count(how) for how in ("ok", "error", "skipped"))
        lines.append((link, checks, *counts, _commit(document), document["started_utc"]))
    yield _table("tables | gate | rows# | errors# | skipped# | commit | started", lines)
    yield Text("Aims; benches with a red gate give no line:")
    yield Text(aims_table(list(found.values())))


def _compositions(found: Documents) -> Iterator[Block]:
    for document in found.values():
        if document["banner"]:
            yield Banner(document["banner"])
        sizes = ", ".join(f"{name} {value}" for name, value in document["sizes"].items())
        ranks = f"{document['world_size']} ranks, commit {_commit(document)}"
        yield Text(f"One KDA layer forward and backward, {ranks}: {sizes}.")
        lines = []
        for row in document["rows"]:
            cells: Sequence[str] = (row.get("skipped", ""), "", "", "")
            if "skipped" not in row:
                moved = (byte_size(of(row["bytes_received"])) for of in (max, sum))
                cells = (f"{row['difference_to_gloo']:g}", *moved, microseconds(row["median_us"]))
            lines.append((row["backend"], row["layout"], row["composition"], *cells))
        header = "backend | layout | composition | difference to gloo#"
        yield _table(f"{header} | received by the largest# | by all# | median us#", lines)


def _cold(found: Documents) -> Iterator[Block]:
    names = ("cold_s", "compiled_before_s", "limit_s")
    lines = [(d["engine"], *(f"{d[n]:.1f}" for n in names), _commit(d)) for d in found.values()]
    yield Text("A process's first KDA layer, forward and backward, and again in a new process.")
    yield _table("engine | nothing compiled, s# | compiled before, s# | limit, s# | commit", lines)


def _delays(found: Documents) -> Iterator[Block]:
    yield Text("Random slots, routes, orders and pauses; every payload was compared byte for byte.")
    header = "backend | ranks# | exchanges# | wanted# | payloads# | bytes# | seconds# | commit"
    lines = (
        (
            d["backend"],
            d["world_size"],
            *(f"{d[n]:,}" for n in ("generations", "wanted", "payloads")),
        )
        + (byte_size(d["bytes"]), d["seconds"], _commit(d))
        for d in found.values()
    )
    yield _table(header, lines)


def _sharded(found: Documents) -> Iterator[Block]:
    for d in found.values():
        tokens, *heads = d["size"]
        yield Text(
            f"KDA on {d['world_size']} ranks (threads) of {tokens} tokens, H, HV, K, V {heads}, {d['dtype']}: relative "
            f"root mean square of the difference to the same engine's unsharded run, on the worst rank, beside "
            f"{d['limit']:g}; and of both to fp64. Commit {_commit(d)}."
        )
        cells = ("unsharded", "fp64", "unsharded_fp64")
        lines = (
            (r["engine"], r["gate"], r["name"], *(f"{r[n]:.1e}" for n in cells)) for r in d["rows"]
        )
        yield _table("engine | gate# | of | to unsharded# | to fp64# | unsharded to fp64#", lines)


#: Titles and makers of the parts of a page, by kind.
PARTS = {"step": ("Steps", _steps), "conformance": ("Conformance", _conformance),
         "bench": ("Benches", _benches), "cold": ("Cold start", _cold),
         "sharded": ("Sharded against unsharded", _sharded),
         "delays": ("Exchanges with random delays", _delays),
         "compositions": ("Compositions side by side", _compositions)}  # fmt: skip


def results(documents: Documents) -> Iterator[Block]:
    """Yield what is shown, per number and kind of GPUs."""
    for count, name in sorted({(gpus(d), str(gpu(d))) for d in documents.values()}):
        how = "shared under MPS by the ranks of a step" if count == 1 else "a rank on each"
        yield Heading(2, f"{count} x {name}, {how}")
        here = {p: d for p, d in documents.items() if (gpus(d), gpu(d)) == (count, name)}
        for which, (title, show) in PARTS.items():
            if found := {path: d for path, d in here.items() if kind(d) == which}:
                yield from (Heading(3, title), *show(found), _about(found))


def side_by_side(documents: Documents) -> str:
    """Return what the rank that receives most received, a column per backend."""
    found = []
    for document in (d for d in documents.values() if kind(d) == "compositions"):
        cells: dict[str, dict[str, str]] = {}
        for row in document["rows"]:
            most = byte_size(max(row["bytes_received"])) if "bytes_received" in row else "-"
            cells.setdefault(f"{row['layout']}, {row['composition']}", {})[row["backend"]] = most
        backends = list(dict.fromkeys(row["backend"] for row in document["rows"]))
        header = " | ".join(["layout, composition", *(f"{name}#" for name in backends)])
        found.append(_table(header, ((case, *by.values()) for case, by in cells.items())))
    return markdown(found).strip()


def pages() -> dict[Path, str]:
    """Return the pages as they should be."""
    found = {path: json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.rglob("*.json"))}
    documents = {path: document for path, document in found.items() if kind(document)}
    shown = {"results": markdown([*results(documents)]).strip()}
    made = {}
    for name, parts in (("gpu", shown), ("scaling", {"side by side": side_by_side(documents)})):
        path = DOCS / f"{name}.md"
        made[path] = fill(path.read_text(encoding="utf-8"), parts)
    for path, document in documents.items():
        if kind(document) == "bench":
            made[path.with_suffix(".md")] = markdown(blocks(document))
    return made


def main() -> None:
    """Add documents, or render."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="copy the documents of runs")
    adding.add_argument("name", help="of the folder in results")
    adding.add_argument("folders", nargs="+", type=Path, help="given to run_all.py as --out")
    args = parser.parse_args()
    refused = add(args.name, args.folders) if args.command else []
    made = pages()
    for path in RESULTS.rglob("*.md"):
        if path not in made:
            path.unlink()
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    if refused:
        sys.exit("refused:\n" + "\n".join(refused))


if __name__ == "__main__":
    main()
