# SPDX-License-Identifier: Apache-2.0
"""What surrounds every op: its step on the control plane, agreement under ``CULA_CP_CHECK``, the record of what ran."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from cptransport import env, errors
from cptransport.activations import Carrier
from cptransport.errors import CPTransportError, OpInputError
from cptransport.transport import BoundaryTransport

__all__ = ["RunRecord", "agree", "last_run", "op_step", "record_run", "reporting"]

T = TypeVar("T")


@dataclass(frozen=True)
class RunRecord:
    """What the last op of this thread ran on.

    Attributes:
        op: e.g. ``"chunk_kda"``.
        engine: name of the engine that computed.
        transport: name of the transport that moved the summaries.
        composition: how they were composed.
        overlap: whether the exchange was allowed to run beside local work.
        world_size: ranks of the group.
        reasons: ``(name, reason)`` for every engine or composition that was passed over.
        predicted_s: seconds that ``cptransport.cost`` predicts for the exchanges of summaries of one
            forward and one backward; None for an op that has no summaries.
        detail: what the engine says of how it computes such calls, if anything.
    """

    op: str
    engine: str
    transport: str
    composition: str
    overlap: bool
    world_size: int
    reasons: tuple[tuple[str, str], ...] = ()
    predicted_s: float | None = None
    detail: str = ""


class _Last(threading.local):
    record: RunRecord | None = None


_last = _Last()


def record_run(record: RunRecord) -> None:
    """Remember what this thread's op ran on."""
    _last.record = record


def last_run() -> RunRecord | None:
    """Return what this thread's last op ran on, or None before the first."""
    return _last.record


class _Reporting:
    """See ``reporting``; a class, since a generator would cost every op call twice as much."""

    __slots__ = ("_transport",)

    def __init__(self, transport: BoundaryTransport | Carrier) -> None:
        self._transport = transport

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            abandon = getattr(self._transport, "abandon", None)
            if abandon is not None:
                abandon(error)


def op_step(transport: BoundaryTransport | Carrier) -> _Reporting:
    """Number one forward or backward of an op; what the block raises reaches the peers (``docs/contract.md``)."""
    control = getattr(transport, "control", None)
    if control is not None:
        control.begin_step()
    return _Reporting(transport)


def reporting(transport: BoundaryTransport | Carrier) -> _Reporting:
    """Tell the peers what the block raises, inside the current step.

    Never around ``Function.apply``: what leaves there may not be an error. Checkpointing stops its
    recomputation by an exception once it has seen enough saved tensors.
    """
    return _Reporting(transport)


def agree(
    transport: BoundaryTransport | Carrier, title: str, prepare: Callable[[], tuple[T, str]]
) -> T:
    """Run a rank's own checks; under ``CULA_CP_CHECK=1`` compare their outcome over all ranks first.

    Args:
        transport: whose control plane is used; a bare group has none, and nothing is compared.
        title: the op and direction, part of what is compared.
        prepare: returns a result and a text that must be the same on every rank, or raises.

    Raises:
        CPTransportError: ``prepare``'s own error; under the check the same error on every rank,
            naming the rank.
        OpInputError: the texts differ.

    Collective: only under the check.
    """
    checked = env.flag(env.CHECK)
    control = getattr(transport, "control", None)
    if not checked or control is None or transport.world_size == 1:
        return prepare()[0]
    result: Any = None
    text, failure = "", None
    try:
        result, text = prepare()
    except Exception as error:
        failure = error
    mine = [title, type(failure).__name__ if failure else "", str(failure) if failure else text]
    outcomes = [
        json.loads(value)
        for value in control.exchange(json.dumps(mine), f"{title}: check of inputs")
    ]
    for rank, (_, kind, message) in enumerate(outcomes):
        if kind:
            raise _same_class(kind)(f"rank {rank}: {message}") from failure
    for rank, outcome in enumerate(outcomes):
        if outcome != outcomes[0]:
            raise OpInputError(
                f"ranks call {title} differently: rank 0: {_difference(outcomes[0], outcome)}; "
                f"rank {rank}: {_difference(outcome, outcomes[0])}"
            )
    return result  # type: ignore[no-any-return]


def _same_class(name: str) -> type[Exception]:
    if name == TypeError.__name__:  # an argument that nobody knows
        return TypeError
    found = getattr(errors, name, None)
    if isinstance(found, type) and issubclass(found, CPTransportError):
        return found
    return OpInputError


def _difference(mine: list[str], other: list[str]) -> str:
    """The items of one description that the other lacks."""
    if mine[0] != other[0]:
        return mine[0]
    theirs = set(other[2].split("; "))
    return "; ".join(item for item in mine[2].split("; ") if item not in theirs) or "nothing more"
