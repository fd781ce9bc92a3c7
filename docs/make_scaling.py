# SPDX-License-Identifier: Apache-2.0
"""What the compositions cost from 8 to 1024 ranks: ``python docs/make_scaling.py`` (plots need matplotlib).

Writes ``results/scaling.json``, the tables of ``scaling.md`` between its marks, and its plots.
Predictions come from ``cptransport.cost`` and ``plan.volume``. They are checked against real runs on
threads, with small shapes: bytes by the counters, states against the recurrence in fp64, and what a
rank holds by its tensors. Runs that are recorded are not run again, which would take minutes, unless
``--measure`` asks for it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cptransport.composition import COMPOSITIONS, DIRECTIONS, schedule
from cptransport.cost import BACKENDS, choose, costs_of, predict
from cptransport.exchange import Wire, begin
from cptransport.plan import Plan, build_plan
from cptransport.summary import advance
from cptransport.transport import Gathered, PartSpec, Slot
from cptransport.transports import threads

DOCS = Path(__file__).parent
RESULTS = DOCS / "results" / "scaling.json"
PAGE = DOCS / "scaling.md"

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)
FEW = (2, 3, 4, 8, 16, 64)
MODELLED = ("nccl", "nvshmem_signal")
HEADS, SIZE = 32, 128
MEASURED = (
    *((64, composition) for composition in COMPOSITIONS),
    (256, "gather"),
    (256, "scan"),
    (1024, "scan"),
)
GROWTH = tuple((n, composition) for n in (8, 64, 512) for composition in COMPOSITIONS)
MIB = 1 << 20


def case(
    op: str,
    world_size: int,
    *,
    heads: int = HEADS,
    key_dim: int = SIZE,
    value_dim: int = SIZE,
    dtype: torch.dtype = torch.float32,
) -> tuple[Plan, tuple[PartSpec, PartSpec]]:
    """Return the plan of one sequence on contiguous ranks, and the parts of its summaries."""
    plan = build_plan([0, 4 * world_size], world_size=world_size)
    state = (plan.max_segments, heads, key_dim, value_dim)
    transition = (plan.max_segments, heads, key_dim, key_dim) if op == "kda" else state[:2]
    return plan, (PartSpec("state", state, dtype), PartSpec("transition", transition, dtype))


def received(plan: Plan, parts: Sequence[PartSpec], composition: str) -> list[int]:
    """Return the bytes that every rank receives, forward and backward."""
    volume = plan.volume(Slot("s", tuple(parts)), composition)
    return [sum(both) for both in zip(volume.forward, volume.backward, strict=True)]


# ---------------------------------------------------------------------------------------- the model


def model_row(op: str, backend: str, world_size: int, composition: str) -> dict[str, Any]:
    """Return what one layer is predicted to cost, forward and backward."""
    plan, parts = case(op, world_size)
    volume = plan.volume(Slot("s", parts), composition)
    rounds = schedule(plan, "forward", composition).rounds
    both = [sum(bytes_in) for bytes_in in zip(volume.forward, volume.backward, strict=True)]
    sizes = {part.name: part.nbytes for part in parts}
    return {
        "op": op,
        "backend": backend,
        "ranks": world_size,
        "composition": composition,
        "rounds": len(rounds),
        "predicted_s": predict(plan, parts, composition, costs_of(backend)),
        "received_bytes_most": max(both),
        "received_bytes_mean": sum(both) / world_size,
        # Of one exchange: what is staged, and what comes. A transport that reads peers in place
        # holds the first only; every slot has two buffers.
        "held_bytes_most": sum(sizes[part] for step in rounds for part in step.parts)
        + max(volume.forward),
    }


# --------------------------------------------------------------------------------------- real runs


class _Weighed:
    """A transport that adds up what it hands out: staged tensors, and peers' tensors of a gather."""

    def __init__(self, transport: threads.ThreadTransport) -> None:
        self._transport = transport
        self.held = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def stage(self, slot: Slot) -> Mapping[str, Tensor]:
        staged = self._transport.stage(slot)
        self.held += sum(x.nbytes for x in staged.values())
        return staged

    def gather(self, slot: Slot, **more: Any) -> Gathered:
        gathered = self._transport.gather(slot, **more)
        for part in slot.parts:
            sources = set(gathered.sources(part.name)) - {self._transport.rank}
            self.held += sum(gathered.tensor(part.name, source).nbytes for source in sources)
        return gathered


