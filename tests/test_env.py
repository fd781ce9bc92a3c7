# SPDX-License-Identifier: Apache-2.0
"""``CULA_CP_*``: parsed strictly, empty means unset, an argument beats the variable."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest

from cptransport import env
from cptransport.errors import EnvVarError


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)


def test_the_documented_variables_and_defaults_are_these() -> None:
    assert {variable.name: variable.default for variable in env.VARIABLES} == {
        "CULA_CP_COMM_BACKEND": "auto",
        "CULA_CP_STRICT": "0",
        "CULA_CP_OVERLAP": "0",
        "CULA_CP_COMPOSITION": "auto",
        "CULA_CP_ENGINE": "auto",
        "CULA_CP_MAMBA_LOAD_BALANCING": "virtual",
        "CULA_CP_TIMEOUT_S": "300",
        "CULA_CP_CHECK": "0",
    }


def test_argument_beats_variable_beats_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.text(env.ENGINE) == ("auto", "default")
    monkeypatch.setenv("CULA_CP_ENGINE", "torch")
    assert env.text(env.ENGINE) == ("torch", "environment")
    assert env.text(env.ENGINE, "triton") == ("triton", "argument")


@pytest.mark.parametrize("value", ["", "  "])
def test_empty_means_unset(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.setenv(variable.name, value)
    assert env.text(env.COMM_BACKEND) == ("auto", "default")
    assert env.choice(env.COMPOSITION) == "auto"
    assert env.flag(env.STRICT) is False
    assert env.timeout_s() == 300.0


@pytest.mark.parametrize("variable", [v for v in env.VARIABLES if v.values], ids=lambda v: v.name)
def test_every_listed_value_and_no_other_is_valid(
    variable: env.EnvVar, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert variable.default in variable.values
    for value in variable.values:
        monkeypatch.setenv(variable.name, value)
        assert env.choice(variable) == value
    monkeypatch.setenv(variable.name, "yes")
    with pytest.raises(EnvVarError) as caught:
        env.choice(variable)
    assert f"{variable.name}=yes is not valid" in str(caught.value)
    assert ", ".join(variable.values) in str(caught.value)


def test_a_typo_in_a_value_gets_a_suggestion_from_variable_and_argument_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(EnvVarError, match="did you mean 'handoff'"):
        env.choice(env.COMPOSITION, "handof")
    monkeypatch.setenv("CULA_CP_COMPOSITION", "gahter")
    with pytest.raises(EnvVarError, match="did you mean 'gather'"):
        env.choice(env.COMPOSITION)


@pytest.mark.parametrize("variable", [env.ENGINE, env.COMPOSITION], ids=lambda each: each.name)
def test_an_argument_is_text(variable: env.EnvVar) -> None:
    argument: Any = 5
    with pytest.raises(EnvVarError, match=f"5 is not valid; give a str, as in {variable.name}"):
        env.text(variable, argument)


@pytest.mark.parametrize("value", ["true", "2", "on", "-1"])
def test_flags_are_0_or_1(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_STRICT", value)
    with pytest.raises(EnvVarError, match="CULA_CP_STRICT"):
        env.flag(env.STRICT)
    assert env.flag(env.STRICT, True) is True


@pytest.mark.parametrize("value", ["0", "-5", "nan", "inf", "5s", "five"])
def test_the_limit_is_a_positive_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_TIMEOUT_S", value)
    with pytest.raises(EnvVarError, match=f"CULA_CP_TIMEOUT_S={value}"):
        env.timeout_s()
    assert env.timeout_s(2) == 2.0


def test_a_bad_limit_as_argument_is_named_as_such() -> None:
    with pytest.raises(EnvVarError, match="timeout_s=0"):
        env.timeout_s(0)


def test_unknown_names_warn_with_a_suggestion(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_COMM_BACKND", "gloo")
    with pytest.warns(
        UserWarning, match="CULA_CP_COMM_BACKND; did you mean 'CULA_CP_COMM_BACKEND'"
    ):
        env.check_names(strict=False)


def test_unknown_names_are_an_error_under_strict_that_names_them_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CULA_CP_STRCT", "1")
    monkeypatch.setenv("CULA_CP_XYZZY", "1")
    with pytest.raises(EnvVarError) as caught:
        env.check_names(strict=True)
    assert "CULA_CP_STRCT; did you mean 'CULA_CP_STRICT'?" in str(caught.value)
    assert "CULA_CP_XYZZY" in str(caught.value)


def test_names_that_backends_declare_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_MY_BACKEND_DEPTH", "3")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env.check_names(strict=True, declared=["CULA_CP_MY_BACKEND_DEPTH"])


def test_import_reads_nothing() -> None:
    nonsense = {variable.name: "nonsense" for variable in env.VARIABLES}
    subprocess.run(
        [sys.executable, "-W", "error", "-c", "import cptransport, cptransport.ops"],
        env={**os.environ, **nonsense, "CULA_CP_NO_SUCH_NAME": "1"},
        check=True,
        timeout=120,
    )
