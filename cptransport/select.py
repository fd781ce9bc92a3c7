# SPDX-License-Identifier: Apache-2.0
"""Choosing a backend: all ranks of a group take the same decision or raise the same error.

The ranks go through the same rounds. In each, every rank tells every other what it found, and what
follows is a pure function of those reports:

1. *request*: what each asked for, its device, strict flag and versions, or the error it met;
2. per candidate, *probe*: why it cannot serve on a rank, if so, and its version there;
3. per candidate, *create*: whether the transport was made on each rank.

A candidate that some rank refuses is passed over on all. No rank falls back alone, and every wait
has a deadline.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from cptransport import env, notices, registry
from cptransport.agreement import Ranks, agree, by_rank, group_world_size
from cptransport.candidate import Trial, dispose
from cptransport.errors import (
    BackendFallbackWarning,
    BackendMismatchError,
    BackendUnavailableError,
    CPTransportError,
)
from cptransport.request import Request, asked_for, device_of, make_request
from cptransport.transport import BoundaryTransport, Selection

__all__ = ["auto_candidates", "create_transport", "group_world_size"]

_log = logging.getLogger("cptransport")


def create_transport(
    group: Any = None,
    *,
    backend: str | None = None,
    device: torch.device | str | int | None = None,
    strict: bool | None = None,
    timeout_s: float | None = None,
) -> BoundaryTransport:
    """Make the transport of a group, through the backend that was asked for or that ``auto`` takes.

    Args:
        group: a ``torch.distributed`` process group. None: the ranks of ``threads.run`` inside it,
            else WORLD, else (``torch.distributed`` not initialised) this process alone.
        backend: ``auto``, a registered name, ``nvshmem`` (``nvshmem_signal`` for up to 2 ranks,
            ``nvshmem_barrier`` above) or ``package.module:ATTR``. None or empty:
            ``CULA_CP_COMM_BACKEND``.
        device: where summaries live. None: the current CUDA device if there is one and the group
            has a CUDA backend (gloo, which only accepts CUDA tensors, does not count), else CPU;
            inside ``threads.run`` the rank's device.
        strict: refuse to fall back. None: ``CULA_CP_STRICT``. Strict on one rank is strict on all.
        timeout_s: limit of every wait, in seconds. None: ``CULA_CP_TIMEOUT_S``.

    Returns:
        The transport; its ``selection`` says what was asked for, what runs and why the others do not.

    Raises:
        BackendNotFoundError: the name is unknown.
        BackendMismatchError: the ranks asked for different backends, or hold different versions.
        BackendUnavailableError: it cannot serve and strict forbids a fallback, or nothing can.
        BackendConflictError, BackendContractError, BackendLoadError: a candidate is broken.
        BackendError: a candidate failed in a way of its own; ``__cause__`` is its error.
        EnvVarError: a ``CULA_CP_*`` variable is not valid; under strict also an unknown name, and what
            the backend advises about the environment.
        TransportTimeoutError, PeerFailedError: a rank did not come, or left.

    Collective: over the group and nobody else. Every error above is raised on all ranks, with the
        same words; the last two by those that waited.
    """
    ranks = Ranks.of(group)
    if ranks.world is None and ranks.group is None and _launched_beside_others():
        notices.warn_once(
            "this process was launched as one of several ranks, but torch.distributed is not initialised: "
            "the transport serves this rank alone; call torch.distributed.init_process_group first"
        )
    try:
        transport, warning = _choose(ranks, backend, device, strict, timeout_s)
    except CPTransportError:
        raise
    except BaseException as error:  # not agreed on: peers must not wait for this rank
        ranks.leave(error)
        raise
    if warning:
        try:
            notices.warn_once(warning, BackendFallbackWarning)
        except BackendFallbackWarning as error:  # the user made it an error
            dispose(transport, error)
            raise
    return transport


def _launched_beside_others() -> bool:
    """Whether a launcher such as torchrun started this process with others."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1") and "RANK" in os.environ


def auto_candidates(world_size: int, *, in_threads: bool, on_cuda: bool) -> tuple[str, ...]:
    """Return what ``auto`` tries, in order.

    Args:
        world_size: ranks of the group.
        in_threads: they are the ranks of ``threads.run``.
        on_cuda: some rank's device is a CUDA device.
    """
    if in_threads:
        return ("threads",)
    if world_size == 1:
        return ("loopback",)
    return ("nccl", "gloo") if on_cuda else ("gloo",)


