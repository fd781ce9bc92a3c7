# SPDX-License-Identifier: Apache-2.0
"""The ``cptransport`` command.

Each subcommand is a module here with ``add_parser(subparsers)`` and ``run(args) -> int``; only the
one that is called is imported. Exit codes:

==== =======================================================================
0    it ran, and what it checked holds
1    it ran, and what it checked does not hold
2    the command line, an argument's value or an environment variable is wrong
3    it could not run: the error is one line on stderr, all of it with --debug
130  interrupted
==== =======================================================================
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TextIO

import cptransport
from cptransport.errors import BackendNotFoundError, CPTransportError

__all__ = ["main"]

_SUBCOMMANDS = ("doctor", "demo", "verify", "bench", "report", "plan", "launch")

_WRONG_USAGE, _FAILED, _INTERRUPTED = 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: the arguments; None: those of the process.

    Returns:
        The exit code, see the module.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    modules = _modules(arguments)
    args = _parser(modules).parse_args(arguments)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = int(modules[args.command].run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("cptransport: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader has what it wanted; the interpreter would complain again while it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        print(f"cptransport {args.command}: {_one_line(error)}", file=sys.stderr)
        named = isinstance(error, BackendNotFoundError)
        wrong = named or (isinstance(error, CPTransportError) and isinstance(error, ValueError))
        return _WRONG_USAGE if wrong else _FAILED


def _modules(arguments: Sequence[str]) -> dict[str, ModuleType]:
    """Import the subcommand that is called; all that exist when that is none, for the help."""
    first = next((word for word in arguments if not word.startswith("-")), None)
    names = [first] if first in _SUBCOMMANDS else _SUBCOMMANDS
    return {
        name: import_module(f"{__name__}.{name}")
        for name in names
        if name is not None and find_spec(f"{__name__}.{name}") is not None
    }


def _parser(modules: dict[str, ModuleType]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="cptransport",
        description="Boundary state of context-parallel recurrent layers, moved between ranks.",
    )
    parser.add_argument(
        "--version", action="version", version=f"cptransport {cptransport.__version__}"
    )
    parser.add_argument("--debug", action="store_true", help="show whole tracebacks")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in modules.items():
        module.add_parser(subparsers)
        # Accepted in both places; unset here must not undo what came before the subcommand.
        subparsers.choices[name].add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show whole tracebacks"
        )
    return parser


def _one_line(error: BaseException) -> str:
    """Return an error and what caused it as one line."""
    return "; caused by ".join(
        f"{type(each).__name__}: {' '.join(str(each).split())}" for each in _chain(error)
    )


def _chain(error: BaseException) -> Iterator[BaseException]:
    said = ""
    each: BaseException | None = error
    while each is not None:
        if str(each) not in said:  # most of our messages quote their cause
            yield each
        said += str(each)
        each = each.__cause__


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Show a warning as one line: to a user of the command our source line says nothing."""
    print(f"cptransport: {category.__name__}: {message}", file=sys.stderr)
