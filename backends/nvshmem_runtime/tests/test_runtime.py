# SPDX-License-Identifier: Apache-2.0
"""NVSHMEM's life in a process, over the stand-ins: started once, shared, ended after the last use.

And never ended after a loss.
"""

from __future__ import annotations

import contextlib
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import cptransport_nvshmem_barrier
import cptransport_nvshmem_signal
from cptransport.errors import (
    BackendUnavailableError,
    PeerFailedError,
    TransportError,
    TransportTimeoutError,
)
from cptransport.testing import Ranks, pool
from cptransport.testing.contract_bytes import exchange_all
from cptransport.transport import PartSpec, Slot

_PART = PartSpec("x", (1000,), torch.float32)
_SLOT = Slot("used", (_PART,))


@pytest.fixture
def run(heaps: str) -> Any:
    """Run a case on two ranks; it makes its own transports.

    ``own`` gives it processes that no other test uses, since NVSHMEM is not what it was in them then.
    """

    def run(case: Any, backend: str = "SIGNAL", own: bool = False, **kwargs: Any) -> list[Any]:
        env = {"NVSHMEM_SYMMETRIC_SIZE": "16M", "FAKE_NVSHMEM_FOLDER": heaps}
        if own:
            env["TEST"] = case.__name__
        ranks = pool("fake_nvshmem:SIGNAL", 2, 1, device="cpu", env=env)
        ranks.backend = f"fake_nvshmem:{backend}"  # of this case
        return ranks.run(case, transport=False, timeout_s=60, transport_timeout_s=15, **kwargs)

    return run