def _choose(
    ranks: Ranks,
    backend: str | None,
    device: torch.device | str | int | None,
    strict: bool | None,
    timeout_s: float | None,
) -> tuple[BoundaryTransport, str]:
    """Go through the rounds; return the transport and what to warn of, if anything."""
    seconds = float(env.TIMEOUT_S.default)
    request, problem, source, own_device = None, None, "", torch.device("cpu")
    try:
        seconds = env.timeout_s(timeout_s)
        asked, source = asked_for(backend)
        own_device = device_of(ranks, device)
        request = make_request(ranks, asked, env.flag(env.STRICT, strict), seconds, own_device)
    except CPTransportError as error:
        problem = error
    ranks.limit(seconds)
    said = f"asked for {request.asked!r}" if request else ""
    reports = agree(ranks, "choosing a backend", request and asdict(request), said, problem)
    requests = [Request(**report) for report in reports]
    _check_alike(requests)

    mine = requests[ranks.rank]
    named = mine.backend != registry.AUTO
    is_strict = any(each.strict for each in requests)
    on_cuda = any(each.device_type == "cuda" for each in requests)
    auto = auto_candidates(ranks.world_size, in_threads=ranks.world is not None, on_cuda=on_cuda)
    candidates = list(dict.fromkeys([mine.backend, *auto])) if named else list(auto)
    if named and is_strict:
        candidates = [mine.backend]

    # A rank that waits in vain while it makes its transport reports only after its own deadline.
    ranks.limit(2 * max(each.timeout_s for each in requests) + 1)
    trial = Trial(ranks, requests, own_device, seconds)
    passed_over: list[tuple[str, str]] = []
    for number, name in enumerate(candidates):
        transport = None
        loaded, reason = trial.probe(name)
        if loaded is not None and not reason:
            transport, reason = trial.create(loaded, f"{requests[0].nonce}/{number}")
        if loaded is not None and transport is not None:
            break
        passed_over.append((name, reason))
    else:
        raise BackendUnavailableError(_refusal(mine.asked, named and is_strict, passed_over))

    chosen = loaded.spec.name
    transport.selection = Selection(mine.asked, source, chosen, tuple(passed_over))
    transport.strict = is_strict  # type: ignore[attr-defined]  # ops read it
    transport.group = ranks.group  # type: ignore[attr-defined]  # activations move over it
    transport.preferred_engine = loaded.spec.preferred_engine  # type: ignore[attr-defined]  # likewise
    return transport, _announce(ranks, transport, named)


def _check_alike(requests: Sequence[Request]) -> None:
    """Raise when the ranks hold different versions or asked for different backends."""
    for what, texts in (
        ("hold different versions", [each.versions for each in requests]),
        ("asked for different backends", [repr(each.backend) for each in requests]),
    ):
        if len(set(texts)) > 1:
            raise BackendMismatchError(
                f"the ranks {what}: " + by_rank(dict(enumerate(texts)), len(texts))
            )


def _refusal(asked: str, strict: bool, passed_over: Sequence[tuple[str, str]]) -> str:
    if strict:
        return (
            f"backend {asked!r} cannot serve here: {passed_over[0][1]} "
            f"(strict: nothing else is tried)"
        )
    return "no backend can serve here: " + "; ".join(f"{name}: {why}" for name, why in passed_over)


def _announce(ranks: Ranks, transport: BoundaryTransport, named: bool) -> str:
    """Log what ``auto`` took; return what to warn of when a named backend was passed over."""
    selection = transport.selection
    reasons = "; ".join(f"{name}: {why}" for name, why in selection.passed_over)
    if ranks.rank == 0 and (reasons or not named):
        _log.info(
            "backend %s serves %d rank(s) on %s; asked for %s (%s); passed over: %s",
            selection.chosen,
            ranks.world_size,
            transport.device,
            selection.requested,
            selection.source,
            reasons or "none",
        )
    if not (named and reasons):
        return ""
    return (
        f"backend {selection.requested!r} cannot serve here, {selection.chosen!r} runs instead "
        f"({reasons}); {env.STRICT.name}=1 makes this an error"
    )
