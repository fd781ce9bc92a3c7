# SPDX-License-Identifier: Apache-2.0
"""Trying one backend: all ranks probe it, then make its transport, and tell each other how it went."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from cptransport import notices, registry
from cptransport.agreement import Ranks, agree, by_rank
from cptransport.backend import BackendSpec, TransportBase
from cptransport.control import creating
from cptransport.errors import (
    BackendContractError,
    BackendError,
    BackendMismatchError,
    BackendUnavailableError,
    CPTransportError,
    EnvVarError,
)
from cptransport.request import Request
from cptransport.transport import BoundaryTransport

__all__ = ["Trial", "dispose"]

_log = logging.getLogger("cptransport")


class Trial:
    """One rank's part in trying backends.

    Args:
        ranks: who tries.
        requests: what each of them asked for, alike on all.
        device, timeout_s: this rank's.
    """

    def __init__(
        self, ranks: Ranks, requests: Sequence[Request], device: torch.device, timeout_s: float
    ) -> None:
        self._ranks = ranks
        self._requests = requests
        self._device = device
        self._timeout_s = timeout_s

    def probe(self, name: str) -> tuple[registry.LoadedBackend | None, str]:
        """Return the loaded backend, and why it cannot serve on some rank, empty when it can.

        Raises:
            BackendMismatchError: the ranks hold different versions of it.
            BackendError: on some rank it is broken.
            EnvVarError: on some rank a variable of its is not valid or, under strict, it has advice.

        Collective: over the ranks; the reason and the errors are alike on all.
        """
        loaded, reason, problem = None, "", None
        try:
            loaded = registry.load_backend(name)
            registry.check_values(loaded.spec)
            reason = self._misfit(loaded.spec) or self._ask(loaded)
            if not reason:
                self._heed(loaded)
        except BackendUnavailableError as error:
            reason = str(error)
        except CPTransportError as error:
            problem = error
        version = loaded.origin.version if loaded else None
        said = f"{name} loads"
        reports = agree(self._ranks, f"probing {name}", [reason, version], said, problem)
        versions = {rank: v for rank, (_, v) in enumerate(reports) if v is not None}
        if len(set(versions.values())) > 1:
            raise BackendMismatchError(
                f"the ranks hold different versions of {name}: "
                + by_rank(versions, self._ranks.world_size)
            )
        return loaded, self._merge([why for why, _ in reports])

    def create(
        self, loaded: registry.LoadedBackend, attempt: str
    ) -> tuple[BoundaryTransport | None, str]:
        """Return the transport, or why some rank could not make it.

        Args:
            loaded: from ``probe``.
            attempt: names this attempt, alike on all ranks, never used before.

        Raises:
            BackendError: some rank failed in another way than by ``BackendUnavailableError``.
            TransportTimeoutError, PeerFailedError: a rank did not come, or left.

        Collective: over the ranks; the reason and the errors are alike on all. Where some rank
            fails, the others close what they made.
        """
        transport, reason, problem = None, "", None
        try:
            transport = self._make(loaded, attempt)
        except BackendUnavailableError as error:
            reason = str(error)
        except CPTransportError as error:
            problem = error
        name = loaded.spec.name
        try:
            reports = agree(self._ranks, f"creating {name}", reason, f"{name} was made", problem)
            reason = self._merge(reports)
            if reason:
                raise BackendUnavailableError(reason)
        except BaseException as error:
            if transport is not None:
                dispose(transport, error)
            if isinstance(error, BackendUnavailableError):
                return None, str(error)
            raise
        return transport, ""

    def _misfit(self, spec: BackendSpec) -> str:
        """Say what this group needs that the backend does not claim, if anything."""
        name, claims = spec.name, spec.capabilities
        if name == "loopback" and self._ranks.world_size > 1:
            return f"loopback serves one rank, this group has {self._ranks.world_size}"
        if name in registry.known_origins() and name not in ("loopback", "threads"):
            if self._ranks.world is not None:
                return f"{name} serves process groups, not the ranks of threads.run"
            if self._ranks.group is None:
                return "torch.distributed is not initialised"
        if self._device.type not in claims.device_types:
            return f"needs a {' or '.join(claims.device_types)} device, not {self._device}"
        if self._device.type == "cuda" and not torch.cuda.is_available():
            return "torch sees no CUDA device"
        hosts = {request.host for request in self._requests}
        if not claims.cross_host and len(hosts) > 1:
            return f"the ranks are on {len(hosts)} hosts, {name} serves one"
        return ""

    def _ask(self, loaded: registry.LoadedBackend) -> str:
        """Call ``probe``; see ``BackendSpec``."""
        try:
            reason = loaded.spec.probe(self._ranks.group, self._device)
        except BackendUnavailableError as error:
            return str(error)
        except (Exception, SystemExit) as error:
            raise BackendContractError(
                f"backend {loaded.origin}: probe raised {type(error).__name__}: {error}"
            ) from error
        if reason is not None and not (isinstance(reason, str) and reason):
            raise BackendContractError(
                f"backend {loaded.origin}: probe must return None or a reason, got {reason!r}"
            )
        return reason or ""

    def _heed(self, loaded: registry.LoadedBackend) -> None:
        """Warn of what the backend advises about this rank's environment; under strict, raise it."""
        if loaded.spec.advice is None:
            return
        try:
            lines = list(loaded.spec.advice(self._device))
        except (Exception, SystemExit) as error:
            raise BackendContractError(
                f"backend {loaded.origin}: advice raised {type(error).__name__}: {error}"
            ) from error
        if not lines:
            return
        text = f"{loaded.spec.name} advises: {'; '.join(lines)}"
        if any(request.strict for request in self._requests):
            raise EnvVarError(text)
        notices.warn(text)

    def _make(self, loaded: registry.LoadedBackend, attempt: str) -> BoundaryTransport:
        """Call ``create`` and check what it returns."""
        try:
            with creating(attempt):
                transport: Any = loaded.spec.create(
                    self._ranks.group, self._device, self._timeout_s
                )
        except CPTransportError:
            raise
        except (Exception, SystemExit) as error:
            raise BackendError(
                f"backend {loaded.origin} failed to make its transport: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(transport, BoundaryTransport):
            raise BackendContractError(
                f"backend {loaded.origin}: create returned {type(transport).__name__}, which lacks "
                + ", ".join(verb for verb in _members() if not hasattr(transport, verb))
            )
        place = (transport.rank, transport.world_size)
        if place != (self._ranks.rank, self._ranks.world_size):
            fault = BackendContractError(
                f"backend {loaded.origin}: create returned rank {place[0]} of {place[1]}, this is rank "
                f"{self._ranks.rank} of {self._ranks.world_size}"
            )
            dispose(transport, fault)
            raise fault
        return transport

    def _merge(self, reasons: Sequence[str]) -> str:
        said = {rank: reason for rank, reason in enumerate(reasons) if reason}
        return by_rank(said, self._ranks.world_size) if said else ""


def dispose(transport: BoundaryTransport, error: BaseException) -> None:
    """Close a transport that not all ranks have, without waiting for peers where it can be told so."""
    try:
        if isinstance(transport, TransportBase):
            transport.__exit__(type(error), error, None)
        else:
            transport.close()
    except Exception:
        _log.warning("closing the unused transport %r failed", transport.name, exc_info=True)


def _members() -> list[str]:
    return sorted(
        name
        for name in {**BoundaryTransport.__annotations__, **vars(BoundaryTransport)}
        if name[0] != "_"
    )
