# SPDX-License-Identifier: Apache-2.0
"""Peers whose kernels Triton tunes: their candidates compile side by side, and a limit ends the tuning.

A peer is measured with the configurations that its own tuning picks. Left to itself that compiles
one candidate after the other, minutes for the hundred or more of a KDA step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

__all__ = ["TuningLimitError", "tuning"]


class TuningLimitError(Exception):
    """Tuning took longer than it was given."""


@contextmanager
def tuning(limit_s: float) -> Iterator[None]:
    """Let Triton's autotuner, inside the block, compile in parallel and end at a limit.

    Args:
        limit_s: of the whole block; looked at between two candidates.

    Raises:
        TuningLimitError: out of the kernel call that was to be tuned after it.
    """
    from triton.runtime.autotuner import Autotuner

    deadline = time.monotonic() + limit_s
    prune, bench = Autotuner.prune_configs, Autotuner._bench

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> Any:
        configs = prune(self, kwargs)
        # What it has on disk is not compiled again; a tuning that is on disk costs one look per candidate.
        if len(configs) > 1:
            _compile(self, configs, kwargs)
        return configs

    def timed(self: Any, *args: Any, **kwargs: Any) -> Any:
        if time.monotonic() > deadline:
            raise TuningLimitError(f"tuning its kernels took more than {limit_s:g} s")
        return bench(self, *args, **kwargs)

    Autotuner.prune_configs, Autotuner._bench = prune_configs, timed
    try:
        yield
    finally:
        Autotuner.prune_configs, Autotuner._bench = prune, bench


def _compile(tuner: Any, configs: Any, kwargs: dict[str, Any]) -> None:
    """Compile the candidates in threads; one that does not compile is met again when it is timed."""
    import triton

    mode: Callable[..., Any] | None = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        return
    with ThreadPoolExecutor(os.cpu_count()) as executor, mode(executor, ignore_errors=True):
        for config in configs:
            tuner.fn.run(**{**tuner.nargs, **kwargs, **config.all_kwargs(), "warmup": True})
