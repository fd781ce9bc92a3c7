# SPDX-License-Identifier: Apache-2.0
"""The contract suite on the backend that the command line names."""

from __future__ import annotations

from pathlib import Path

import pytest

from cptransport.testing.contract import TransportContract
from cptransport.testing.plugin import read_xfails


class TestContract(TransportContract):
    """Every contract test; see ``pytest --help``, section "transport contract"."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Take backend, world sizes, device and known failures from the command line."""
        option = metafunc.config.getoption
        kind = type(self)
        kind.backend = option("--cpt-backend") or ""
        if not kind.backend:
            raise pytest.UsageError("the suite needs --cpt-backend=NAME")
        kind.world_sizes = tuple(int(size) for size in option("--cpt-world-size").split(","))
        kind.device = option("--cpt-device")
        kind.ranks_per_device = option("--cpt-ranks-per-device")
        if option("--cpt-xfails"):
            kind.xfails = read_xfails(Path(option("--cpt-xfails")))
        super().pytest_generate_tests(metafunc)
