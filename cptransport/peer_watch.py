# SPDX-License-Identifier: Apache-2.0
"""Looks for peers' records while the device waits, since nothing on the host waits with it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cptransport.control import ControlPlane
from cptransport.errors import PeerFailedError

__all__ = ["PeerWatch"]

_LOOK_S = 0.25


class PeerWatch:
    """A thread that calls ``found`` once, when a peer's record dooms what this rank waits for, and ends.

    A record does when this rank has staged something in its step, so that it cannot raise an error of
    its own there any more and go on; and at a second look, since what the peer has published before may
    still be under way. The store is asked only while something waits.

    Args:
        control: whose records.
        waits: says whether the device has waited for somebody since it was last asked.
        found: called on the thread. Neither may hold what stops the watch.
    """

    def __init__(
        self, control: ControlPlane, waits: Callable[[], bool], found: Callable[[], None]
    ) -> None:
        self._stopped = threading.Event()
        self._thread = threading.Thread(
            target=_look,
            args=(control, waits, found, self._stopped),
            name="cpt-peer-watch",
            daemon=True,
        )
        if control.world_size > 1:
            self._thread.start()

    def end(self) -> None:
        """Let the thread end; does not wait for it."""
        self._stopped.set()

    def stop(self) -> None:
        """End the thread; one that the store does not answer is left behind."""
        self.end()
        if self._thread.is_alive():
            self._thread.join(2 * _LOOK_S)


def _look(
    control: ControlPlane,
    waits: Callable[[], bool],
    found: Callable[[], None],
    stopped: threading.Event,
) -> None:
    seen = 0
    while not stopped.wait(_LOOK_S):
        if not waits():
            continue
        try:
            control.check_on_this_thread()
            seen = 0
        except PeerFailedError:
            seen = seen + 1 if control.staged else 0
        if seen == 2:
            found()
            return
