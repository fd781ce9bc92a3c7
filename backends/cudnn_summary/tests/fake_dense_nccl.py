# SPDX-License-Identifier: Apache-2.0
"""``cudnn_summary`` over the stand-in for NCCL of the ``nccl`` backend's tests, for ranks that are threads."""

from __future__ import annotations

from dataclasses import replace

import fake_nccl

from cptransport.backend import BackendSpec
from cptransport_cudnn_summary.transport import CAPABILITIES, DenseNccl

#: Threads see the device "cpu" where NCCL has "cuda".
_CAPABILITIES = replace(CAPABILITIES["cuda"], device_types=("cpu",))


class _OnThreads(DenseNccl):
    def _serve(self) -> None:
        super()._serve()
        self.capabilities = _CAPABILITIES


BACKEND = BackendSpec(
    name="cudnn_summary",
    api_version=1,
    summary="cudnn_summary on threads",
    capabilities=_CAPABILITIES,
    probe=lambda group, device: None,
    create=lambda group, device, timeout_s, **options: fake_nccl.create(
        group, device, timeout_s, kind=_OnThreads
    ),
)
