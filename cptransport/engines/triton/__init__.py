# SPDX-License-Identifier: Apache-2.0
"""The Triton engine: KDA on CUDA (and, under Triton's interpreter, on CPU for tests).

Importing this package loads Triton.
"""

from __future__ import annotations

from cptransport.engines.triton.kda import TritonKDA

__all__ = ["KDA_ENGINE", "TritonKDA"]

KDA_ENGINE = TritonKDA()
