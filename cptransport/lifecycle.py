# SPDX-License-Identifier: Apache-2.0
"""How a transport lives and breaks: waits that end, the first failure that ends its use, closing.

``TransportBase`` adds the verbs. A call of a verb runs inside ``_verb``, which refuses closed and
broken transports, raises what a device wait or a watchdog has reported, turns a failed wait into a
broken transport, and orders the call after the one before where both are on CUDA streams.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from cptransport.control import ControlPlane, wait_until
from cptransport.cuda_driver import with_index
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
        self.device = with_index(device)
        self.control = control
        self.timeout_s = timeout_s
        self._waited_s = 0.0
        self._closed = False
        self._broken: BaseException | None = None
        self._stream: torch.cuda.Stream | None = None  # of the last verb
        self._handle: int | None = None  # of that stream

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

    def _guard(self) -> _Guard:
        """Guard a call that enqueues nothing."""
        return _Guard(self, enqueues=False)

    def _verb(self) -> _Guard:
        """Guard a call that enqueues work on the current stream."""
        return _Guard(self, enqueues=self.device.type == "cuda")

    def _refuse(self) -> None:
        """Raise if this transport cannot be used any more."""
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

    def _follow(self) -> None:
        """Let the current stream wait for all that the last verb's stream was given so far."""
        handle = torch._C._cuda_getCurrentRawStream(self.device.index)
        if handle == self._handle:  # nearly always; a stream's object costs more than the rest
            return
        stream = torch.cuda.current_stream(self.device)
        last, self._stream, self._handle = self._stream, stream, handle
        if last is None:
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


class _Guard:
    """Refuse closed and broken transports; a failed wait breaks this one, a caller's mistake does not.

    A class, since generators would cost every verb several times as much.
    """

    __slots__ = ("_enqueues", "_inside", "_transport")

    def __init__(self, transport: Lifecycle, *, enqueues: bool) -> None:
        self._transport, self._enqueues = transport, enqueues
        self._inside: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        transport = self._transport
        transport._refuse()
        try:
            # Inside an op neither is the case, and two contexts per verb would show.
            if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
                # What a verb allocates outlives the caller's inference mode, and is written again
                # outside.
                self._enter(torch.inference_mode(False))
                self._enter(torch.no_grad())
            if self._enqueues:
                if torch.cuda.current_device() != transport.device.index:
                    self._enter(torch.cuda.device(transport.device))
                transport._follow()
        except BaseException:
            self._leave()
            raise

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._leave()
        if (
            isinstance(error, TransportError)
            and type(error) is not TransportError
            and not isinstance(error, (GenerationError, RouteError, CapabilityError))
        ):
            self._transport._break(error)

    def _enter(self, context: contextlib.AbstractContextManager[object]) -> None:
        self._inside = self._inside or contextlib.ExitStack()
        self._inside.enter_context(context)

    def _leave(self) -> None:
        if self._inside is not None:
            self._inside.close()
            self._inside = None
