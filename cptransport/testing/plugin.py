# SPDX-License-Identifier: Apache-2.0
"""pytest plugin of the contract suite: options, markers, ``conformance.json``.

A backend's own repository needs one line in its top-level ``conftest.py``::

    pytest_plugins = ["cptransport.testing.plugin"]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

__all__ = ["ConformanceReport", "pytest_configure", "read_xfails"]

pytest_plugins = ["cptransport_pytest"]  # the options; known already where cptransport is installed

# Before the suite is imported, or its failures would show no values.
for _name in ("base", "bytes", "device", "generations", "groups", "lifetime", "order", "routes"):
    pytest.register_assert_rewrite(f"cptransport.testing.contract_{_name}")
pytest.register_assert_rewrite("cptransport.testing.contract_waits", "cptransport.testing.oracle")

SCHEMA = "cptransport.conformance/1"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker of the suite and, if a report is wanted, what writes it."""
    config.addinivalue_line("markers", "slow: full-size figures of the contract suite")
    report = config.getoption("--cpt-report")
    if report is None and config.getoption("--cpt-backend"):
        report = "conformance.json"
    if report and not config.pluginmanager.has_plugin("cptransport-report"):
        config.pluginmanager.register(ConformanceReport(Path(report)), "cptransport-report")


def read_xfails(path: Path) -> dict[str, tuple[str, str]]:
    """Read contract tests that are known to fail.

    Args:
        path: TOML with a table per test: ``reason`` and ``issue`` (a link), both required.

    Returns:
        Test name -> (reason, link).

    Raises:
        pytest.UsageError: the file is not like that.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # type: ignore[import-not-found,unused-ignore]  # by pytest

    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
        return {name: (str(table["reason"]), str(table["issue"])) for name, table in tables.items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise pytest.UsageError(f"--cpt-xfails={path}: {error!r}") from error


class ConformanceReport:
    """Collects how the contract tests went and writes one JSON document per backend.

    Args:
        path: of the document; with several backends in one session, their names are inserted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = time.time()
        self._backends: dict[str, dict[str, Any]] = {}
        self._tests: dict[str, tuple[str, str]] = {}  # node id -> backend, test

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note which tests belong to the contract."""
        from cptransport.testing.contract import TransportContract

        for item in items:
            kind = getattr(item, "cls", None)
            if kind is not None and issubclass(kind, TransportContract):
                backend = self._backends.setdefault(kind.backend, _empty(kind))
                backend["world_sizes"] = sorted({*backend["world_sizes"], *kind.world_sizes})
                self._tests[item.nodeid] = kind.backend, item.name

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a test's outcome."""
        if report.nodeid not in self._tests:
            return
        if report.when != "call" and report.outcome == "passed":
            return
        name, test = self._tests[report.nodeid]
        backend = self._backends[name]
        expected = hasattr(report, "wasxfail")
        outcome = "xfailed" if expected and report.skipped else report.outcome
        backend["counts"][outcome] += 1
        if outcome == "skipped":
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            backend["skipped"][str(reason).removeprefix("Skipped: ")] += 1
        elif outcome == "xfailed":
            backend["xfails"][test] = report.wasxfail
        elif outcome == "failed":
            backend["failures"][test] = str(report.longrepr).splitlines()[-1:]

    def pytest_sessionfinish(self) -> None:
        """Write the documents."""
        for name, backend in self._backends.items():
            if not backend["counts"]:
                continue
            path = self._path
            if len(self._backends) > 1:
                safe = "".join(c if c.isalnum() else "_" for c in name)
                path = path.with_name(f"{path.stem}-{safe}{path.suffix}")
            document = {
                "schema": SCHEMA,
                "backend": name,
                **backend,
                "duration_s": round(time.time() - self._start, 1),
                "finished_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "machine": _machine(),
                "versions": _versions(),
            }
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _empty(kind: Any) -> dict[str, Any]:
    from cptransport.testing.contract import CONTRACT_VERSION

    return {
        "distribution": _distribution(kind.backend),
        "contract_version": CONTRACT_VERSION,
        "world_sizes": [],
        "device": kind.device,
        "ranks_per_device": kind.ranks_per_device,
        "counts": Counter(),
        "skipped": Counter(),
        "xfails": {},
        "failures": {},
    }


def _distribution(backend: str) -> str | None:
    """Which distribution brings the backend, with its version; None for ``module:ATTR``."""
    for entry in importlib.metadata.entry_points(group="cptransport.backends"):
        if entry.name == backend and entry.dist is not None:
            return f"{entry.dist.name} {entry.dist.version}"
    from cptransport import __version__

    return None if ":" in backend else f"cptransport {__version__}"


def _versions() -> Mapping[str, str | None]:
    from cptransport.versions import versions

    return {**versions(), "pytest": pytest.__version__}


def _machine() -> Mapping[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"platform": platform.platform(), "cpus": os.cpu_count(), "gpus": gpus}
