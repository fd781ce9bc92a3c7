# SPDX-License-Identifier: Apache-2.0
"""The environment variables ``CULA_CP_*``: names, defaults, strict parsing.

Nothing is read at import. An argument beats the variable, the variable beats the default; an empty
value means unset.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cptransport import notices
from cptransport.errors import EnvVarError

__all__ = [
    "CHECK",
    "COMM_BACKEND",
    "COMPOSITION",
    "ENGINE",
    "MAMBA_LOAD_BALANCING",
    "OVERLAP",
    "PREFIX",
    "STRICT",
    "TIMEOUT_S",
    "VARIABLES",
    "EnvVar",
    "check_names",
    "choice",
    "flag",
    "suggestion",
    "text",
    "timeout_s",
    "unknown_names",
]

PREFIX = "CULA_CP_"


@dataclass(frozen=True)
class EnvVar:
    """One variable: its name, default, valid values (empty: free text or a number) and meaning."""

    name: str
    default: str
    values: tuple[str, ...]
    help: str


COMM_BACKEND = EnvVar(
    "CULA_CP_COMM_BACKEND",
    "auto",
    (),
    "transport: auto, a registered name, nvshmem, or package.module:ATTR",
)
STRICT = EnvVar(
    "CULA_CP_STRICT", "0", ("0", "1"), "1: fallbacks and unknown CULA_CP_* names are errors"
)
OVERLAP = EnvVar("CULA_CP_OVERLAP", "0", ("0", "1"), "1: exchange beside local work")
COMPOSITION = EnvVar(
    "CULA_CP_COMPOSITION",
    "auto",
    ("auto", "handoff", "gather", "scan"),
    "how summaries are composed",
)
ENGINE = EnvVar(
    "CULA_CP_ENGINE", "auto", (), "local compute: auto, torch, triton, cudnn, or a plugin's name"
)
MAMBA_LOAD_BALANCING = EnvVar(
    "CULA_CP_MAMBA_LOAD_BALANCING",
    "virtual",
    ("none", "permute_p2p", "permute_a2a", "virtual", "all_to_all"),
    "how the Mamba2 mixer core balances its layout",
)
TIMEOUT_S = EnvVar("CULA_CP_TIMEOUT_S", "300", (), "limit of every wait, in seconds")
CHECK = EnvVar("CULA_CP_CHECK", "0", ("0", "1"), "1: ranks compare op inputs before each exchange")

VARIABLES: tuple[EnvVar, ...] = (
    COMM_BACKEND,
    STRICT,
    OVERLAP,
    COMPOSITION,
    ENGINE,
    MAMBA_LOAD_BALANCING,
    TIMEOUT_S,
    CHECK,
)


def suggestion(word: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest valid word, or an empty string."""
    close = difflib.get_close_matches(word, list(valid), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def text(variable: EnvVar, argument: str | None = None) -> tuple[str, str]:
    """Return the value and where it came from: ``"argument"``, ``"environment"`` or ``"default"``.

    Raises:
        EnvVarError: the argument is no text.
    """
    if argument is not None:
        if not isinstance(argument, str):
            raise EnvVarError(f"{argument!r} is not valid; give a str, as in {variable.name}")
        return argument, "argument"
    value = os.environ.get(variable.name, "").strip()
    return (value, "environment") if value else (variable.default, "default")


def choice(variable: EnvVar, argument: str | None = None) -> str:
    """Return one of the variable's values.

    Raises:
        EnvVarError: the variable (or the argument) is none of them; the message lists them.
    """
    value, source = text(variable, argument)
    if value not in variable.values:
        where = f"{variable.name}={value}" if source == "environment" else repr(value)
        raise EnvVarError(
            f"{where} is not valid; choose one of {', '.join(variable.values)}"
            + suggestion(str(value), variable.values)
        )
    return value


def flag(variable: EnvVar, argument: bool | None = None) -> bool:
    """Return a 0/1 variable as a bool.

    Raises:
        EnvVarError: neither 0 nor 1.
    """
    return bool(argument) if argument is not None else choice(variable) == "1"


def timeout_s(argument: float | None = None) -> float:
    """Return the limit of every wait in seconds.

    Raises:
        EnvVarError: not a positive finite number.
    """
    value, source = (argument, "argument") if argument is not None else text(TIMEOUT_S)
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not (seconds > 0 and math.isfinite(seconds)):
        where = f"{TIMEOUT_S.name}={value}" if source == "environment" else f"timeout_s={value!r}"
        raise EnvVarError(f"{where} is not valid; give a positive number of seconds")
    return seconds


def check_names(*, strict: bool, declared: Sequence[str] = ()) -> None:
    """Complain about ``CULA_CP_*`` names in the environment that nobody declares.

    Args:
        strict: raise in place of warning.
        declared: names that backends declare.

    Raises:
        EnvVarError: strict, and a name is unknown.
    """
    messages = unknown_names(declared)
    if strict and messages:
        raise EnvVarError("; ".join(messages))
    for message in messages:
        notices.warn(message)


def unknown_names(declared: Sequence[str] = ()) -> list[str]:
    """Return a message for every ``CULA_CP_*`` name in the environment that nobody declares."""
    known = {variable.name for variable in VARIABLES} | set(declared)
    return [
        f"unknown environment variable {name}" + suggestion(name, known)
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known
    ]