@contextlib.contextmanager
def _set(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@contextlib.contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Count calls of NVSHMEM meanwhile."""
    import fake_bindings

    made: Counter[str] = Counter()
    start = len(fake_bindings.calls)
    yield made
    made.update(fake_bindings.calls[start:])


def _held() -> int:
    """Allocations that NVSHMEM has given and not got back."""
    import fake_bindings

    world = fake_bindings._world
    return len(world.used) if world is not None else 0


# --------------------------------------------------------------------------------------------- life


def _life(ranks: Ranks) -> list[dict[str, int]]:
    found = []
    for _ in range(2):  # init, use, close, init again in one process
        with _counted() as calls:
            first, second = ranks.create(), ranks.create()
            exchange_all(first, _SLOT, 1)
            first.close()
            exchange_all(second, _SLOT, 1)
            second.close()
        found.append(dict(calls))
    return found


def test_initialised_once_and_finalised_after_the_last_use(run: Any) -> None:
    for rank, rounds in enumerate(run(_life)):
        for calls in rounds:
            assert calls["hostlib_init_attr"] == calls["hostlib_finalize"] == 1
            assert calls.get("get_uniqueid", 0) == (rank == 0)
            assert calls["malloc"] == calls["free"] == 6  # each: board, first use, one slot


def _break(ranks: Ranks) -> None:
    """Rank 1 does not come: rank 0 runs into its deadline, rank 1 is told."""
    broken: Any = ranks.create(timeout_s=0.5)
    exchange_all(broken, _SLOT, 1)
    if ranks.rank == 0:
        with pytest.raises(TransportTimeoutError):
            _until_error(broken)
        ranks.tell("raised", "")
    else:
        ranks.ask("raised")
        with pytest.raises(PeerFailedError):
            _until_error(broken)
    broken.close()


def _until_error(transport: Any) -> None:
    transport.barrier()
    transport.check()


def _after_a_break(ranks: Ranks) -> list[Any]:
    with _counted() as calls:
        _break(ranks)
    broke = dict(calls), _held()
    with _counted() as calls:
        transport = ranks.create()  # NVSHMEM still runs, and nobody is dead
        left = _held()
        exchange_all(transport, _SLOT, 1)
        transport.close()
    return [broke, (dict(calls), left, _held())]


def test_after_a_break_nothing_is_freed_until_all_ranks_meet_again(run: Any) -> None:
    for (calls, held), (calls_then, left, held_then) in run(_after_a_break, own=True):
        assert "free" not in calls
        assert "hostlib_finalize" not in calls
        assert held == 3
        assert calls_then.get("hostlib_init_attr", 0) == 0
        assert left == 2  # its own board and first use: what the broken one had left is freed
        assert held_then == 0
        assert calls_then["hostlib_finalize"] == 1


# ------------------------------------------------------------------------------------------- memory


def _small_heap(ranks: Ranks, size: str) -> str:
    with (
        _set(NVSHMEM_SYMMETRIC_SIZE=size),
        _counted() as calls,
        pytest.raises(BackendUnavailableError) as caught,
    ):
        ranks.create()
    assert calls["hostlib_finalize"] == calls["hostlib_init_attr"]
    return str(caught.value)


def test_a_heap_too_small_to_start_is_said_on_all_ranks(run: Any) -> None:
    first, second = run(_small_heap, size="64k")
    assert first == second
    assert "cannot hold 131072 more bytes" in first
    assert "NVSHMEM_SYMMETRIC_SIZE (64k)" in first
    assert "ranks [0, 1]" in first


def _too_large(ranks: Ranks) -> str:
    transport = ranks.create()
    exchange_all(transport, _SLOT, 1)
    large = Slot("used", (PartSpec("x", (8 << 20,), torch.uint8),))
    with pytest.raises(TransportError, match="NVSHMEM_SYMMETRIC_SIZE") as caught:
        transport.stage(large)
    assert type(caught.value) is TransportError
    exchange_all(transport, _SLOT, 2)
    transport.close()
    return str(caught.value)


def test_a_slot_too_large_is_refused_and_the_transport_stays_usable(run: Any) -> None:
    first, second = run(_too_large)
    assert first == second
    assert f"cannot hold {4 * (8 << 20)} more bytes" in first


def _apart(ranks: Ranks) -> str:
    with (
        _set(FAKE_NVSHMEM_APART="1"),
        _counted() as calls,
        pytest.raises(BackendUnavailableError) as caught,
    ):
        ranks.create()
    assert calls["malloc"] == calls["free"] == 1
    assert calls["hostlib_finalize"] == 1
    return str(caught.value)


def test_peers_that_are_not_addressable_are_refused_on_all_ranks(run: Any) -> None:
    first, second = run(_apart)
    assert first == second
    assert "the memory of ranks [1] is not addressable from rank 0" in first


# --------------------------------------------------------------------------------- who started NVSHMEM


def _start_here(ranks: Ranks, pe: int, pes: int, key: str) -> None:
    """Initialise NVSHMEM as another library of the process would."""
    import fake_bindings as library

    identity = library.uniqueid()
    if pe == 0:
        library.get_uniqueid(identity.ptr)
        ranks.tell(key, identity._data.tobytes().hex())
    raw = bytes.fromhex(ranks.ask(key))
    torch.frombuffer(identity._data, dtype=torch.uint8).copy_(torch.tensor(list(raw)))
    attributes = library.InitAttr()
    library.set_attr_uniqueid_args(pe, pes, identity.ptr, attributes.ptr)
    library.hostlib_init_attr(library.Flags.INIT_WITH_UNIQUEID, attributes.ptr)


def _others_pes(ranks: Ranks) -> dict[str, int]:
    import fake_bindings as library

    _start_here(ranks, 1 - ranks.rank, 2, "id")
    with _counted() as calls:
        transport = ranks.create()
        for generation in range(1, 5):
            exchange_all(transport, _SLOT, generation)
        transport.close()
    assert library.my_pe() == 1 - ranks.rank
    library.hostlib_finalize()
    return dict(calls)


def test_what_another_library_started_is_shared_whatever_the_order_of_its_pes(run: Any) -> None:
    for calls in run(_others_pes, own=True):
        assert "hostlib_init_attr" not in calls
        assert "hostlib_finalize" not in calls


def _other_world(ranks: Ranks) -> str:
    import fake_bindings as library

    _start_here(ranks, 0, 1, f"id/{ranks.rank}")  # each rank is a world of its own
    with pytest.raises(BackendUnavailableError) as caught:
        ranks.create()
    library.hostlib_finalize()
    return str(caught.value)


def test_what_another_library_started_for_others_is_refused(run: Any) -> None:
    first, second = run(_other_world)
    assert first == second
    assert "rank 0: NVSHMEM was initialised before, with 1 PEs; the group has 2 ranks" in first


def _on_one_rank(ranks: Ranks) -> str:
    import fake_bindings as library

    _start_here(ranks, ranks.rank, 2, "id")
    status = library.init_status
    if ranks.rank == 1:
        library.init_status = lambda: library.Init_status.STATUS_NOT_INITIALIZED
    try:
        with pytest.raises(BackendUnavailableError) as caught:
            ranks.create()
    finally:
        library.init_status = status
    library.hostlib_finalize()
    return str(caught.value)


def test_what_only_some_ranks_have_started_is_refused(run: Any) -> None:
    first, second = run(_on_one_rank)
    assert first == second
    assert "on ranks [0] alone" in first


def _limited(ranks: Ranks) -> list[str]:
    with _set(FAKE_NVSHMEM_STATUS="3"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        transport = ranks.create()
        exchange_all(transport, _SLOT, 1)
        transport.close()
    return [str(each.message) for each in said if "MPS" in str(each.message)]


def test_ranks_that_share_a_gpu_without_mps_are_warned(run: Any) -> None:
    first, second = run(_limited)
    assert len(first) == 1
    assert "without MPS" in first[0]
    assert not second


def _does_not_start(ranks: Ranks) -> list[str]:
    said = []
    with _set(FAKE_NVSHMEM_NO_HEAP="1"):
        for _ in range(2):
            with pytest.raises(BackendUnavailableError) as caught:
                ranks.create()
            said.append(str(caught.value))
    return said


def test_a_start_that_fails_on_one_rank_is_refused_on_all_and_not_tried_again(run: Any) -> None:
    first, second = run(_does_not_start, own=True)
    assert first == second
    assert "rank 1: NVSHMEM does not start; NVSHMEM_DEBUG=INFO says why" in first[0]
    assert "NVSHMEM failed to start earlier in this process" in first[1]


# ---------------------------------------------------------------------------------------- transports


def _one_part(ranks: Ranks) -> list[int]:
    """Rank 1 looks at the state alone, of which two of three rows come."""
    transport: Any = ranks.create()
    rows = frozenset({(0, 1, 0), (0, 1, 2)})
    state = PartSpec("state", (3, 8), torch.float32, rows)
    transition = PartSpec("transition", (64, 64), torch.float32, frozenset({(0, 1)}))
    slot = Slot("summary", (state, transition))
    copied = []
    fetch = transport._signals.fetch

    def counting(*args: Any, **kwargs: Any) -> None:
        copied.append(args[4].numel())
        fetch(*args, **kwargs)

    transport.stage(slot)["state"].fill_(7.0)
    if ranks.rank == 0 or not transport.capabilities.pairwise:
        transport.publish(slot)
    if ranks.rank == 1:
        transport._signals.fetch = counting
        try:
            gathered = transport.gather(slot)
            assert not copied  # in place
            assert gathered.tensor("state", 0)[[0, 2]].eq(7.0).all()
            assert len(gathered["transition"]) == 2
        finally:
            transport._signals.fetch = fetch
    transport.barrier()
    transport.close()
    return copied


@pytest.mark.parametrize("backend", ["SIGNAL", "BARRIER"])
def test_only_what_is_looked_at_is_copied(run: Any, backend: str) -> None:
    assert run(_one_part, backend) == [[], [32, 32]]


def _slow_reader(ranks: Ranks, buffers: int) -> int:
    """Rank 1 looks a while after the barrier; rank 0 writes its next generation at once."""
    import cptransport.onesided as module

    transport = ranks.create()
    slot = Slot("held", (PartSpec("x", (64,), torch.int64, frozenset({(0, 1)})),))
    depth, module._DEPTH = module._DEPTH, buffers
    wrong = 0
    try:
        for number in range(1, 5):
            transport.stage(slot)["x"].fill_(number)
            transport.publish(slot)
            if ranks.rank == 1:
                time.sleep(0.1)
                wrong += int(transport.fetch(slot, "x", source=0).ne(number).any())
        transport.barrier()
    finally:
        module._DEPTH = depth
    return wrong


def test_one_barrier_is_enough_with_two_buffers_and_not_with_one(run: Any) -> None:
    assert run(_slow_reader, "BARRIER", buffers=2)[1] == 0
    assert run(_slow_reader, "BARRIER", buffers=1)[1] > 0


def _left_out(ranks: Ranks) -> str:
    """Rank 1 leaves out a backward that nobody waits for, and takes part in the next forward."""
    transport: Any = ranks.create()
    part = PartSpec("x", (4,), torch.float32, frozenset({(0, 1)}))
    forward, backward = Slot("forward", (part,)), Slot("backward", (part,))

    def train() -> None:
        for number, name in enumerate(("forward", "backward") * 2 + ("forward",)):
            if number == 3 and ranks.rank == 1:
                continue
            slot = forward if name == "forward" else backward
            transport.control.begin_step()
            transport.stage(slot)
            if ranks.rank == 0:
                transport.publish(slot)
            elif name == "forward":
                transport.fetch(slot, "x", source=0)
        transport.barrier()
        transport.check()

    with pytest.raises(TransportError) as caught:
        train()
    transport.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def test_a_backward_that_a_rank_left_out_is_told(run: Any) -> None:
    told, found = run(_left_out, own=True)
    assert "slot 'forward', generation 3: rank 0 published it in another op step" in found
    assert "some rank left a forward or a backward out" in found
    assert told.startswith("PeerFailedError: rank 1 failed")
    assert found in told.replace("rank 1 failed: ", "")


# ------------------------------------------------------------------------------------------- advice


@pytest.mark.parametrize(
    ("package", "connections"),
    [(cptransport_nvshmem_signal, "1"), (cptransport_nvshmem_barrier, "2")],
)
def test_advice(package: Any, connections: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the environment lacks, and nothing when it lacks nothing."""
    for name in list(os.environ):
        if name.startswith(("NVSHMEM_", "CUDA_", "CPTRANSPORT_")):
            monkeypatch.delenv(name)

    def lines() -> list[str]:
        return [line.split(":")[0] for line in package.BACKEND.advice(torch.device("cuda"))]

    vmm = "set NVSHMEM_DISABLE_CUDA_VMM=1"
    assert lines() == [vmm, f"set CUDA_DEVICE_MAX_CONNECTIONS={connections}"]
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    assert lines() == [vmm]
    monkeypatch.setenv("NVSHMEM_DISABLE_CUDA_VMM", "1")
    assert lines() == []
    monkeypatch.setenv("CPTRANSPORT_RANKS_PER_DEVICE", "1")
    assert lines() == []
    monkeypatch.setenv("CPTRANSPORT_RANKS_PER_DEVICE", "4")
    assert lines() == ["set NVSHMEM_DISABLE_NVLS=1", "start MPS"]
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    assert lines() == ["set CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"]
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "30")
    assert lines() == ["set CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25"]
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25")
    assert lines() == []
