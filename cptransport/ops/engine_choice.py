# SPDX-License-Identifier: Apache-2.0
"""Which engine computes an op call: a function of facts that every rank knows alike.

An engine may also ask what its machine has, and machines may differ. Slots have the
engine's layout, and a state that is read in another one is wrong without a word; so ranks compare
which engine they took, see ``_compare``.
"""

from __future__ import annotations

import json
from dataclasses import replace

from cptransport import env, notices, registry
from cptransport.engine_order import automatic
from cptransport.engines import Engine, OpFacts
from cptransport.errors import (
    BackendError,
    BackendFallbackWarning,
    BackendMismatchError,
    BackendUnavailableError,
)
from cptransport.transport import BoundaryTransport

__all__ = ["choose_engine"]

Reasons = tuple[tuple[str, str], ...]

#: They have one layout, and what they serve is no question of the machine but for Triton being there.
_ALIKE = ("torch", "triton")


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
        BackendMismatchError: another rank took another engine.
    """
    engine, reasons = _choose(facts, transport, argument)
    if not {engine.name, *dict(reasons)} <= set(_ALIKE):
        _compare(facts, transport, engine.name, reasons)
    return engine, reasons


def _compare(facts: OpFacts, transport: BoundaryTransport, name: str, reasons: Reasons) -> None:
    """Raise where another rank was seen to take another engine; once per kind of call and transport.

    Nobody waits: each rank leaves a note, then looks at those that are there. Of two ranks that differ
    the later one sees it, and the other hears of it as of any error of a peer. A rank that no other
    engine than ``_ALIKE`` was a candidate for leaves none: its variables differ, not its machine, and
    ``CULA_CP_CHECK=1`` sees that.
    """
    control = getattr(transport, "control", None)
    if control is None or transport.world_size == 1:
        return
    sizes = (facts.heads, facts.value_heads, facts.key_dim, facts.value_dim)
    dtypes = tuple(sorted((each, str(dtype)) for each, dtype in facts.dtypes.items()))
    kind = f"{facts.op} {sizes} {dtypes} {facts.options}"
    if (kind, name) in control.compared:
        return
    control.compared.add((kind, name))
    passed = "".join(f" ({other}: {why})" for other, why in reasons)
    key = f"engine/{control.step}/{kind}"
    control.note(key, json.dumps([name, passed]))
    for rank, note in enumerate(control.notes(key)):
        other, why = json.loads(note) if note else (name, "")
        if other != name:
            raise BackendMismatchError(
                f"ranks compute {facts.op} by different engines: rank {transport.rank} by "
                f"{name}{passed}, rank {rank} by {other}{why}"
            )


def _choose(
    facts: OpFacts, transport: BoundaryTransport, argument: str | None
) -> tuple[Engine, Reasons]:
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
