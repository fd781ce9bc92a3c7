# SPDX-License-Identifier: Apache-2.0
"""The ops that users call. They do not know which transport runs."""

from __future__ import annotations

from cptransport.ops.conv1d import causal_conv1d
from cptransport.ops.join import join_backward
from cptransport.ops.kda import KDAForward, KDAGrads, chunk_kda, kda_backward, kda_forward
from cptransport.ops.mamba2 import (
    SSDForward,
    SSDGrads,
    mamba_chunk_scan_combined,
    ssd_backward,
    ssd_forward,
)
from cptransport.ops.mixer import mamba_split_conv1d_scan_combined
from cptransport.ops.redistribute import convert_layout
from cptransport.ops.scope import RunRecord, last_run

__all__ = [
    "KDAForward",
    "KDAGrads",
    "RunRecord",
    "SSDForward",
    "SSDGrads",
    "causal_conv1d",
    "chunk_kda",
    "convert_layout",
    "join_backward",
    "kda_backward",
    "kda_forward",
    "last_run",
    "mamba_chunk_scan_combined",
    "mamba_split_conv1d_scan_combined",
    "ssd_backward",
    "ssd_forward",
]
