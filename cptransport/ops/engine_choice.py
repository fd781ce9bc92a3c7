# SPDX-License-Identifier: Apache-2.0
"""Which engine computes an op call: a pure function of facts that every rank knows alike."""

from __future__ import annotations

from dataclasses import replace

from cptransport import env, notices, registry
from cptransport.engine_order import automatic
from cptransport.engines import Engine, OpFacts
from cptransport.errors import BackendError, BackendFallbackWarning, BackendUnavailableError
from cptransport.transport import BoundaryTransport

__all__ = ["choose_engine"]

Reasons = tuple[tuple[str, str], ...]


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
        BackendUnavailableError: strict, and the named engine cannot serve; or no engine can; or one
            that would serve cannot as a variable of its own requires.
    """
    requested, _ = env.text(env.ENGINE, argument)
    passed: list[tuple[str, str]] = []
    if requested != "auto":
        engine, reason = _candidate(requested, replace(facts, named=True), BackendUnavailableError)
        if engine is not None:
            return engine, ()
        if getattr(transport, "strict", False):
            raise BackendUnavailableError(f"engine {requested!r} cannot serve {facts.op}: {reason}")
        notices.warn_once(
            f"engine {requested!r} cannot serve {facts.op}: {reason}; the automatic choice runs",
            BackendFallbackWarning,
        )
        passed.append((requested, reason))
    for name in automatic(facts, getattr(transport, "preferred_engine", None)):
        if name == requested:
            continue
        engine, reason = _candidate(name, facts, BackendError)
        if engine is not None:
            return engine, tuple(passed)
        passed.append((name, reason))
    raise BackendUnavailableError(
        f"no engine can serve {facts.op}: " + "; ".join(f"{name}: {why}" for name, why in passed)
    )


def _candidate(name: str, facts: OpFacts, passed: type[BackendError]) -> tuple[Engine | None, str]:
    """Return the engine of that name, or None and why it cannot serve; ``passed`` if it does not load."""
    try:
        engine = registry.load_engine(facts.op, name)
    except passed as error:
        return None, str(error)
    reason = engine.eligible(facts)
    return (engine, "") if reason is None else (None, reason)
