# SPDX-License-Identifier: Apache-2.0
"""``cptransport launch``: torchrun on this machine, if need be with all ranks on one GPU.

The exit code is the script's: that of the first rank that failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from typing import Any

from cptransport.launch import (
    MpsDaemon,
    MpsUnavailableError,
    RanksFailedError,
    banner,
    daemon_environment,
    run_ranks,
    sharing_environment,
)

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "launch",
        help="run a script on several ranks of this machine, by torchrun; several on one GPU too",
        description="Runs SCRIPT on N ranks of this machine with what torchrun gives them. With "
        "--share-gpu all ranks run on the first visible GPU: a private MPS daemon where one can be "
        "had, and what NCCL and NVSHMEM need to accept that. The exit code is the script's.",
    )
    parser.add_argument(
        "--nproc", type=_positive, required=True, metavar="N", help="how many ranks"
    )
    parser.add_argument(
        "--share-gpu", action="store_true", help="all ranks on the first visible GPU; for tests"
    )
    parser.add_argument(
        "-m", "--module", action="store_true", help="SCRIPT is the name of a module"
    )
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script"
    )


def run(args: argparse.Namespace) -> int:
    """Launch; returns the exit code of the script."""
    command = [*(["-m"] if args.module else []), args.script, *args.arguments]
    shared = args.share_gpu and args.nproc > 1
    with contextlib.ExitStack() as stack:
        settings: dict[str, str] = {}
        if args.nproc > 1 and not os.environ.get("OMP_NUM_THREADS"):
            settings["OMP_NUM_THREADS"] = "1"  # as torchrun does: ranks share the cores
        if shared:
            daemon = _daemon(stack)
            settings.update(sharing_environment(args.nproc, mps=daemon is not None))
            settings.update(daemon.environment if daemon else {})
            _say(f"{banner(args.nproc)} ({'with' if daemon else 'without'} MPS)")
        try:
            run_ranks(command, args.nproc, settings)
        except RanksFailedError as error:
            _say(str(error))
            return error.exit_code
    return 0


def _daemon(stack: contextlib.ExitStack) -> MpsDaemon | None:
    try:
        return stack.enter_context(MpsDaemon(daemon_environment()))
    except MpsUnavailableError as error:
        _say(f"no MPS, so the ranks take turns on the GPU, which is slower: {error}")
        return None


def _say(text: str) -> None:
    print(f"cptransport launch: {text}", file=sys.stderr, flush=True)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
