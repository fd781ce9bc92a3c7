# SPDX-License-Identifier: Apache-2.0
"""Options of ``pytest --pyargs cptransport.testing.suite``, known to every pytest session.

pytest must know an option before it reads the command line, so this is a ``pytest11`` entry point.
It imports nothing: torch and the suite are loaded only when ``--cpt-backend`` is given.
"""

from __future__ import annotations

from typing import Any

__all__ = ["pytest_addoption", "pytest_configure"]


def pytest_addoption(parser: Any) -> None:
    """Add the options."""
    group = parser.getgroup("cptransport", "transport contract (cptransport)")
    group.addoption("--cpt-backend", metavar="NAME", help="backend to test, or module:ATTR")
    group.addoption("--cpt-world-size", metavar="N[,N]", default="2", help="ranks; default 2")
    group.addoption("--cpt-device", choices=("cpu", "cuda"), default="cpu")
    group.addoption("--cpt-ranks-per-device", metavar="N", type=int, default=1)
    group.addoption(
        "--cpt-xfails",
        metavar="FILE",
        help="TOML: a table per contract test that is known to fail, with reason and issue (a link)",
    )
    group.addoption(
        "--cpt-report",
        metavar="FILE",
        help="where the JSON report goes; default conformance.json when --cpt-backend is given",
    )


def pytest_configure(config: Any) -> None:
    """Load the plugin when it is asked for."""
    name = "cptransport.testing.plugin"
    if config.getoption("--cpt-backend") and not config.pluginmanager.has_plugin(name):
        config.pluginmanager.import_plugin(name)
