# SPDX-License-Identifier: Apache-2.0
"""``docs/contract.md`` and the tests name the same clauses and the same version."""

from __future__ import annotations

import re
from pathlib import Path

from cptransport.testing.contract import CONTRACT_VERSION, TransportContract, clauses_of

TEXT = (Path(__file__).parents[2] / "docs" / "contract.md").read_text(encoding="utf-8")
CLAUSES = re.findall(r"^\*\*(C\d+)\.\*\*", TEXT, re.MULTILINE)


def cited() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in dir(TransportContract):
        if name.startswith("test_"):
            for clause in clauses_of(getattr(TransportContract, name)):
                found.setdefault(clause, []).append(name)
    return found


def test_clauses_are_numbered_in_order() -> None:
    assert [f"C{number}" for number in range(1, len(CLAUSES) + 1)] == CLAUSES
    assert len(CLAUSES) > 30


def test_every_clause_is_cited_by_a_test() -> None:
    assert [clause for clause in CLAUSES if clause not in cited()] == []


def test_every_cited_clause_exists() -> None:
    assert {clause: tests for clause, tests in cited().items() if clause not in CLAUSES} == {}


def test_every_contract_test_cites_a_clause_and_says_what_it_checks() -> None:
    for name in dir(TransportContract):
        if name.startswith("test_"):
            test = getattr(TransportContract, name)
            assert clauses_of(test), name
            assert test.__doc__, name


def test_the_document_has_the_version_of_the_suite() -> None:
    assert f"Version {CONTRACT_VERSION}." in TEXT
