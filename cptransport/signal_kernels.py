# SPDX-License-Identifier: Apache-2.0
"""Loads the kernels of ``cptransport_kernels.signals`` before they are needed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["load_kernels"]

_LIMIT_NS = 10**9


def load_kernels(
    signals: Any, tables: tuple[Tensor, Tensor, Tensor, Tensor], slot: int, rank: int
) -> None:
    """Compile and load every kernel, waiting for nobody: later another kernel may occupy the device.

    Args:
        signals: the module.
        tables: counters, board, boards and error, as its functions take them, all zero but the boards.
        slot: any that has not been used; its counter is 0 again afterwards.
        rank: this rank.

    Stream: runs on the current stream of the current device.
    """
    counters, _, boards, _ = tables
    device = counters.device
    always: dict[str, Any] = {"slot": slot, "step": 0, "timeout_ns": _LIMIT_NS}
    for nbytes in (1, 4, 8):  # copies differ by the width of their words; all came in generation 0
        target = torch.empty(nbytes, dtype=torch.uint8, device=device)
        signals.fetch(*tables, target, source=rank, offset=0, **always)
    for parts in range(1, signals.TABLE_PARTS + 1):
        table = torch.empty((parts, boards.numel()), dtype=torch.int64, device=device)
        nothing = [0] * parts
        signals.locate(
            *tables, table, sources=0, offsets=nothing, present=nothing, nan_address=0, **always
        )
    signals.publish(counters, boards, slot=slot, rank=rank, targets=0, step=0)
    for count in (False, True):
        signals.barrier(*tables, rank=rank, everyone=0, count=count, **always)
    signals.stage(*tables, slot=slot, rank=rank, releases=0, waits=0, depth=2, timeout_ns=_LIMIT_NS)
    counters.zero_()
