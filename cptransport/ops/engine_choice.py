# SPDX-License-Identifier: Apache-2.0
"""Which engine computes an op call: a pure function of facts that every rank knows alike."""

from __future__ import annotations

import warnings
from functools import lru_cache

from cptransport import env, registry
from cptransport.engines import Engine, OpFacts
from cptransport.errors import BackendError, BackendFallbackWarning, BackendUnavailableError
from cptransport.transport import BoundaryTransport

__all__ = ["choose_engine"]

Reasons = tuple[tuple[str, str], ...]

_warned: set[tuple[str, str]] = set()


def choose_engine(
    facts: OpFacts, transport: BoundaryTransport, argument: str | None
) -> tuple[Engine, Reasons]:
    """Return the engine for a call and why others were passed over.

    Args:
        facts: of the call.
        transport: its backend may prefer an engine; its strict mode applies.
        argument: the op's ``engine=``; beats ``CULA_CP_ENGINE``.

    Raises:
        BackendNotFoundError: no engine of that name for the op.
        BackendLoadError: it is a broken plugin.
        BackendUnavailableError: strict, and the named engine cannot serve; or no engine can.
    """
    requested, _ = env.text(env.ENGINE, argument)
    passed: list[tuple[str, str]] = []
    if requested != "auto":
        engine = registry.load_engine(facts.op, requested)
        reason = engine.eligible(facts)
        if reason is None:
            return engine, ()
        if getattr(transport, "strict", False):
            raise BackendUnavailableError(f"engine {requested!r} cannot serve {facts.op}: {reason}")
        _warn_once(facts.op, requested, reason)
        passed.append((requested, reason))
    for name in _automatic(facts, transport):
        if name == requested:
            continue
        try:
            engine = registry.load_engine(facts.op, name)
        except BackendError as error:
            passed.append((name, str(error)))
            continue
        reason = engine.eligible(facts)
        if reason is None:
            return engine, tuple(passed)
        passed.append((name, reason))
    raise BackendUnavailableError(
        f"no engine can serve {facts.op}: " + "; ".join(f"{name}: {why}" for name, why in passed)
    )


def _automatic(facts: OpFacts, transport: BoundaryTransport) -> list[str]:
    """Candidates of ``auto`` in order: the backend's preference, triton on CUDA, torch."""
    order = [_preferred(transport.name)]
    if facts.device_type == "cuda":
        order.append("triton")
    order.append("torch")
    known = registry.engine_names(facts.op)
    return list(dict.fromkeys(name for name in order if name and name in known))


@lru_cache(maxsize=64)
def _preferred(backend: str) -> str | None:
    """The engine that a backend prefers; None for one that is not registered."""
    try:
        return registry.load_backend(backend).spec.preferred_engine
    except BackendError:
        return None


def _warn_once(op: str, name: str, reason: str) -> None:
    key = (f"{op}:{name}", reason)
    if key not in _warned:
        _warned.add(key)
        warnings.warn(
            f"engine {name!r} cannot serve {op}: {reason}; the automatic choice runs",
            BackendFallbackWarning,
            stacklevel=5,
        )
