# SPDX-License-Identifier: Apache-2.0
"""Ranks on the stand-in for NCCL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cptransport.testing import RankPool


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., list[Any]]]:
    """Run a case on as many ranks, threads of this process, as the module's ``RANKS`` says."""
    sys.path.insert(0, str(Path(__file__).parent))
    with RankPool("fake_nccl:BACKEND", request.module.RANKS, processes=False) as pool:
        yield lambda case, **kwargs: pool.run(case, transport=False, timeout_s=60, **kwargs)
    sys.path.remove(str(Path(__file__).parent))
