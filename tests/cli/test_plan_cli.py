# SPDX-License-Identifier: Apache-2.0
"""``cptransport plan``: the plan as text and as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import cptransport
from cptransport import cli

EXAMPLE = ["plan", "--cu-seqlens", "0,5,13", "--world-size", "4", "--layout", "zigzag"]


def test_it_prints_who_owns_what_and_what_moves(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(EXAMPLE) == 0
    text = capsys.readouterr().out
    plan = cptransport.build_plan([0, 5, 13], world_size=4, layout="zigzag")
    assert text.startswith(
        plan.describe() + "\nkda, 32 heads, K 128, V 128, batch 1, float32, on gloo"
    )
    assert "rank 3: 4 rows (6:10)" in text
    assert "sequence 1: 8 tokens, rank 2 -> rank 3 -> rank 2 -> rank 1 -> rank 0" in text


@pytest.mark.parametrize(
    ("arguments", "plan"),
    [
        ([], {}),
        (["--boundaries", "0,2,2,13"], {"boundaries": [0, 2, 2, 13]}),
        (
            ["--layout", "custom", "--boundaries", "2:0:6,0:6:13"],
            {"layout": "custom", "boundaries": [(2, 0, 6), (0, 6, 13)]},
        ),
        (["--padded-cu-seqlens", "0,8,16"], {"padded_cu_seqlens": [0, 8, 16]}),
    ],
)
def test_every_argument_of_a_plan_can_be_given(
    arguments: list[str], plan: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", "--cu-seqlens", "0,5,13", "--world-size", "3", *arguments]) == 0
    expected = cptransport.build_plan([0, 5, 13], world_size=3, **plan)  # type: ignore[arg-type]
    assert capsys.readouterr().out.startswith(expected.describe() + "\nkda, ")


def test_it_says_what_auto_takes_and_what_all_are_predicted_to_take(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def costs(*arguments: str) -> list[str]:
        assert cli.main(["plan", "--cu-seqlens", "0,64", *arguments]) == 0
        return capsys.readouterr().out.splitlines()[-4:]

    title, handoff, gather, scan = costs("--world-size", "2")
    assert title.endswith("on gloo, forward and backward: auto takes gather")
    # 2 MiB of state in each direction, 0.2 ms and 1 GB/s: the same in all compositions.
    for line, name in ((handoff, "handoff"), (gather, "gather"), (scan, "scan")):
        assert line == f"  {name}: predicted 4594 us, a rank receives up to 2097152 bytes"
    title, *_ = costs("--world-size", "64")
    assert title.endswith("auto takes scan")
    title, *_ = costs("--world-size", "64", "--heads", "1", "--key-dim", "4", "--value-dim", "4")
    assert title.startswith("kda, 1 heads, K 4, V 4, batch 1")
    assert title.endswith("auto takes gather")
    title, *_, ssd = costs("--world-size", "64", "--op", "ssd", "--batch", "2")
    assert title.startswith("ssd, 32 heads, K 128, V 128, batch 2")
    # Rank 32: 6 windows forward, 5 backward, one of them finished each; a transition is a number.
    assert ssd.endswith(f"a rank receives up to {2 * 32 * 4 * (11 * 128 * 128 + 9)} bytes")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cu-seqlens", "0,5,3", "--world-size", "2"], "cu_seqlens must not decrease"),
        (["--cu-seqlens", "0,5", "--world-size", "0"], "world_size must be at least 1"),
        (
            ["--cu-seqlens", "0,5", "--world-size", "2", "--layout", "zigzga"],
            "did you mean 'zigzag'",
        ),
    ],
)
def test_a_malformed_plan_is_one_line_and_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("cptransport plan: PlanError: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("offsets", ["0,five", "", "0:5"])
def test_offsets_that_are_no_numbers_are_a_wrong_command_line(
    offsets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["plan", "--cu-seqlens", offsets, "--world-size", "2"])
    assert stopped.value.code == 2
    assert "is not an integer" in capsys.readouterr().err


@pytest.mark.parametrize(("ending", "magic"), [("png", b"\x89PNG"), ("svg", b"<?xml")])
@pytest.mark.parametrize("padded", [False, True])
def test_it_draws_the_plan(ending: str, magic: bytes, padded: bool, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / f"plan.{ending}"
    padding = ["--padded-cu-seqlens", "0,8,16"] if padded else []
    assert cli.main([*EXAMPLE, *padding, "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(magic)


def test_an_empty_stream_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "plan.png"
    assert cli.main(["plan", "--cu-seqlens", "0,0", "--world-size", "2", "--plot", str(file)]) == 0
    assert file.stat().st_size > 1000


def test_without_matplotlib_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*EXAMPLE, "--plot", str(tmp_path / "plan.png")]) == 3
    assert "pip install 'cptransport[bench]'" in capsys.readouterr().err


def test_a_file_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    assert cli.main([*EXAMPLE, "--plot", str(tmp_path / "no" / "plan.png")]) == 3
    assert capsys.readouterr().err.startswith("cptransport plan: FileNotFoundError")
