# SPDX-License-Identifier: Apache-2.0
"""The suite is tested too: transports that break one clause are caught by the test of that clause."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from cptransport.testing import CaseError, faults
from cptransport.testing.contract import TransportContract
from cptransport.testing.contract_base import SHORT
from cptransport.testing.faults import FAULTS, Fault

CONTRACT = Path(__file__).parents[2] / "docs" / "contract.md"


class _Suite(TransportContract):
    __test__ = False
    processes = False
    timeout_s = 3.0


@pytest.fixture(autouse=True)
def _nothing_is_hoarded() -> Iterator[None]:
    yield
    while faults._HOARD:
        kept = faults._HOARD.pop()
        if hasattr(kept, "close"):
            kept.close()


def run(fault: Fault, backend: str) -> None:
    """Run the fault's test on a backend, as pytest would."""
    suite = type("Suite", (_Suite,), {"backend": backend, "__test__": False})()
    test = getattr(suite, fault.test)
    available = {"world_size": fault.ranks, "figures": SHORT, **fault.arguments}
    test(**{name: available[name] for name in inspect.signature(test).parameters})


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_caught_by_its_test(fault: Fault) -> None:
    with pytest.raises(AssertionError) as caught:
        run(fault, fault.backend)
    if isinstance(caught.value, CaseError):  # not by the watchdog, and not for a lack of its own
        text = "\n".join(caught.value.failures.values())
        assert "no answer" not in text
        assert "NameError" not in text
        assert "AttributeError" not in text


def test_enough_faults_and_every_group_of_tests_has_some() -> None:
    assert len(FAULTS) >= 12
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)
    for group in TransportContract.__mro__[1:8]:
        assert any(hasattr(group, fault.test) for fault in FAULTS), group.__name__


def test_the_table_in_the_documentation_is_current() -> None:
    text = CONTRACT.read_text(encoding="utf-8")
    assert faults.table() in text, "run `python -m cptransport.testing.faults` and paste its output"
