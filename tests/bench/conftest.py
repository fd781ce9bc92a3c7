# SPDX-License-Identifier: Apache-2.0
"""Helpers of these tests are importable by name; pools that they start are ended."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="package", autouse=True)
def _end_pools() -> Iterator[None]:
    yield
    from cptransport.bench.launch import close_ranks

    close_ranks()
