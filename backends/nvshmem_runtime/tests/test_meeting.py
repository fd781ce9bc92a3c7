# SPDX-License-Identifier: Apache-2.0
"""Calls of NVSHMEM that meet all PEs end, also where a rank ended or failed inside one."""

from __future__ import annotations

import os
import threading
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptransport.errors import PeerFailedError, TransportError, TransportTimeoutError
from cptransport.testing import Ranks, pool
from cptransport.testing.contract_bytes import exchange_all
from cptransport.transport import PartSpec, Slot

_SLOT = Slot("used", (PartSpec("x", (1000,), torch.float32),))
_LIMIT_S = 1.0
_CALLS = ("hostlib_init_attr", "malloc", "free", "hostlib_finalize")


@pytest.fixture
def run(heaps: str) -> Any:
    """Run a case on two ranks of its own."""

    def run(case: Any, **kwargs: Any) -> list[Any]:
        env = {
            "NVSHMEM_SYMMETRIC_SIZE": "16M",
            "FAKE_NVSHMEM_FOLDER": heaps,
            "TEST": f"{case.__name__} {kwargs.get('where')}",
        }
        ranks = pool("fake_nvshmem:SIGNAL", 2, 1, device="cpu", env=env)
        return ranks.run(case, transport=False, timeout_s=60, transport_timeout_s=3, **kwargs)

    return run


def _ends_inside(ranks: Ranks, where: str) -> list[str]:
    """Rank 1 ends in a call, as NVSHMEM does it there where CUDA fails."""
    import fake_bindings

    from cptransport_nvshmem_runtime import meeting, runtime

    meeting.AT_LEAST_S = _LIMIT_S
    if ranks.rank == 1:
        setattr(fake_bindings, where, lambda *_: os._exit(7))
    start = time.monotonic()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            transport = ranks.create()
            exchange_all(transport, _SLOT, 1)
            transport.close()
            raised = "nothing"
        except TransportError as error:
            raised = type(error).__name__
    assert time.monotonic() - start < 20
    assert "hostlib_finalize" not in fake_bindings.calls or where == "hostlib_finalize"
    texts = [str(each.message) for each in said]
    told = [text for text in texts if text.startswith("NVSHMEM was lost")]
    return [raised, runtime._process.conflict((0, 1)), *told]


@pytest.mark.parametrize("where", _CALLS)
def test_a_rank_that_ends_inside_nvshmem_does_not_hold_its_peers(run: Any, where: str) -> None:
    """They are told in time, and use NVSHMEM no more."""
    raised, lost, *told = run(_ends_inside, where=where, exits={1: 7})[0]
    what = {"hostlib_init_attr": "initialisation", "hostlib_finalize": "finalisation"}
    assert lost.startswith("NVSHMEM was lost earlier in this process: rank 0: NVSHMEM's")
    assert f"{what.get(where, where)} did not return within 3." in lost
    closing = where in ("free", "hostlib_finalize")
    assert raised == ("nothing" if closing else "TransportTimeoutError")
    assert told == ([lost] if where == "hostlib_finalize" else [])


def _fails_inside(ranks: Ranks) -> float:
    """Rank 1 comes back from a start that rank 0 stays in, waits for it in vain, and says so."""
    import fake_bindings

    from cptransport_nvshmem_runtime import runtime

    def fail(*_: Any) -> None:
        raise fake_bindings.NVSHMEMError(7)

    if ranks.rank == 1:
        fake_bindings.hostlib_init_attr = fail
    start = time.monotonic()
    with pytest.raises(TransportError):
        ranks.create()
    assert runtime._process.conflict((0, 1)).startswith("NVSHMEM ")
    return time.monotonic() - start


def test_a_rank_that_fails_inside_nvshmem_calls_its_peers_back(run: Any) -> None:
    """Before their own limit, which is 30 s."""
    assert max(run(_fails_inside)) < 15


def _leads_once(ranks: Ranks) -> None:
    """Rank 1 is the first PE of its own group, then the second one of all, and starts once more."""
    alone = [dist.new_group([rank]) for rank in range(2)]
    for group in (alone[ranks.rank], None, None):
        ranks.create(group).close()


def test_a_process_may_lead_in_one_start_and_not_in_the_next(run: Any) -> None:
    run(_leads_once)


class _Control:
    """Of rank 0; ``check`` raises what it was given."""

    rank, timeout_s = 0, 0.0

    def __init__(self, error: PeerFailedError | None = None) -> None:
        self._error = error

    def check(self) -> None:
        if self._error is not None:
            raise self._error


@pytest.fixture
def meet(heaps: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import host_cuda

    from cptransport_nvshmem_runtime import meeting

    monkeypatch.setattr(meeting, "torch", host_cuda._Torch(host_cuda.Cuda()))

    def meet(call: Any, control: Any, limit_s: float) -> Any:
        monkeypatch.setattr(meeting, "AT_LEAST_S", limit_s)
        return meeting.meet(call, "call", control, torch.device("cpu"))

    return meet


def test_results_and_errors_come_back_from_a_thread_of_its_own(meet: Any) -> None:
    threads = {meet(threading.get_ident, _Control(), 5.0) for _ in range(2)}
    assert threading.get_ident() not in threads
    with pytest.raises(ZeroDivisionError):
        meet(lambda: 1 // 0, _Control(), 5.0)


def test_limits(meet: Any) -> None:
    never = threading.Event()
    try:
        with pytest.raises(TransportTimeoutError, match=r"NVSHMEM's call did not return") as caught:
            meet(never.wait, _Control(), 0.3)
        assert 0.3 <= caught.value.waited_s < 3
        failed = _Control(PeerFailedError("rank 1 failed: here", peer=1))
        start = time.monotonic()
        with pytest.raises(PeerFailedError, match="here"):
            meet(never.wait, failed, 60.0)
        assert time.monotonic() - start < 10
        # The peer may have come back from the very call, and failed later.
        assert meet(lambda: time.sleep(0.3), failed, 60.0) is None
    finally:
        never.set()
