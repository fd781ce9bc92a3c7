# SPDX-License-Identifier: Apache-2.0
"""torchrun, as a library: the ranks of one machine, and how they ended."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["RanksFailedError", "run_ranks"]

_RANK = Path(__file__).with_name("rank.py")


class RanksFailedError(RuntimeError):
    """A rank failed, or a signal ended the run.

    Attributes:
        exit_code: of the first rank that failed; 128 and the signal's number where a signal did it.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def run_ranks(command: Sequence[str], ranks: int, settings: Mapping[str, str]) -> None:
    """Run a command on every rank, with what torchrun gives them, and wait until all have ended.

    When one fails the others are ended, and so they are by SIGTERM, SIGINT and SIGHUP.

    Args:
        command: arguments of the Python interpreter.
        ranks: how many processes.
        settings: environment variables on top; ``{rank}`` in a value stands for the rank.

    Raises:
        RanksFailedError: a rank failed, or a signal came.
    """
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="127.0.0.1",  # whatever this host's name resolves to
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
    )
    arguments = [str(_RANK), *(f"{name}={value}" for name, value in settings.items()), "--"]
    try:
        elastic_launch(config, sys.executable)(*arguments, sys.executable, "-u", *command)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise RanksFailedError(f"rank {rank} ended with {how}", _exit_code(code)) from None
    except SignalException as error:
        raise RanksFailedError(f"ended by {error.sigval.name}", 128 + int(error.sigval)) from None


def _exit_code(code: int) -> int:
    return code if code > 0 else 128 - code
