# SPDX-License-Identifier: Apache-2.0
"""The Triton engine: KDA and SSD on CUDA (and, under Triton's interpreter, on CPU for tests).

Importing this package loads Triton.
"""

from __future__ import annotations

from cptransport.engines.triton.kda import TritonKDA
from cptransport.engines.triton.ssd import TritonSSD

__all__ = ["KDA_ENGINE", "SSD_ENGINE", "TritonKDA", "TritonSSD"]

KDA_ENGINE = TritonKDA()
SSD_ENGINE = TritonSSD()
