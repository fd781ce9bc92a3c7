# SPDX-License-Identifier: Apache-2.0
"""What never arrived becomes bytes 0xFF, which are NaN in every floating-point dtype.

For transports whose waits are a library's: when such a wait is ended from outside, its kernel leaves
anything at all where it was to deliver. One small launch after it looks at a word that the host sets
before it ends the wait, and does nothing otherwise.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cptransport_kernels.launch import launch

__all__ = ["void"]

_BLOCK = 4096
_PROGRAMS = 8


@triton.jit(do_not_specialize=["targets"])
def void_kernel(p_flag, p_spans, targets, BLOCK: tl.constexpr):
    """Program (target, i): every num_programs(1)-th block of a target, if the flag is set."""
    if tl.load(p_flag, volatile=True) != 0:
        target = tl.program_id(0)
        address = tl.load(p_spans + target)
        nbytes = tl.load(p_spans + targets + target)
        p_target = address.to(tl.pointer_type(tl.uint8))
        first = tl.program_id(1).to(tl.int64) * BLOCK
        for start in range(first, nbytes, tl.num_programs(1) * BLOCK):
            o = start + tl.arange(0, BLOCK)
            tl.store(p_target + o, tl.full([BLOCK], 255, tl.uint8), mask=o < nbytes)


def void(flag: Tensor, spans: Tensor) -> None:
    """Fill memory with bytes 0xFF on the current stream if the flag is set when it gets there.

    Args:
        flag: int64 ``[1]``, in memory that the device can read; 0: do nothing.
        spans: int64 ``[2 * n]`` on the device: n addresses, then their numbers of bytes.
    """
    targets = len(spans) // 2
    launch(void_kernel, (targets, _PROGRAMS), flag, spans, targets, BLOCK=_BLOCK, num_warps=4)
