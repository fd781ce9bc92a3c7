# SPDX-License-Identifier: Apache-2.0
"""Every error the library raises, in one tree.

::

    CPTransportError
    ├── BackendError
    │   ├── BackendNotFoundError       no backend of that name is known
    │   ├── BackendLoadError           an installed plugin failed to import
    │   ├── BackendContractError       a plugin's descriptor breaks the contract
    │   ├── BackendConflictError       two distributions claim one name
    │   ├── BackendUnavailableError    known, but cannot serve here
    │   └── BackendMismatchError       ranks asked for different backends
    ├── TransportError
    │   ├── TransportTimeoutError      a wait passed its deadline
    │   ├── PeerFailedError            another rank raised or died
    │   ├── TransportClosedError       used after close, or after it broke
    │   ├── GenerationError            verbs out of order on this rank
    │   ├── RouteError                 something outside the routes was named
    │   └── CapabilityError            asked for what the transport does not claim
    ├── PlanError (ValueError)
    ├── OpInputError (ValueError)
    ├── UnsupportedOptionError (NotImplementedError)
    └── EnvVarError (ValueError)

``BackendFallbackWarning`` is the one warning: a named backend or engine could not serve, and what
``auto`` takes runs.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "BackendConflictError",
    "BackendContractError",
    "BackendError",
    "BackendFallbackWarning",
    "BackendLoadError",
    "BackendMismatchError",
    "BackendNotFoundError",
    "BackendUnavailableError",
    "CPTransportError",
    "CapabilityError",
    "EnvVarError",
    "GenerationError",
    "OpInputError",
    "PeerFailedError",
    "PlanError",
    "RouteError",
    "TransportClosedError",
    "TransportError",
    "TransportTimeoutError",
    "UnsupportedOptionError",
]


class CPTransportError(Exception):
    """Base of every error of this library."""


class BackendError(CPTransportError):
    """Something about finding, loading or choosing a backend."""


class BackendNotFoundError(BackendError):
    """No backend of that name is known; the message lists the valid names."""


class BackendLoadError(BackendError):
    """An installed plugin failed to import; ``__cause__`` is the original error."""


class BackendContractError(BackendError):
    """A plugin's descriptor or its functions break the contract."""


class BackendConflictError(BackendError):
    """Two distributions claim the same backend name."""


class BackendUnavailableError(BackendError):
    """A known backend cannot serve here; the message says why."""


class BackendMismatchError(BackendError):
    """The ranks of a group asked for different backends."""


class TransportError(CPTransportError):
    """Something about moving data between ranks."""


class TransportTimeoutError(TransportError):
    """A wait passed its deadline.

    Attributes:
        peer: the rank waited for, or None when several or unknown.
        slot: name of the slot, or None (barrier, start-up).
        generation: generation of the slot, or None.
        waited_s: seconds waited.
        missing: ranks that had not arrived.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: int | None = None,
        slot: str | None = None,
        generation: int | None = None,
        waited_s: float | None = None,
        missing: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.slot = slot
        self.generation = generation
        self.waited_s = waited_s
        self.missing = tuple(missing)


class PeerFailedError(TransportError):
    """Another rank raised or died.

    Attributes:
        peer: the rank that failed, or None when unknown.
    """

    def __init__(self, message: str, *, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer


class TransportClosedError(TransportError):
    """A verb after ``close()``, or after the transport broke (then only ``close()`` works)."""


class GenerationError(TransportError):
    """Verbs out of order on this rank: no ``stage``, a second ``publish``, a second take."""


class RouteError(TransportError):
    """A part, source or destination outside what the slot's routes allow."""


class CapabilityError(TransportError):
    """Asked for something that the transport's capabilities do not claim."""


class PlanError(CPTransportError, ValueError):
    """Malformed offsets, boundaries, layout or world size."""


class OpInputError(CPTransportError, ValueError):
    """An op's tensors or options do not fit together or do not fit the plan."""


class UnsupportedOptionError(CPTransportError, NotImplementedError):
    """An upstream option, or a mode of ours, that is not served; the message says why."""


class EnvVarError(CPTransportError, ValueError):
    """A ``CULA_CP_*`` variable has an invalid value or, under strict, an unknown name."""


class BackendFallbackWarning(UserWarning):
    """A named backend or engine could not serve here; another one runs (see ``CULA_CP_STRICT``)."""
