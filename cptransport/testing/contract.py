# SPDX-License-Identifier: Apache-2.0
"""The conformance suite as one class: subclass it, name a backend, and pytest runs it.

::

    import cptransport.testing.contract as ct

    class TestContract(ct.TransportContract):
        backend = "my_backend"
        world_sizes = (1, 2, 3, 4)

A subclass sets attributes and may override ``make_options`` and fixtures, nothing else; a test that
cannot pass yet is listed in ``xfails`` with its reason. What a test needs and a transport does not
claim is skipped by capability.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from cptransport.testing.contract_base import CONTRACT_VERSION, Figures, clause, clauses_of
from cptransport.testing.contract_bytes import BytesContract
from cptransport.testing.contract_device import DeviceContract
from cptransport.testing.contract_generations import GenerationsContract
from cptransport.testing.contract_groups import GroupsContract
from cptransport.testing.contract_lifetime import LifetimeContract
from cptransport.testing.contract_order import OrderContract
from cptransport.testing.contract_routes import RoutesContract
from cptransport.testing.contract_waits import WaitsContract

__all__ = ["CONTRACT_VERSION", "Figures", "TransportContract", "clause", "clauses_of"]


class TransportContract(
    BytesContract,
    RoutesContract,
    GenerationsContract,
    OrderContract,
    GroupsContract,
    WaitsContract,
    LifetimeContract,
    DeviceContract,
):
    """Every contract test; see the module docstring."""

    __test__ = False

    #: Tests that are known to fail: name -> (reason, link to an issue). They run, and must fail.
    xfails: ClassVar[Mapping[str, tuple[str, str]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__test__" not in cls.__dict__:
            cls.__test__ = True

    @clause("C1")
    def test_no_contract_test_is_missing(self) -> None:
        """Fails when a contract test was overridden or removed; a test that cannot pass is an entry of ``xfails``."""
        changed = [
            name
            for name in dir(TransportContract)
            if name.startswith("test_")
            and getattr(type(self), name, None) is not getattr(TransportContract, name)
        ]
        assert not changed, f"contract tests were overridden: {changed}; use xfails"
        unknown = [name for name in self.xfails if not hasattr(TransportContract, name)]
        assert not unknown, f"xfails names no contract test: {unknown}"
        for name, (reason, link) in self.xfails.items():
            assert reason, f"xfails[{name!r}] needs a reason"
            assert link.startswith("http"), f"xfails[{name!r}] needs a link to an issue"

    @pytest.fixture(autouse=True)
    def _strict_xfail(self, request: pytest.FixtureRequest) -> None:
        name = request.function.__name__
        if name in self.xfails:
            reason = " ".join(self.xfails[name])
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
