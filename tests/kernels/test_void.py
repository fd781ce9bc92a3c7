# SPDX-License-Identifier: Apache-2.0
"""What never arrived is NaN, and only then."""

from __future__ import annotations

import pytest
import torch

from cptransport_kernels.void import void


@pytest.mark.parametrize("ended", [0, 1])
def test_memory_becomes_nan_if_the_flag_is_set(device: str, ended: int) -> None:
    memory = torch.arange(200_000, dtype=torch.float32, device=device)
    before = memory.clone()
    spans = {3: 1, 100: 70_001, 100_000: 8_192, 199_999: 1}
    addresses = [memory.data_ptr() + 4 * start for start in spans]
    table = torch.tensor([*addresses, *(4 * n for n in spans.values())], device=device)
    flag = torch.tensor([ended])
    void(flag.pin_memory() if device == "cuda" else flag, table)
    touched = torch.zeros_like(memory, dtype=torch.bool)
    for start, numel in spans.items():
        touched[start : start + numel] = bool(ended)
    assert torch.equal(memory.isnan(), touched)
    assert torch.equal(memory[~touched], before[~touched])
