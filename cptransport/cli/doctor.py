# SPDX-License-Identifier: Apache-2.0
"""``cptransport doctor``: which backends and engines are there, usable here or why not, and what ``auto`` takes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from cptransport import env, registry
from cptransport.errors import BackendError, BackendUnavailableError, CPTransportError, EnvVarError
from cptransport.select import auto_candidates
from cptransport.versions import versions

__all__ = ["add_parser", "examine", "run"]

#: Variables shown beside our own, by how their names start.
_PREFIXES = (env.PREFIX, "CUDA_VISIBLE_DEVICES", "GLOO_", "NCCL_", "NVSHMEM_", "TORCH_", "TRITON_")


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="which backends are installed, usable here or why not, and what auto takes",
        description="Reports every backend (installed, version, usable here or why not), what auto would take and why, "
        "versions and environment. Exit code 0 whenever it could report.",
    )
    parser.add_argument("--json", action="store_true", help="print only JSON on stdout")


def run(args: argparse.Namespace) -> int:
    """Print the report."""
    with contextlib.redirect_stdout(sys.stderr):  # plugins may print when they are imported
        report = examine()
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0


def examine() -> dict[str, Any]:
    """Return the report.

    Returns:
        ``backends``: a dict with ``name, installed, version, usable, reason, install`` and more per known backend;
        ``auto``: what it takes for several ranks on this machine (None: nothing can serve), ``auto_reason``: why;
        ``engines``: names by op; ``versions``; ``devices``; ``environment``: relevant variables that are set;
        ``problems``: what is wrong with them and with engine plugins.
    """
    backends = [_backend(name) for name in registry.backend_names()]
    auto, why = _auto({row["name"]: row for row in backends})
    return {
        "backends": backends,
        "auto": auto,
        "auto_reason": why,
        "engines": {op: list(registry.engine_names(op)) for op in ("kda", "ssd")},
        "versions": _versions(),
        "devices": [str(device) for device in _devices()],
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
        "problems": _problems(),
    }


def _backend(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": name,
        "installed": False,
        "version": None,
        "usable": False,
        "reason": None,
        "install": "",
        "distribution": None,
        "summary": "",
        "advice": [],
        "details": [],
    }
    try:
        origin = registry.find_backend(name)
        row.update(install=origin.install, distribution=origin.distribution)
        loaded = registry.load_backend(name)
    except BackendUnavailableError as error:
        return {**row, "reason": str(error)}
    except BackendError as error:
        found = row["distribution"] and registry.installed_version(row["distribution"])
        return {**row, "installed": True, "version": found, "reason": f"broken: {error}"}
    reason = _why_not(loaded)
    return {
        **row,
        "installed": True,
        "version": origin.version,
        "usable": reason is None,
        "reason": reason,
        "install": origin.install or loaded.spec.install,
        "summary": loaded.spec.summary,
        "advice": _lines(loaded, "advice") if reason is None else [],
        "details": _lines(loaded, "details"),
    }


def _why_not(loaded: registry.LoadedBackend) -> str | None:
    """Say why a backend cannot serve on any device of this machine; None when it can."""
    try:
        registry.check_values(loaded.spec)
        if loaded.spec.name == "threads":
            return None  # serves inside threads.run, on any machine
        reasons = [_probe(loaded, device) for device in _devices()]
    except CPTransportError as error:
        return str(error)
    except (Exception, SystemExit) as error:
        return f"broken: probe raised {type(error).__name__}: {error}"
    return None if None in reasons else reasons[0]


def _probe(loaded: registry.LoadedBackend, device: torch.device) -> str | None:
    types = loaded.spec.capabilities.device_types
    if device.type not in types:
        return f"needs a {' or '.join(types)} device, not {device}"
    return loaded.spec.probe(None, device)


def _lines(loaded: registry.LoadedBackend, what: str) -> list[str]:
    """Return what a backend says about the environment (``advice``) or about itself here (``details``)."""
    say = getattr(loaded.spec, what)
    if say is None:
        return []
    try:
        return list(say(_devices()[0]))
    except (Exception, SystemExit) as error:
        return [f"broken: {what} raised {type(error).__name__}: {error}"]


def _devices() -> list[torch.device]:
    """Return the devices to ask about, the best one first."""
    cpu = torch.device("cpu")
    if not torch.cuda.is_available():
        return [cpu]
    return [torch.device("cuda", torch.cuda.current_device()), cpu]


def _auto(rows: dict[str, dict[str, Any]]) -> tuple[str | None, str]:
    on_cuda = torch.cuda.is_available()
    candidates = auto_candidates(2, in_threads=False, on_cuda=on_cuda)
    chosen = next((name for name in candidates if rows[name]["usable"]), None)
    tried = candidates[: candidates.index(chosen)] if chosen else candidates
    passed_over = "".join(f"; {name} cannot: {rows[name]['reason']}" for name in tried)
    kind = "CUDA" if on_cuda else "CPU"
    alone = auto_candidates(1, in_threads=False, on_cuda=on_cuda)[0]
    return chosen, (
        f"for several ranks on {kind} {chosen or 'nothing'}{passed_over}; for one rank {alone}; "
        "inside threads.run threads"
    )


def _versions() -> dict[str, str | None]:
    gpu = {"gpu": torch.cuda.get_device_name()} if torch.cuda.is_available() else {}
    return {**versions(), **gpu}


def _problems() -> list[str]:
    """Say which engine plugins do not load and which ``CULA_CP_*`` variables are not valid."""
    problems = [*registry.broken_engines(), *env.unknown_names(registry.declared_variables())]
    for variable in env.VARIABLES:
        try:
            if variable.values:
                env.choice(variable)
        except EnvVarError as error:
            problems.append(str(error))
    checks = (
        env.timeout_s,
        lambda: _known(env.text(env.COMM_BACKEND)[0]),
    )
    for check in checks:
        try:
            check()
        except CPTransportError as error:
            problems.append(str(error))
    return problems


def _known(backend: str) -> None:
    if backend != registry.AUTO:
        registry.find_backend(backend)


def _text(report: dict[str, Any]) -> str:
    rows = [("backend", "version", "usable", "")]
    for row in report["backends"]:
        usable = "yes" if row["usable"] else "no"
        rows.append((row["name"], row["version"] or "-", usable, row["reason"] or row["summary"]))
    lines = _table(rows)
    lines += ["", f"auto         {report['auto_reason']}"]
    lines += [f"engines {op:<4} {', '.join(names)}" for op, names in report["engines"].items()]
    lines += [
        "",
        "versions     " + ", ".join(f"{k} {v or '-'}" for k, v in report["versions"].items()),
    ]
    lines += [f"environment  {name}={value}" for name, value in report["environment"].items()]
    lines += [
        f"{what:<12} {row['name']}: {line}"
        for what in ("details", "advice")
        for row in report["backends"]
        for line in row[what]
    ]
    lines += [f"problem      {problem}" for problem in report["problems"]]
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return [
        "  ".join([*(f"{row[i]:<{width}}" for i, width in enumerate(widths)), row[-1]]).rstrip()
        for row in rows
    ]