Summaries = list[tuple[Tensor, Tensor]]


def summaries(plan: Plan, parts: Sequence[PartSpec], decay: float) -> Summaries:
    """Return (E, M) of every segment: two tokens of the KDA recurrence each, in the parts' dtype."""
    _, heads, keys, values = parts[0].shape
    generator = torch.Generator().manual_seed(len(plan.segments))
    made = []
    for _ in plan.segments:
        state = torch.zeros(heads, keys, values, dtype=torch.float64)
        transition = torch.eye(keys, dtype=torch.float64).expand(heads, keys, keys)
        for _ in range(2):
            k = torch.randn(heads, keys, 1, generator=generator, dtype=torch.float64)
            k = k / k.norm(dim=1, keepdim=True)
            v = torch.randn(heads, 1, values, generator=generator, dtype=torch.float64)
            # A weak write: what is in the state stays there for hundreds of segments.
            beta = 0.1 * torch.rand(heads, 1, 1, generator=generator, dtype=torch.float64)
            step = (torch.eye(keys, dtype=torch.float64) - beta * k @ k.mT) * decay
            state, transition = step @ state + beta * k @ v, step @ transition
        made.append((state.to(parts[0].dtype), transition.to(parts[1].dtype)))
    return made


def entering(plan: Plan, given: Summaries, direction: str) -> dict[int, Tensor]:
    """Return the state that enters every segment but the first in travel order, by recurrence in fp64."""
    step = advance("kda", direction, "k_major")
    first, *others = plan.chain(0) if direction == "forward" else plan.chain(0)[::-1]
    state, found = given[first][0].double(), {}
    for index in others:
        found[index] = state
        state = step(given[index][1].double(), state, given[index][0].double())
    return found


def exchange(
    plan: Plan, parts: tuple[PartSpec, PartSpec], composition: str, given: Summaries
) -> tuple[list[tuple[int, int, dict[str, Tensor]]], float]:
    """Run both directions on threads; per rank bytes received, bytes held and states, and the seconds."""
    wire = Wire("kda", parts, "k_major", 1, torch.device("cpu"), composition)

    def rank_main(transport: threads.ThreadTransport) -> tuple[int, int, dict[str, Tensor]]:
        tables, held = {}, []
        for direction in DIRECTIONS:
            weighed = _Weighed(transport)
            running = begin(wire, plan, weighed, direction)
            for row, index in enumerate(plan.owned(transport.rank)):
                needed = (running.needs[row].state, running.needs[row].transition)
                for part, need, value in zip(parts, needed, given[index], strict=True):
                    if need:
                        running.out[part.name][row] = value
            running.publish()
            tables[direction] = running.incoming().clone()
            held.append(weighed.held)
        return transport.stats().bytes_received, max(held), tables

    start = time.perf_counter()
    ranks = threads.run(rank_main, plan.world_size, 280.0)
    return ranks, time.perf_counter() - start


