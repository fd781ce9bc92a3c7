# SPDX-License-Identifier: Apache-2.0
"""Skips by device for the markers ``gpu`` and ``multigpu(n)``."""

from __future__ import annotations

import pytest
import torch


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 1 if item.get_closest_marker("gpu") else 0
    if (marker := item.get_closest_marker("multigpu")) is not None:
        needed = marker.args[0]
    if needed and (found := torch.cuda.device_count()) < needed:
        pytest.skip(f"needs {needed} CUDA device(s), torch sees {found}")
