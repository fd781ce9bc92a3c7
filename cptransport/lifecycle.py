# SPDX-License-Identifier: Apache-2.0
"""How a transport lives and breaks: waits that end, the first failure that ends its use, closing.

``TransportBase`` adds the verbs. A call of a verb runs inside ``_verb``, which refuses closed and
broken transports, raises what a device wait or a watchdog has reported, turns a failed wait into a
broken transport, and orders the call after the one before where both are on CUDA streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from cptransport.control import ControlPlane, wait_until
from cptransport.errors import (
    CapabilityError,
    GenerationError,
    RouteError,
    TransportClosedError,
    TransportError,
    TransportTimeoutError,
)
from cptransport.generation import Generation

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Lifecycle"]


class Lifecycle:
    """State of a transport between creation and close.

    Args:
        name: of the backend.
        device: where its tensors live.
        control: the control plane; gives rank and world size.
        timeout_s: limit of every wait.
    """

    def __init__(
        self, name: str, *, device: torch.device, control: ControlPlane, timeout_s: float
    ) -> None:
        self.name = name
        self.rank = control.rank
        self.world_size = control.world_size
        self.device = device
        self.control = control
        self.timeout_s = timeout_s
        self._waited_s = 0.0
        self._closed = False
        self._broken: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last verb

    def _close(self, broken: bool) -> None:
        raise NotImplementedError

    def _drain(self) -> None:
        """Before ``close`` looks for reports: wait for work that may report something, if it ends by itself."""

    def _interrupt(self) -> None:
        """End waits that are still under way elsewhere; called once when the transport breaks."""

    def _reported(self) -> BaseException | None:
        """An error that a device wait or a watchdog has reported meanwhile; raised by the next verb."""
        return None

    def check(self) -> None:
        """See ``BoundaryTransport.check``."""
        with self._guard():
            self.control.check()

    def close(self) -> None:
        """See ``BoundaryTransport.close``."""
        if self._closed:
            return
        self._closed = True
        reported: BaseException | None = None
        if self._broken is None:
            try:
                self._drain()
            except RuntimeError as error:  # the device's: nothing of ours on it can be trusted
                reported = TransportError(f"transport {self.name!r} cannot close: {error}")
                reported.__cause__ = error
            reported = reported or self._reported()
        if reported is not None:
            self._break(reported)
        self._close(self._broken is not None)
        if reported is not None:
            raise reported

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._broken is None:
            self.control.leave(error)
            self._break(error)
        self.close()

    def abandon(self, error: BaseException) -> None:
        """Tell the peers that this rank raised inside an op; once something was staged, only ``close`` still works."""
        if self._broken is not None or self._closed:
            return
        if self.control.staged:
            self._break(error)
        else:
            self.control.report(error, fatal=False)

    def _wait(
        self,
        arrived: Callable[[float], bool],
        what: str,
        *,
        current: Generation | None = None,
        missing: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """Wait on the host for ``arrived(seconds) -> bool``; see ``control.wait_until``."""

        def describe(waited: float) -> TransportTimeoutError:
            absent = list(missing())
            place = f" (slot {current.slot.name!r}, generation {current.number})" if current else ""
            return TransportTimeoutError(
                f"rank {self.rank}: {what}{place}: waited {waited:.1f} s for rank"
                + (f" {absent[0]}" if len(absent) == 1 else f"s {absent}")
                + f"; the limit is {self.timeout_s:g} s",
                peer=absent[0] if len(absent) == 1 else None,
                slot=current.slot.name if current else None,
                generation=current.number if current else None,
                waited_s=waited,
                missing=absent,
            )

        self._waited_s += wait_until(
            arrived, control=self.control, timeout_s=self.timeout_s, describe=describe
        )

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Refuse closed and broken transports; a failed wait breaks this one, a caller's mistake does not."""
        if self._closed:
            raise TransportClosedError(f"transport {self.name!r} is closed")
        if self._broken is not None:
            raise TransportClosedError(
                f"transport {self.name!r} broke earlier and can only be closed: {self._broken}"
            ) from self._broken
        reported = self._reported()
        if reported is not None:
            self._break(reported)
            raise reported
        try:
            if not (torch.is_inference_mode_enabled() or torch.is_grad_enabled()):
                yield  # as inside an op, where two contexts per verb would show
                return
            # What a verb allocates outlives the caller's inference mode, and is written again outside.
            with torch.inference_mode(False), torch.no_grad():
                yield
        except (GenerationError, RouteError, CapabilityError):
            raise
        except TransportError as error:
            if type(error) is not TransportError:
                self._break(error)
            raise

    @contextmanager
    def _verb(self) -> Iterator[None]:
        """Guard a call that enqueues work on the current stream."""
        with self._guard():
            if self.device.type != "cuda":
                yield
                return
            with _device(self.device):
                self._follow()
                yield

    def _follow(self) -> None:
        """Let the current stream wait for all that the last verb's stream was given so far."""
        stream = torch.cuda.current_stream(self.device)
        last, self._stream = self._stream, stream
        if last is None or last == stream:
            return
        capturing = torch.cuda.is_current_stream_capturing()
        with torch.cuda.stream(last):
            same = torch.cuda.is_current_stream_capturing() == capturing
        if same:  # else a capture would depend on work outside it, or the other way round
            stream.wait_stream(last)

    def _break(self, error: BaseException) -> None:
        if self._broken is None:
            self._broken = error
            # Before connections close, so that peers read the cause.
            self.control.report(error, fatal=True)
            self._interrupt()


def _device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make a CUDA device the current one, if it is not."""
    if torch.cuda.current_device() == device.index:
        return contextlib.nullcontext()
    return torch.cuda.device(device)