def errors(
    plan: Plan, given: Summaries, tables: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """Return per direction the largest error of a segment, relative to its largest value in fp64."""
    worst = {}
    for direction in DIRECTIONS:
        expected = entering(plan, given, direction)
        worst[direction] = max(
            float(
                (
                    tables[plan.segments[index].rank][direction][plan.local_index(index)].double()
                    - state
                )
                .abs()
                .max()
                / state.abs().max()
            )
            for index, state in expected.items()
        )
    return worst


def measure(world_size: int, composition: str) -> dict[str, Any]:
    """Run one exchange forward and backward on threads, in fp64, and compare it with plan and recurrence."""
    plan, parts = case("kda", world_size, heads=1, key_dim=3, value_dim=5, dtype=torch.float64)
    given = summaries(plan, parts, 0.95)
    ranks, seconds = exchange(plan, parts, composition, given)
    counted = [count for count, _, _ in ranks]
    wrong = errors(plan, given, [tables for _, _, tables in ranks])
    return {
        "ranks": world_size,
        "composition": composition,
        "received_bytes_most": max(counted),
        "received_bytes_all": sum(counted),
        "bytes_equal_plan": counted == received(plan, parts, composition),
        "held_bytes_most": max(held for _, held, _ in ranks),
        "max_relative_error": max(wrong.values()),
        "seconds_on_threads": round(seconds, 2),
    }


def growth(segments: int, composition: str) -> dict[str, float]:
    """Return per direction the error of a chain in fp32 with gates of -0.001, two ranks taking turns."""
    pieces = [(i % 2, 2 * i, 2 * i + 2) for i in range(segments)]
    plan = build_plan([0, 2 * segments], world_size=2, layout="custom", boundaries=pieces)
    rows = (plan.max_segments, 2, 16)
    parts = (
        PartSpec("state", (*rows, 16), torch.float32),
        PartSpec("transition", (*rows, 16), torch.float32),
    )
    given = summaries(plan, parts, float(torch.tensor(-0.001, dtype=torch.float64).exp()))
    ranks, _ = exchange(plan, parts, composition, given)
    return errors(plan, given, [tables for _, _, tables in ranks])


# ------------------------------------------------------------------------------------- page, plots


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def _pick(rows: Iterable[Mapping[str, Any]], **where: Any) -> list[Mapping[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in where.items())]


def _per_ranks(
    rows: Sequence[Mapping[str, Any]], shown: Callable[[Mapping[str, Any]], str], **where: Any
) -> str:
    found = {(r["ranks"], r["composition"]): shown(r) for r in _pick(rows, **where)}
    lines = [[n, *(found[n, composition] for composition in COMPOSITIONS)] for n in RANKS]
    return table(["ranks", *COMPOSITIONS], lines)


def _auto(op: str, backend: str, ranks: int) -> str:
    plan, parts = case(op, ranks)
    return choose(plan, parts, backend, True).composition


def sections(results: Mapping[str, Any]) -> dict[str, str]:
    """Return the generated parts of the page by their marks."""
    model, made = results["model"], {}
    for op in ("kda", "ssd"):
        shown = {"op": op, "backend": "nccl"}
        made[f"bytes {op}"] = _per_ranks(
            model, lambda r: f"{r['received_bytes_most'] / MIB:.1f}", **shown
        )
        made[f"memory {op}"] = _per_ranks(
            model, lambda r: f"{r['held_bytes_most'] / MIB:.1f}", **shown
        )
        for backend in MODELLED:
            made[f"time {op} {backend}"] = _per_ranks(
                model, lambda r: f"{r['predicted_s'] * 1e3:.2f}", op=op, backend=backend
            )
    made["auto"] = table(
        ["summaries of", "on", *(f"{ranks} ranks" for ranks in FEW)],
        [
            [op, f"`{backend}`", *(_auto(op, backend, ranks) for ranks in FEW)]
            for op in ("kda", "ssd")
            for backend in ("gloo", *MODELLED)
        ],
    )
    made["costs"] = table(
        ["backend", "latency, us", "bandwidth, GB/s", "fold, GB/s"],
        [
            [f"`{name}`", f"{c.latency_s * 1e6:g}", f"{c.bytes_per_s / 1e9:g}",
             f"{c.fold_bytes_per_s / 1e9:g}"]
            for name, c in BACKENDS.items()
        ],
    )  # fmt: skip
    made["measured"] = table(
        ["ranks", "composition", "largest rank, bytes", "all ranks, bytes", "as the plan says",
         "held by a rank, bytes", "error, fp64"],
        [
            [m["ranks"], m["composition"], m["received_bytes_most"], m["received_bytes_all"],
             "yes" if m["bytes_equal_plan"] else "NO", m["held_bytes_most"],
             f"{m['max_relative_error']:.1e}"]
            for m in results["measured"]
        ],
    )  # fmt: skip
    made["growth"] = table(
        ["segments", "composition", *DIRECTIONS],
        [
            [g["segments"], g["composition"], *(f"{g[d]:.1e}" for d in DIRECTIONS)]
            for g in results["growth"]
        ],
    )
    return made


def fill(text: str, sections: Mapping[str, str]) -> str:
    """Return a page with new texts between ``<!-- name -->`` and ``<!-- end -->``."""
    for name, body in sections.items():
        start = text.index(f"<!-- {name} -->") + len(f"<!-- {name} -->")
        text = f"{text[:start]}\n\n{body}\n\n{text[text.index('<!-- end -->', start) :]}"
    return text


def draw(model: Sequence[Mapping[str, Any]]) -> None:
    """Write one picture per op: time, bytes and memory of a layer over the ranks."""
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "cptransport", "svg.fonttype": "none"})
    panels = (
        ("predicted_s", 1e-3, "predicted time on nccl, ms"),
        ("received_bytes_most", MIB, "received by the largest rank, MiB"),
        ("held_bytes_most", MIB, "held by a rank in one exchange, MiB"),
    )
    for op in ("kda", "ssd"):
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        for axes, (key, unit, title) in zip(figure.subplots(1, 3), panels, strict=True):
            for composition in COMPOSITIONS:
                rows = _pick(model, op=op, backend="nccl", composition=composition)
                axes.loglog(
                    [row["ranks"] for row in rows],
                    [row[key] / unit for row in rows],
                    marker="o",
                    label=composition,
                )
            axes.set_xticks(RANKS, [str(n) for n in RANKS])
            axes.minorticks_off()
            axes.set_xlabel("ranks")
            axes.set_title(title, fontsize=10)
            axes.grid(alpha=0.3)
            axes.legend()
        figure.savefig(DOCS / "images" / f"scaling_{op}.svg")


