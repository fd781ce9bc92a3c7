# SPDX-License-Identifier: Apache-2.0
"""Runs a function on the ranks of a backend: threads, a pool of processes, or the ranks of torchrun."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cptransport import registry
from cptransport.errors import BackendUnavailableError, CPTransportError
from cptransport.launch import (
    MpsDaemon,
    MpsUnavailableError,
    daemon_environment,
    sharing_environment,
)
from cptransport.testing.pool import CaseError, close_pools, pool
from cptransport.testing.ranks import Ranks, run_case

__all__ = [
    "CaseError",
    "Placement",
    "advised_environment",
    "close_ranks",
    "last_words",
    "on_ranks",
    "placement",
    "shared_gpu",
    "torchrun_world",
]

_MPS = "CUDA_MPS_PIPE_DIRECTORY"
_calls = itertools.count()


def torchrun_world() -> tuple[int, int] | None:
    """Return (rank, world size) of this process under torchrun, else None."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@dataclass(frozen=True)
class Placement:
    """How many ranks run, and on what.

    Attributes:
        world_size: ranks. per_device: how many share a GPU. gpus_used: by all of them.
    """

    world_size: int
    per_device: int
    gpus_used: int

    @property
    def shared(self) -> bool:
        """Whether all ranks are on one GPU."""
        return self.gpus_used > 0 and self.per_device > 1


def placement(args: argparse.Namespace, world_size: int | None = None) -> Placement:
    """Return where the ranks of a bench go.

    Args:
        args: with ``device``, ``world_size`` and ``ranks_per_device``.
        world_size: default of ``args.world_size``; None: 4, with 2 or 3 GPUs one each.

    Raises:
        ValueError: ranks would share several GPUs.
    """
    gpus = torch.cuda.device_count() if args.device == "cuda" else 0
    launched = torchrun_world()
    ranks = args.world_size or world_size or (gpus if gpus in (2, 3) else 4)
    if launched is not None:
        ranks = launched[1]
    if gpus == 0:
        return Placement(ranks, 1, 0)
    per_device = args.ranks_per_device or (1 if gpus >= ranks else ranks)
    if per_device not in (1, ranks):
        raise ValueError(
            f"--ranks-per-device must be 1 or all {ranks} ranks, got {per_device}: ranks share one "
            "GPU or none"
        )
    return Placement(ranks, per_device, 1 if per_device > 1 else ranks)


@contextlib.contextmanager
def shared_gpu(where: Placement) -> Iterator[None]:
    """Have a private MPS daemon in the block if ranks share a GPU and nobody has started one."""
    if not where.shared or _MPS in os.environ or torchrun_world() is not None:
        yield
        return
    try:
        daemon = MpsDaemon(daemon_environment())
    except MpsUnavailableError as error:
        warnings.warn(f"no MPS, ranks take turns on the GPU: {error}", stacklevel=3)
        yield
        return
    with daemon:
        os.environ.update(daemon.environment)
        try:
            yield
        finally:
            close_pools()
            for name in daemon.environment:
                del os.environ[name]


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
    env = advised_environment(backend, torch.device(device))
    if device == "cuda" and ranks_per_device > 1:
        env.update(sharing_environment(ranks_per_device, mps=_MPS in os.environ))
    return pool(backend, world_size, ranks_per_device, device=device, env=env).run(
        case, timeout_s=timeout_s, transport_timeout_s=timeout_s / 4, transport=False, **kwargs
    )


def advised_environment(backend: str, device: torch.device) -> dict[str, str]:
    """Return what a backend advises to set for its ranks; nothing from one that cannot be loaded."""
    try:
        advice = registry.load_backend(backend).spec.advice
    except CPTransportError:
        return {}
    lines = advice(device) if advice is not None else []
    found = (re.match(r"set ([A-Z][A-Z0-9_]*)=([^\s:;,]+)", line) for line in lines)
    return {line[1]: line[2] for line in found if line is not None}


def last_words(error: CaseError, world_size: int) -> list[str | None]:
    """Return the last line of every rank's failure, by rank; the whole story goes to stderr."""
    print(error, file=sys.stderr, flush=True)
    failures = [error.failures.get(rank, "").strip() for rank in range(world_size)]
    return [text.splitlines()[-1].strip() if text else None for text in failures]


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
