# SPDX-License-Identifier: Apache-2.0
"""Reports show what they must and hide what they must not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from documents import document, row

from cptransport.bench.render import html, markdown, write_report
from cptransport.bench.report import blocks
from cptransport.bench.schema import problems

GREEN = {"gate": {"failed": 0}}


def pair(**blocks: Any) -> dict[str, Any]:
    """Return a document of an op and its baseline."""
    own = row((30.0, 30.0), mode="fwd", provider="own", world_size=4)
    other = row((60.0, 60.0), mode="fwd", provider="theirs", world_size=1, baseline=True)
    return document(own, other, **blocks)


def text_of(made: dict[str, Any]) -> str:
    return markdown(blocks(made))


def table(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    section = text.split(f"### {heading}\n", 1)[1].split("\n#", 1)[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_comparison_has_both_times_and_under_a_green_gate_the_ratio() -> None:
    header, _, line = table(text_of(pair(**GREEN)), "Against baselines")
    assert header[-1] == "time ratio"
    assert line[1:] == ["fwd", "perf_counter", "own", "30.0", "theirs", "60.0", "0.500"]


@pytest.mark.parametrize("gate", [{"failed": 1}, {"passed": 0, "failed": 0}])
def test_without_a_green_gate_both_times_stay_and_the_ratio_goes(gate: dict[str, int]) -> None:
    text = text_of(pair(gate=gate))
    header, _, line = table(text, "Against baselines")
    assert header[-1] == "baseline median us"
    assert line[1:] == ["fwd", "perf_counter", "own", "30.0", "theirs", "60.0"]
    assert "time ratio" not in text
    assert "0.5" not in text
    assert "**WARNING: The gate is not green: " in text


def test_other_shapes_and_timers_are_not_compared() -> None:
    own = row(mode="fwd", provider="own")
    for name, value in (("timer", "cuda_event"), ("mode", "bwd"), ("dtype", "bfloat16")):
        other = row(mode="fwd", provider="theirs", baseline=True) | {name: value}
        assert "Against baselines" not in text_of(document(own, other, **GREEN))


def test_ranks_that_shared_a_device_put_a_banner_on_the_page() -> None:
    shared = pair(machine={"ranks_per_device": 3, "gpus_used": 1, "gpu_name": "H200"})
    assert "**WARNING: 3 ranks share one GPU: times compare" in text_of(shared)
    assert '<p class="banner">3 ranks share one GPU: times compare' in html(blocks(shared))
    on_cpu = pair(machine={"ranks_per_device": 4})
    assert "4 ranks shared one host CPU with 2 cores." in text_of(on_cpu)
    assert "shared one" not in text_of(pair(machine={"ranks_per_device": 1}))


def test_rows_without_a_number_are_listed_with_their_reason() -> None:
    lines = table(text_of(document()), "Rows without a number")
    expected = ["threads", "error", "perf_counter: merge", "RuntimeError: it broke"]
    assert lines[2] == expected


def test_figures_configuration_and_command_are_printed() -> None:
    big = row((2000.0,), bytes_received=3 << 20, options={"composition": "handoff"})
    made = document(row(), big, **GREEN)
    text = text_of(made)
    header, _, first, second = table(text, "Published to merged")
    assert header[:4] == ["provider", "configuration", "timer", "median us"]
    assert first[:6] == ["gloo", "gather", "perf_counter", "12.0", "10.8 to 13.2", "10.0"]
    assert second[:4] == ["gloo", "handoff", "perf_counter", "2,000"]
    assert second[header.index("received")] == "3.00 MiB"
    assert second[header.index("GB/s")] == "1.57"
    assert first[header.index("received")] == "-"
    assert "cptransport bench boundary --op 'k d a'" in text
    assert "All rows: kda, float32, world_size 4, H 2, K 8, V 8, N 1." in text


def test_kernels_are_listed_by_time() -> None:
    times = {"_walk": 3.0, "void fold<float, 4>(float*, int)": 12.25}
    made = document(row(kernel_us=times), row(provider="other"), **GREEN)
    assert problems(made) == []
    _, _, *lines = table(text_of(made), "Times by kernel")
    assert [(line[0], line[-1]) for line in lines] == [("gloo", "fold<float, 4> 12.2, _walk 3.0")]
    assert "Times by kernel" not in text_of(document(row(), **GREEN))


def test_cells_cannot_break_a_table_or_the_page() -> None:
    made = document(row(provider="a", error="x | y\n<script>"))
    assert "x \\| y <script>" in text_of(made)
    assert "<script>" not in html(blocks(made))


def test_the_report_is_one_page_that_needs_no_other_file(tmp_path: Path) -> None:
    page, text, *pictures = write_report([pair(**GREEN), document()], tmp_path / "new")
    written = page.read_text(encoding="utf-8")
    sources = re.findall(r'(?:src|href)="([^"]*)"', written)
    assert len(sources) == len(pictures) == 2
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    for picture in pictures:
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert f"({picture.name})" in text.read_text(encoding="utf-8")
    assert written.count("<h2>") == 2


def test_a_document_without_rows_is_rendered(tmp_path: Path) -> None:
    made = document(**GREEN)
    made["rows"] = []
    page, *_ = write_report([made], tmp_path)
    assert "bench on Some CPU" in page.read_text(encoding="utf-8")