def main() -> None:
    """Make results, page and plots."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", action="store_true", help="run the real runs again")
    again = parser.parse_args().measure
    results: dict[str, Any] = {"growth": [], "measured": []}
    if RESULTS.exists() and not again:
        results.update(json.loads(RESULTS.read_text(encoding="utf-8")))
    results["model"] = [
        model_row(op, backend, ranks, composition)
        for op in ("kda", "ssd")
        for backend in MODELLED
        for ranks in RANKS
        for composition in COMPOSITIONS
    ]
    results.setdefault(
        "machine",
        {
            "processor": platform.machine(),
            "cpus": os.cpu_count(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    )
    complete(results)
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(fill(page, sections(results)), encoding="utf-8")
    draw(results["model"])


def complete(results: dict[str, Any]) -> None:
    """Run what is not recorded yet, and record each run when it ends."""
    RESULTS.parent.mkdir(exist_ok=True)
    done = {(run["segments"], run["composition"]) for run in results["growth"]}
    torch.set_num_threads(1)
    for segments, composition in GROWTH:
        if (segments, composition) not in done:
            run = {"segments": segments, "composition": composition}
            results["growth"].append({**run, **growth(segments, composition)})
            save(results)
    done = {(run["ranks"], run["composition"]) for run in results["measured"]}
    for ranks, composition in MEASURED:
        if (ranks, composition) not in done:
            results["measured"].append(measure(ranks, composition))
            save(results)
    save(results)


def save(results: Mapping[str, Any]) -> None:
    """Write the results."""
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
