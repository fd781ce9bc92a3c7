# SPDX-License-Identifier: Apache-2.0
"""CUDA IPC memory and the refusals of ``cupy_ipc``, over stand-ins; the contract suite runs on a GPU, in ``tests/gpu``.

What ``OneSidedTransport`` makes of the memory is tested in ``backends/nvshmem_runtime/tests``.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cptransport.errors import BackendUnavailableError, TransportError
from cptransport.testing import Ranks, pool
from cptransport.testing.contract_bytes import exchange_all
from cptransport.transport import PartSpec, Slot

_SLOT = Slot("used", (PartSpec("x", (1000,), torch.float32),))


@pytest.fixture
def run(device_memory: str) -> Any:
    """Run a case on three ranks; it makes its own transports."""

    def run(case: Any, **kwargs: Any) -> list[Any]:
        ranks = pool(
            "fake_cupy:BACKEND", 3, 1, device="cpu", env={"FAKE_CUPY_FOLDER": device_memory}
        )
        return ranks.run(case, transport=False, timeout_s=60, transport_timeout_s=15, **kwargs)

    return run


@contextlib.contextmanager
def _set(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _held() -> tuple[int, int]:
    """Driver allocations of this process, and those of others that it maps."""
    import fake_cupy

    return len(fake_cupy._own), len(fake_cupy._opened)


def _life(ranks: Ranks) -> list[Any]:
    import fake_cupy

    start = len(fake_cupy.calls)
    first, second = ranks.create(), ranks.create()
    for generation in range(1, 101):
        exchange_all(first, _SLOT, generation)
        exchange_all(second, _SLOT, generation)
    held = _held()
    first.close()
    exchange_all(second, _SLOT, 101)
    second.close()
    return [Counter(fake_cupy.calls[start:]), held, _held()]


def test_regions_share_allocations_and_everything_is_given_back(run: Any) -> None:
    """Offsets travel with handles: four regions of 2 MiB lie in one allocation of the driver."""
    for calls, held, held_then in run(_life):
        assert calls["malloc"] == calls["free"] == calls["ipcGetMemHandle"] == 6
        assert calls["ipcOpenMemHandle"] == calls["ipcCloseMemHandle"]
        assert calls["ipcOpenMemHandle"] <= 2 * 4  # per transport, peer and allocation
        assert held == (2, 4)
        assert held_then == (0, 0)


def _large(ranks: Ranks) -> int:
    transport = ranks.create()
    for generation, size in enumerate((10, 3 << 20, 10, 5 << 20), 1):
        slot = Slot("grows", (PartSpec("x", (size,), torch.uint8),))
        exchange_all(transport, slot, generation)
    transport.close()
    return sum(_held())


def test_slots_that_grow_leave_nothing_behind(run: Any) -> None:
    assert run(_large) == [0, 0, 0]


def _refused(ranks: Ranks, everywhere: dict[str, str], on_rank_2: dict[str, str]) -> list[Any]:
    variables = {**everywhere, **(on_rank_2 if ranks.rank == 2 else {})}
    with _set(variables), pytest.raises(BackendUnavailableError) as caught:
        ranks.create()
    held = _held()
    with ranks.create() as transport:  # type: ignore[attr-defined]
        exchange_all(transport, _SLOT, 1)
    return [str(caught.value), held]


@pytest.mark.parametrize(
    ("everywhere", "on_rank_2", "words"),
    [
        ({}, {"FAKE_CUPY_HOST": "there"}, "within one host; the ranks are on 2"),
        ({}, {"FAKE_CUPY_GPUS": "3"}, "the GPU of rank 2 is hidden from this process"),
        ({"FAKE_CUPY_GPUS": "3", "FAKE_CUPY_NO_ACCESS": "1"}, {}, "no peer access from"),
        (
            {},
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"},
            "rank 2: CUDA IPC is not served beside torch's expandable segments",
        ),
        ({"FAKE_CUPY_FAILS": "malloc:1"}, {}, "on rank 1: 2097152 bytes: cudaErrorUnknown"),
        ({"FAKE_CUPY_FAILS": "ipcGetMemHandle:0"}, {}, "on rank 0: 2097152 bytes"),
        ({"FAKE_CUPY_FAILS": "ipcOpenMemHandle:2"}, {}, "on rank 2: cannot map memory of rank 0"),
    ],
    ids=["hosts", "hidden", "access", "expandable", "malloc", "handle", "open"],
)
def test_refusals_are_alike_on_all_ranks_and_leave_nothing(
    run: Any, everywhere: dict[str, str], on_rank_2: dict[str, str], words: str
) -> None:
    said = run(_refused, everywhere=everywhere, on_rank_2=on_rank_2)
    assert len({text for text, _ in said}) == 1
    assert words in said[0][0]
    assert [tuple(held) for _, held in said] == [(0, 0)] * 3


def _no_memory_later(ranks: Ranks) -> str:
    transport = ranks.create()
    exchange_all(transport, _SLOT, 1)
    large = Slot("used", (PartSpec("x", (3 << 20,), torch.uint8),))
    with _set({"FAKE_CUPY_FAILS": "malloc:1"}), pytest.raises(TransportError) as caught:
        transport.stage(large)
    exchange_all(transport, _SLOT, 2)
    exchange_all(transport, large, 3)
    transport.close()
    assert _held() == (0, 0)
    return str(caught.value)


def test_memory_that_is_short_when_a_slot_grows_breaks_nothing(run: Any) -> None:
    said = run(_no_memory_later)
    assert len(set(said)) == 1
    assert "on rank 1" in said[0]
