# SPDX-License-Identifier: Apache-2.0
"""Runs a function on the ranks of a backend: threads, a pool of processes, or the ranks of torchrun."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cptransport.errors import BackendUnavailableError
from cptransport.testing.pool import CaseError, close_pools, pool
from cptransport.testing.ranks import Ranks, run_case

__all__ = ["CaseError", "close_ranks", "on_ranks", "torchrun_world"]

_calls = itertools.count()


def torchrun_world() -> tuple[int, int] | None:
    """Return (rank, world size) of this process under torchrun, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def on_ranks(
    case: Callable[..., Any],
    *,
    backend: str,
    world_size: int,
    device: str,
    ranks_per_device: int = 1,
    timeout_s: float,
    **kwargs: Any,
) -> list[Any]:
    """Run ``case(ranks, **kwargs)`` on every rank and return the results by rank.

    Under torchrun the process is one of the ranks already; else ranks are threads (``threads``) or
    the processes of a shared pool, kept for the next call.

    Args:
        case: a function at the top of a module; makes its transport with ``ranks.create()``.
        backend: name of the backend, or ``module:ATTR``.
        world_size: ranks; under torchrun those of the launch.
        device: ``"cpu"`` or ``"cuda"``.
        ranks_per_device: with CUDA, how many ranks share a device.
        timeout_s: of the whole call; a wait of a transport ends after a quarter of it.
        kwargs: JSON values.

    Raises:
        CaseError: the case raised or did not end on some rank.
        BackendUnavailableError: ``"cuda"``, and torch sees no CUDA device.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailableError("torch sees no CUDA device")
    if torchrun_world() is not None and backend != "threads":
        return _in_place(case, backend, device, timeout_s / 4, kwargs)
    return pool(backend, world_size, ranks_per_device, device=device).run(
        case, timeout_s=timeout_s, transport_timeout_s=timeout_s / 4, transport=False, **kwargs
    )


def close_ranks() -> None:
    """End the pools, and leave the process group of torchrun."""
    close_pools()
    if torchrun_world() is not None and dist.is_initialized():
        dist.destroy_process_group()


def _in_place(
    case: Callable[..., Any], backend: str, device: str, timeout_s: float, kwargs: dict[str, Any]
) -> list[Any]:
    here = torch.device("cpu")
    if device == "cuda":
        here = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(here)
    if not dist.is_initialized():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", timeout=timedelta(seconds=600)
        )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    default = dist.distributed_c10d._get_default_store()
    store = dist.PrefixStore(f"cptransport.bench/{next(_calls)}", default)
    ranks = Ranks(rank, world_size, backend, here, timeout_s, processes=True, store=store)
    # By the store, not by a collective: a backend that broke must not take the results with it.
    mine = pickle.dumps(run_case(ranks, case, kwargs, transport=False))
    store.set(f"result/{rank}", mine.hex())
    results = (store.get(f"result/{peer}").decode() for peer in range(world_size))
    return [pickle.loads(bytes.fromhex(result)) for result in results]
