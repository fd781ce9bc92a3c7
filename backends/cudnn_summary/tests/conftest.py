# SPDX-License-Identifier: Apache-2.0
"""cuDNN's stand-ins, in place of what this machine has."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cptransport_cudnn_summary import library, resolve

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def stand_in_for_nccl() -> Iterator[None]:
    """Make the stand-in of the ``nccl`` backend's tests importable."""
    folder = str(Path(__file__).parents[2] / "nccl" / "tests")
    sys.path.insert(0, folder)
    yield
    sys.path.remove(folder)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that puts a variant of the stand-in in cuDNN's place."""
    import fake_cudnn

    def put(variant: str, **changes: Any) -> Any:
        fake = fake_cudnn.make(variant, **changes)
        monkeypatch.setattr(library, "find", lambda: fake.library)
        return fake

    yield put
    resolve._resolve.cache_clear()
