# SPDX-License-Identifier: Apache-2.0
"""Kernels run compiled where there is a GPU, else in Triton's interpreter on CPU tensors."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for kda_chain

# Triton decides when it decorates a kernel; other tests of this process must not see the variable.
_before = os.environ.get("TRITON_INTERPRET")
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
import_module("cptransport.engines.triton")
import_module("cptransport_kernels.signals")
import_module("cptransport_kernels.ssd_fold")
import_module("cptransport_kernels.void")
import_module("cptransport.ops.conv1d_triton")
# Loaded at the first launch otherwise, when the variable is gone: then it does not load.
import_module("triton.experimental.gluon")
if _before is None:
    os.environ.pop("TRITON_INTERPRET", None)


@pytest.fixture
def device() -> str:
    """Where the kernels run."""
    return "cuda" if torch.cuda.is_available() else "cpu"
