# SPDX-License-Identifier: Apache-2.0
"""How a communicator is made, used and ended, by the calls that NCCL gets."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cptransport_nccl import BACKEND, library
from cptransport_nccl.library import NcclError, Origin

_MADE, _SPLIT = 5, 7
_IN_PROGRESS = 7
_IDENTITY = bytes(128)


class Nccl:
    """Remembers calls; what takes time goes on for ``polls`` looks at its state."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.polls = 0
        self.splits = True  # whether splitting ends
        self.group_code = self.group_polls = 0
        self.over = threading.Event()  # aborts last until then
        self.over.set()
        self._writes: Callable[[], None] = lambda: None

    def ncclCommInitRankConfig(
        self, handle: Any, size: int, identity: Any, rank: int, config: Any
    ) -> int:
        self.calls.append(("init", _given(config)))
        _cell(handle).value = _MADE
        self.polls = 3
        return _IN_PROGRESS

    def ncclCommSplit(self, made: Any, color: int, key: int, handle: Any, config: Any) -> int:
        self.calls.append(("split", _given(config)))
        assert (made.value, color) == (_MADE, 0)
        self._writes = lambda: setattr(_cell(handle), "value", _SPLIT)
        self.polls = 3
        return _IN_PROGRESS

    def ncclCommGetAsyncError(self, handle: Any, state: Any) -> int:
        waits = handle.value == _MADE and (self.polls > 0 or (self._split() and not self.splits))
        self.polls -= waits
        if handle.value == _SPLIT and self.group_polls:
            self.group_polls -= 1
            waits = True
        if not waits and self._split():
            self._writes()
        _cell(state).value = _IN_PROGRESS if waits else 0
        return 0

    def ncclCommAbort(self, handle: Any) -> int:
        self.calls.append(("abort", handle.value))
        if handle.value == _MADE and self._split():
            self._writes()  # ends it; it may have come so far
        assert self.over.wait(10)
        return 0

    def ncclCommDestroy(self, handle: Any) -> int:
        self.calls.append(("destroy", handle.value))
        return 0

    def ncclGroupStart(self) -> int:
        return 0

    def ncclGroupEnd(self) -> int:
        self.calls.append(("group", None))
        return self.group_code

    def _split(self) -> bool:
        return any(name == "split" for name, _ in self.calls)


def _cell(reference: Any) -> Any:
    return reference._obj


def _given(config: Any) -> tuple[int, int]:
    return _cell(config).blocking, _cell(config).max_ctas


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nccl]:
    made = Nccl()
    monkeypatch.setattr(library, "_library", lambda: made)
    yield made
    made.over.set()
    for thread in tuple(library._ending):  # before the library is the real one again
        thread.join(10)


def _wait(arrived: Callable[[float], bool], what: str) -> None:
    if not arrived(0.1):
        raise TimeoutError(what)


def _origin() -> Origin:
    origin = Origin(_IDENTITY, 1, 2)
    origin.complete(_wait)
    return origin


@pytest.mark.parametrize("channels", [None, 1])
def test_work_goes_to_a_blocking_communicator(nccl: Nccl, channels: int | None) -> None:
    origin = _origin()
    communicator = origin.split(channels, _wait)
    assert nccl.calls == [("init", (0, 1)), ("split", (1, channels or library._UNDEFINED))]
    for one in (communicator, origin):
        thread = one.destroy()
        assert thread is not None
        thread.join()
        assert not one.alive
        assert one.destroy() is one.abort(None) is None
    assert nccl.calls[2:] == [("destroy", _SPLIT), ("destroy", _MADE)]


def test_an_abort_while_one_is_split_off_frees_what_that_gave(nccl: Nccl) -> None:
    origin = _origin()
    nccl.splits = False
    with pytest.raises(TimeoutError, match="ncclCommSplit"):
        origin.split(None, _wait)
    thread = origin.abort(None)
    assert thread is not None
    thread.join()
    for other in tuple(library._ending):
        other.join()
    assert nccl.calls[2:] == [("abort", _MADE), ("abort", _SPLIT)]


def test_making_one_that_was_aborted_is_an_error(nccl: Nccl) -> None:
    origin = Origin(_IDENTITY, 0, 2)
    origin.abort(None)
    with pytest.raises(NcclError, match="aborted"):
        origin.complete(_wait)


@pytest.mark.parametrize("aborted", [False, True])
def test_a_group_that_nccl_issues_later_is_waited_for(nccl: Nccl, aborted: bool) -> None:
    communicator = _origin().split(None, _wait)
    nccl.group_code, nccl.group_polls = _IN_PROGRESS, 1_000_000 if aborted else 5
    if aborted:
        timer = threading.Timer(0.1, communicator.abort, [None])
        timer.start()
        with pytest.raises(NcclError, match="aborted"), communicator.group():
            pass
        timer.join()
    else:
        with communicator.group():
            pass
        assert nccl.group_polls == 0


@pytest.mark.parametrize("name", ["NCCL_COMM_BLOCKING", "NCCL_COMM_SPLIT_SHARE_RESOURCES"])
def test_advice_on_what_overrides_it(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    advice = BACKEND.advice
    assert advice is not None
    monkeypatch.delenv(name, raising=False)
    assert not advice(torch.device("cuda"))
    monkeypatch.setenv(name, "1")
    (line,) = advice(torch.device("cuda"))
    assert name in line


@pytest.mark.parametrize("returns", [True, False])
def test_an_abort_waits_a_while_for_a_call_in_it(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch, returns: bool
) -> None:
    monkeypatch.setattr(library, "_CALL_S", 10.0 if returns else 0.2)
    communicator = _origin().split(None, _wait)
    inside, leave = threading.Event(), threading.Event()

    def use() -> None:
        with communicator.group():
            inside.set()
            assert leave.wait(10)

    caller = threading.Thread(target=use)
    caller.start()
    assert inside.wait(10)
    thread = communicator.abort(None)
    assert thread is not None
    if returns:
        time.sleep(0.1)
        leave.set()
    thread.join()
    leave.set()
    caller.join()
    order = [name for name, _ in nccl.calls[2:]]
    assert order == (["group", "abort"] if returns else ["abort", "group"])


def test_an_abort_holds_what_it_was_given_and_is_waited_for_at_exit(
    nccl: Nccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_EXIT_S", 0.2)
    communicator = _origin().split(None, _wait)
    nccl.over.clear()
    held = torch.nn.Identity()
    gone = weakref.ref(held)
    thread = communicator.abort(held)
    del held
    assert thread is not None
    assert communicator.abort(None) is None
    start = time.monotonic()
    library._leave()
    assert 0.2 <= time.monotonic() - start < 1.0
    assert gone() is not None
    nccl.over.set()
    thread.join()
    assert gone() is None
