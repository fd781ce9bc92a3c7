# SPDX-License-Identifier: Apache-2.0
"""The command itself: which subcommands there are, exit codes, how errors look."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import types
import warnings
from importlib.util import find_spec
from typing import Any

import pytest

import cptransport
from cptransport import cli
from cptransport.errors import (
    BackendFallbackWarning,
    BackendLoadError,
    EnvVarError,
    TransportTimeoutError,
)


@pytest.fixture
def subcommand(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that makes ``doctor`` do something else."""

    def become(run: Any) -> None:
        module = types.ModuleType("cptransport.cli.doctor")
        module.add_parser = lambda subparsers: subparsers.add_parser("doctor")  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "cptransport.cli.doctor", module)
        monkeypatch.setattr(cli, "find_spec", lambda name: module)

    return become


def raiser(error: BaseException) -> Any:
    def run(args: argparse.Namespace) -> int:
        raise error

    return run


def test_help_lists_the_subcommands_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for name in ("doctor", "demo", "verify", "bench", "report", "plan", "launch"):
        exists = find_spec(f"cptransport.cli.{name}") is not None
        assert (f"\n    {name} " in text) == exists, name


def test_only_the_subcommand_that_is_called_is_imported() -> None:
    program = (
        "import sys; from cptransport.cli import main\n"
        "main(['plan', '--cu-seqlens', '0,4', '--world-size', '2'])\n"
        "assert not {'cptransport.cli.doctor', 'cptransport.cli.demo', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, capture_output=True)


def test_python_m_is_the_same_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "cptransport", "--version"],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert result.stdout == f"cptransport {cptransport.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["docter"], ["doctor", "--jason"]])
def test_a_wrong_command_line_is_code_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2


def test_the_code_of_a_subcommand_is_the_code(subcommand: Any) -> None:
    for code in (0, 1):
        subcommand(lambda args, code=code: code)
        assert cli.main(["doctor"]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EnvVarError("CULA_CP_STRICT=2 is not valid"), 2),
        (TransportTimeoutError("rank 0: waited\n  5 s"), 3),
        (OSError("no space"), 3),
        (ValueError("not of this library"), 3),
        (KeyboardInterrupt(), 130),
    ],
    ids=lambda value: type(value).__name__,
)
def test_errors_are_one_line_with_a_code(
    error: BaseException, code: int, subcommand: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    subcommand(raiser(error))
    assert cli.main(["doctor"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    if code != 130:
        assert f"{type(error).__name__}: {' '.join(str(error).split())}" in err


def test_the_cause_is_told_unless_the_message_has_it(
    subcommand: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for message, line in (
        ("it failed", "BackendLoadError: it failed; caused by OSError: no libx"),
        ("it failed: no libx", "BackendLoadError: it failed: no libx"),
    ):
        error = BackendLoadError(message)
        error.__cause__ = OSError("no libx")
        subcommand(raiser(error))
        assert cli.main(["doctor"]) == 3
        assert capsys.readouterr().err == f"cptransport doctor: {line}\n"


@pytest.mark.parametrize("arguments", [["--debug", "doctor"], ["doctor", "--debug"]])
def test_debug_shows_the_whole_error(arguments: list[str], subcommand: Any) -> None:
    subcommand(raiser(TransportTimeoutError("waited")))
    with pytest.raises(TransportTimeoutError):
        cli.main(arguments)


def test_warnings_are_one_line_on_stderr(
    subcommand: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(args: argparse.Namespace) -> int:
        warnings.warn("gloo runs instead", BackendFallbackWarning, stacklevel=1)
        return 0

    subcommand(run)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        cli.main(["doctor"])
    out, err = capsys.readouterr()
    assert (out, err) == ("", "cptransport: BackendFallbackWarning: gloo runs instead\n")


def test_a_reader_that_has_enough_is_no_error() -> None:
    program = (
        "import sys, os; os.close(1); os.dup(int(sys.argv[1])); from cptransport.cli import main\n"
    )
    program += "sys.exit(main(['plan', '--cu-seqlens', '0,4', '--world-size', '2']))"

    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-c", program, str(writer)],
        pass_fds=[writer],
        timeout=120,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")
