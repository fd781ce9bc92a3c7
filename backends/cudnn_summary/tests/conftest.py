# SPDX-License-Identifier: Apache-2.0
"""cuDNN's stand-ins, in place of what this machine has."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from cptransport_cudnn_summary import library, resolve

sys.path.insert(0, str(Path(__file__).parent))

# Kernels run in Triton's interpreter where there is no GPU. Triton decides when they are imported;
# other tests of this process must not see the variable.
_before = os.environ.get("TRITON_INTERPRET")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
import_module("cptransport.engines.triton")
import_module("triton.experimental.gluon")  # else loaded at the first launch, without the variable
if _before is None:
    os.environ.pop("TRITON_INTERPRET", None)


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
