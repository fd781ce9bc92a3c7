# SPDX-License-Identifier: Apache-2.0
"""The reference engine: KDA and SSD in plain torch, chunked, for any float dtype on any device.

States are fp64 when v (x) is, else fp32. The gradients of all inputs that were given are computed.
"""

from __future__ import annotations

from cptransport.engines.torch.kda import TorchKDA
from cptransport.engines.torch.ssd import TorchSSD

__all__ = ["KDA_ENGINE", "SSD_ENGINE", "TorchKDA", "TorchSSD"]

KDA_ENGINE = TorchKDA()
SSD_ENGINE = TorchSSD()
