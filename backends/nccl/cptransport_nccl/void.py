# SPDX-License-Identifier: Apache-2.0
"""What follows NCCL's receives on a communication stream, should they be ended."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cptransport.backend import address_table

__all__ = ["void"]


def void(stream: torch.cuda.Stream, ended: Tensor, spans: Sequence[tuple[int, int]]) -> None:
    """Make NaN of received memory if what should have filled it was ended; after that on the stream.

    Args:
        stream: that it was on.
        ended: pinned int64 ``[1]``, not 0 once it was.
        spans: (address, bytes) of the memory.
    """
    from cptransport_kernels.void import void as launch

    addresses, sizes = zip(*spans, strict=True)
    table = address_table((*addresses, *sizes), stream.device, stream)
    launch(ended, table, stream.cuda_stream)
