# SPDX-License-Identifier: Apache-2.0
"""Calls of NVSHMEM that meet all PEs. They wait without limit, so each has a thread of its own, which is waited for.

A rank that dies inside such a call, or before it, would hold its peers there for ever: NVSHMEM ends the
process where CUDA fails, or where the MPS daemon does not answer it.

That the thread is a new one matters too. NVSHMEM 3.4.5 frees a stale pointer when it is finalised in a
process that was the first one of its GPU in an earlier initialisation and is not in this one. That leaves
an error behind in NVSHMEM's own CUDA runtime, where no other library can clear it, and the next
initialisation takes it for its own and ends the process. But such errors belong to a thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from cptransport.backend import ControlPlane
from cptransport.errors import PeerFailedError, TransportTimeoutError

__all__ = ["meet"]

#: The calls are work as well as waiting, so none has less, in seconds.
AT_LEAST_S = 30.0
#: How long a call may go on when a peer has failed: that peer may have come back from it.
_AFTER_FAILURE_S = 2.0
_LOOK_S = 0.02

T = TypeVar("T")


def meet(call: Callable[[], T], what: str, control: ControlPlane, device: torch.device) -> T:
    """Make a call that meets all PEs, with a limit: the transport's, but at least ``AT_LEAST_S``.

    Args:
        call: of NVSHMEM, with the interpreter's lock let go meanwhile; goes on when its limit has passed.
        what: the call's name.
        control: asked for peers' records meanwhile.
        device: of this rank; its context is current in the call.

    Returns:
        What the call returned; what it raised is raised.

    Raises:
        TransportTimeoutError: it has not returned. Nothing more may be asked of NVSHMEM then.
        PeerFailedError: it has not returned, and a peer reported an error. Likewise.

    Collective: over the PEs.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def make() -> None:
        try:
            with torch.cuda.device(device):
                torch.cuda.synchronize(device)  # a new thread has no current context before
                results.append(call())
        except BaseException as error:  # raised below
            errors.append(error)

    thread = threading.Thread(target=make, name="cpt-nvshmem", daemon=True)
    start = time.monotonic()
    limit_s = max(control.timeout_s, AT_LEAST_S)
    failure: PeerFailedError | None = None
    thread.start()
    thread.join(_LOOK_S)
    while thread.is_alive():
        waited = time.monotonic() - start
        if waited > limit_s:
            raise failure or TransportTimeoutError(
                f"rank {control.rank}: NVSHMEM's {what} did not return within {waited:.1f} s; a rank that "
                "ended in it has said why on its standard error",
                waited_s=waited,
            )
        if failure is None:
            try:
                control.check()
            except PeerFailedError as error:
                failure = error
                limit_s = min(limit_s, waited + _AFTER_FAILURE_S)
        thread.join(_LOOK_S)
    if errors:
        raise errors[0]
    return results[0]
