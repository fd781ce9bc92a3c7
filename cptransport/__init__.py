# SPDX-License-Identifier: Apache-2.0
"""Moves the boundary state of context-parallel recurrent layers (KDA, Mamba2) between ranks.

Importing this loads torch and nothing heavier: no backend, no Triton.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from cptransport.backend import BackendSpec, TransportBase, Variable
from cptransport.context import CPContext, build_cp_context
from cptransport.errors import (
    BackendConflictError,
    BackendContractError,
    BackendError,
    BackendFallbackWarning,
    BackendLoadError,
    BackendMismatchError,
    BackendNotFoundError,
    BackendUnavailableError,
    CapabilityError,
    CPTransportError,
    EnvVarError,
    GenerationError,
    OpInputError,
    PeerFailedError,
    PlanError,
    RouteError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
    UnsupportedOptionError,
)
from cptransport.plan import Plan, build_plan
from cptransport.registry import CORE, installed_version
from cptransport.select import create_transport
from cptransport.transport import (
    TRANSPORT_API_VERSION,
    BoundaryTransport,
    Capabilities,
    Gathered,
    PartSpec,
    Selection,
    Slot,
    TransportStats,
)
from cptransport.transports import threads

if TYPE_CHECKING:
    from cptransport.ops import convert_layout, join_backward, last_run

__all__ = [
    "TRANSPORT_API_VERSION",
    "BackendConflictError",
    "BackendContractError",
    "BackendError",
    "BackendFallbackWarning",
    "BackendLoadError",
    "BackendMismatchError",
    "BackendNotFoundError",
    "BackendSpec",
    "BackendUnavailableError",
    "BoundaryTransport",
    "CPContext",
    "CPTransportError",
    "Capabilities",
    "CapabilityError",
    "EnvVarError",
    "Gathered",
    "GenerationError",
    "OpInputError",
    "PartSpec",
    "PeerFailedError",
    "Plan",
    "PlanError",
    "RouteError",
    "Selection",
    "Slot",
    "TransportBase",
    "TransportClosedError",
    "TransportError",
    "TransportStats",
    "TransportTimeoutError",
    "UnsupportedOptionError",
    "Variable",
    "__version__",
    "build_cp_context",
    "build_plan",
    "convert_layout",
    "create_transport",
    "join_backward",
    "last_run",
    "threads",
]

__version__ = installed_version(CORE)

sys.modules[f"{__name__}.threads"] = threads  # so that `import cptransport.threads` works too

_FROM_OPS = ("convert_layout", "join_backward", "last_run")


def __getattr__(name: str) -> Any:
    if name in _FROM_OPS:
        from cptransport import ops

        return getattr(ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
