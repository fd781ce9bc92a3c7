# SPDX-License-Identifier: Apache-2.0
"""What never arrived becomes bytes 0xFF, which are NaN in every floating-point dtype.

For transports whose waits are a library's: when such a wait is ended from outside, its kernel leaves
anything at all where it was to deliver. One small launch after it looks at a word that the host sets
before it ends the wait, and does nothing otherwise.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from cptransport_kernels.dependent import after_those_before, launched_early, let_next_start
from cptransport_kernels.launch import Bound, bind

__all__ = ["void"]

_BLOCK = 4096


@triton.jit(do_not_specialize=["flag", "targets"])
def void_kernel(flag, p_spans, targets, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """One program of one warp: what looks at the host's memory is a single load.

    Each load of it crosses the bus, and those of one word come one after the other, so the warps of several
    programs would take about a microsecond each. That one warp is slow to fill memory is nothing that
    anybody waits for.
    """
    after_those_before(EARLY)
    ended = tl.load(flag.to(tl.pointer_type(tl.int64)), volatile=True)
    let_next_start(EARLY)
    if ended != 0:
        for target in range(targets):
            address = tl.load(p_spans + target)
            nbytes = tl.load(p_spans + targets + target)
            p_target = address.to(tl.pointer_type(tl.uint8))
            for start in range(0, nbytes, BLOCK):
                o = start + tl.arange(0, BLOCK)
                tl.store(p_target + o, tl.full([BLOCK], 255, tl.uint8), mask=o < nbytes)


def void(flag: Tensor, spans: Tensor, stream: int | None = None) -> None:
    """Fill memory with bytes 0xFF on a stream if the flag is set when it gets there.

    Args:
        flag: int64 ``[1]``, in memory that the device can read; 0: do nothing.
        spans: int64 ``[2 * n]`` on the device: n addresses, then their numbers of bytes.
        stream: handle of the stream; None: the current one.
    """
    _bound(spans.device)((1,), flag.data_ptr(), spans, len(spans) // 2, stream=stream)


@lru_cache
def _bound(device: torch.device) -> Bound:
    return bind(void_kernel, BLOCK=_BLOCK, **launched_early(device), num_warps=1)
