# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of these tests run, and the pools that serve them.

With a GPU per rank, ranks have one each; with fewer, all of them share the first one. With
``CPTRANSPORT_REHEARSE`` set the same tests run on the CPU, every backend played by gloo: a mistake
in a test is then found without a GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from cptransport.bench.launch import advised_environment
from cptransport.bench.machine import git_state, machine, software
from cptransport.launch import banner, sharing_environment
from cptransport.testing import CaseError, Ranks, close_pools
from cptransport.testing.pool import RankPool
from cptransport.transport import BoundaryTransport, Capabilities

REHEARSE = "CPTRANSPORT_REHEARSE"
RESULTS = "CPTRANSPORT_RESULTS"
COMMIT = "CPTRANSPORT_COMMIT"
#: Set: ``run_all.py`` wants no MPS daemon around the tests.
NO_MPS = "CPTRANSPORT_NO_MPS"
REHEARSAL = os.environ.get(REHEARSE) == "1"
DEVICE = "cpu" if REHEARSAL else "cuda"

#: The transports that are tested; the last one is the one without ``pairwise``.
BACKENDS = ("nccl", "cupy_ipc", "cudnn_summary", "nvshmem_signal", "nvshmem_barrier")
RANKS = (2, 4, 8) if torch.cuda.device_count() >= 8 else (2, 4)

#: A case that hangs must not use up the time of a leased GPU.
WATCHDOG_S = 60.0

_pools: dict[tuple[Any, ...], RankPool] = {}


def named(backend: str) -> str:
    """Return the backend that plays a backend."""
    return "gloo" if REHEARSAL else backend


def per_device(ranks: int) -> int:
    """Return how many ranks share a device."""
    return 1 if REHEARSAL or torch.cuda.device_count() >= ranks else ranks


def environment(backend: str, ranks: int) -> dict[str, str]:
    """Return what the ranks of a backend must have set."""
    if REHEARSAL:
        return {}
    needed = advised_environment(backend, torch.device(DEVICE))
    if per_device(ranks) > 1:
        needed.update(sharing_environment(ranks, mps="CUDA_MPS_PIPE_DIRECTORY" in os.environ))
    return needed


def serving(backend: str, ranks: int, *, playing: str | None = None, **extra: str) -> RankPool:
    """Return ranks for cases on a backend; backends that need the same environment share them.

    Args:
        backend: whose environment they have.
        ranks: how many.
        playing: whose transports the next cases make; None: the backend's.
        extra: further environment variables.
    """
    env = {**environment(backend, ranks), **extra}
    key = (ranks, *sorted(env.items()))
    if key not in _pools:
        # Ranks of another environment end first: shares of the GPU must not add up to more than all of it.
        end_ranks()
        _pools[key] = RankPool(named(backend), ranks, per_device(ranks), device=DEVICE, env=env)
    _pools[key].backend = named(playing or backend)
    return _pools[key]


def hold(pool: RankPool, wanted: bool) -> None:
    """Have ranks keep a transport of their own open between cases, or close it.

    NVSHMEM starts with a process's first transport and ends with its last one, seconds each where ranks
    have a GPU each; as long as one is open, tests of other subjects do not wait for that.

    Args:
        pool: of the ranks; those that it starts anew keep none.
        wanted: whether they shall.
    """
    if wanted != (_holding.get(pool) == pool.starts):
        pool.run(_open if wanted else _close, timeout_s=WATCHDOG_S, transport=False)
        _holding[pool] = pool.starts if wanted else -1


#: Pool -> the start whose ranks keep a transport. On such a rank: the transport.
_holding: dict[RankPool, int] = {}
_open_here: list[BoundaryTransport] = []


def _open(ranks: Ranks) -> None:
    made = ranks.create()
    ranks.forget(made)
    _open_here.append(made)


def _close(ranks: Ranks) -> None:
    while _open_here:
        _open_here.pop().close()


def capabilities(backend: str, ranks: int) -> Capabilities:
    """Return what a live transport claims."""
    if backend not in _claimed:
        found = serving(backend, ranks).run(_claim, timeout_s=WATCHDOG_S, transport=False)
        _claimed[backend] = found[0]
    return _claimed[backend]


_claimed: dict[str, Capabilities] = {}


def _claim(ranks: Ranks) -> Capabilities:
    return ranks.create().capabilities


def report(name: str, ranks: int, **figures: Any) -> None:
    """Write what a test measured to ``$CPTRANSPORT_RESULTS/NAME.json``, with the machine and the banner.

    Ranks that have a GPU each write to ``N-GPUs-NAME.json``: other figures than those that share one.
    """
    folder = os.environ.get(RESULTS)
    if not folder:
        return
    told = os.environ.get(COMMIT)
    gpus = 0 if REHEARSAL else (1 if per_device(ranks) > 1 else ranks)
    document = {
        "schema": f"cptransport.{name.partition('-')[0]}/1",
        "banner": banner(per_device(ranks)),
        "rehearsal": REHEARSAL,
        "git": {"commit": told, "dirty": None} if told else git_state(),
        "machine": machine(device=DEVICE, world_size=ranks, gpus_used=gpus),
        "software": software(),
        **figures,
    }
    apart = f"{gpus}-GPUs-" if gpus > 1 else ""
    path = Path(folder) / f"{apart}{name}.json"
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def end_ranks() -> None:
    """End all ranks."""
    while _pools:
        _, pool = _pools.popitem()
        with contextlib.suppress(CaseError):
            hold(pool, False)
        _holding.pop(pool, None)
        pool.close()
    close_pools()
