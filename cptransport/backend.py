# SPDX-License-Identifier: Apache-2.0
"""What a backend author needs: the descriptor, and the base class that does a transport's bookkeeping.

The descriptor is frozen data that can be read without importing any vendor library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cptransport.addresses import address_table
from cptransport.base import Generation, TransportBase
from cptransport.control import ControlPlane, group_store
from cptransport.cuda_driver import (
    allocation_start,
    exclusive_stream,
    release_stream,
    with_index,
    write_value,
)
from cptransport.errors import BackendContractError
from cptransport.limited import BackgroundCall, LimitedCalls
from cptransport.onesided import MAX_RANKS, OneSidedTransport
from cptransport.peer_memory import PeerMemory, PeerRegion, byte_spans, bytes_at
from cptransport.transport import TRANSPORT_API_VERSION, BoundaryTransport, Capabilities

__all__ = [
    "MAX_RANKS",
    "BackendSpec",
    "BackgroundCall",
    "ControlPlane",
    "Generation",
    "LimitedCalls",
    "OneSidedTransport",
    "PeerMemory",
    "PeerRegion",
    "TransportBase",
    "Variable",
    "address_table",
    "allocation_start",
    "byte_spans",
    "bytes_at",
    "exclusive_stream",
    "group_store",
    "release_stream",
    "with_index",
    "write_value",
]


@dataclass(frozen=True)
class Variable:
    """An environment variable that a backend declares.

    Args:
        name: starts with ``CULA_CP_``.
        default: value when unset or empty.
        values: the valid values; empty: any text.
        help: one line.
    """

    name: str
    default: str
    values: tuple[str, ...] = ()
    help: str = ""

    def __post_init__(self) -> None:
        if not self.name.startswith("CULA_CP_"):
            raise BackendContractError(f"variable {self.name!r} must start with CULA_CP_")


@dataclass(frozen=True)
class BackendSpec:
    """Descriptor of a backend; the value of an entry point in the group ``cptransport.backends``.

    Args:
        name: what ``CULA_CP_COMM_BACKEND`` names.
        api_version: ``TRANSPORT_API_VERSION`` that it was written for.
        summary: one line for ``cptransport doctor``.
        capabilities: what its transports can do.
        probe: ``probe(group, device)`` returns None when it can serve, else the reason as text; it
            neither communicates nor raises. ``group`` is a ``torch.distributed`` group or None
            (this process alone, as ``doctor`` asks).
        create: ``create(group, device, timeout_s, **options)`` makes the transport; collective over
            the group. It raises ``BackendUnavailableError`` for what only shows then.
        variables: further ``CULA_CP_*`` variables of its own.
        preferred_engine: name of the engine that ``auto`` tries first on this backend, or None.
        install: how to install what is missing, for messages.
        advice: ``advice(device)`` returns lines on what in the environment is not as it should be;
            a warning when a transport is made, an error under strict.
        details: ``details(device)`` returns lines for ``cptransport doctor`` on what it found here,
            which paths it would take for one; may import vendor libraries, never raises.
    """

    name: str
    api_version: int
    summary: str
    capabilities: Capabilities
    probe: Callable[[Any, Any], str | None]
    create: Callable[..., BoundaryTransport]
    variables: tuple[Variable, ...] = ()
    preferred_engine: str | None = None
    install: str = ""
    advice: Callable[[Any], Sequence[str]] | None = None
    details: Callable[[Any], Sequence[str]] | None = None

    def __post_init__(self) -> None:
        if self.api_version != TRANSPORT_API_VERSION:
            raise BackendContractError(
                f"backend {self.name!r} was written for transport API {self.api_version}, "
                f"this cptransport has {TRANSPORT_API_VERSION}"
            )
