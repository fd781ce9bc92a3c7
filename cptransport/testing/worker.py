# SPDX-License-Identifier: Apache-2.0
"""A rank of a ``RankPool``; also runs one case by hand.

::

    python -m cptransport.testing.worker --case package.module:function --world-size 2 \
        --backend gloo --kwargs '{"rows": 3}'
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import pickle
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from cptransport.testing.ranks import Answer, Order, Ranks, load_case, run_case

__all__ = ["main", "serve"]


def serve(
    connection: Connection, rank: int, world_size: int, device: torch.device, rendezvous: str
) -> None:
    """Run orders of the pool until it hangs up.

    Args:
        connection: the pipe to the pool.
        rank: this rank.
        world_size: ranks of the pool.
        device: of its transports.
        rendezvous: path of a FileStore that all ranks of the pool share.
    """
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    store = dist.FileStore(rendezvous, world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=60),
    )
    connection.send_bytes(pickle.dumps(Answer()))
    while True:
        try:
            order: Order | None = pickle.loads(connection.recv_bytes())
        except EOFError:  # the pool's process died
            break
        if order is None:
            break
        connection.send_bytes(pickle.dumps(_run(order, store, rank, world_size, device)))
    dist.destroy_process_group()


def _run(order: Order, store: Any, rank: int, world_size: int, device: torch.device) -> Answer:
    try:
        fn = load_case(order.case)
        torch.manual_seed(order.number)
        ranks = Ranks(
            rank,
            world_size,
            order.backend,
            device,
            order.timeout_s,
            processes=True,
            store=dist.PrefixStore(f"case/{order.number}", store),
        )
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        answer = Answer(run_case(ranks, fn, order.kwargs, transport=order.transport))
        pickle.dumps(answer)  # a result that does not travel is the case's failure, not the rank's
    except BaseException:
        return Answer(failure=traceback.format_exc())
    return answer


def main(arguments: list[str] | None = None) -> int:
    """Serve a pool, or run one case on a pool of its own and print the results as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m cptransport.testing.worker", description=__doc__
    )
    parser.add_argument("--case", help="module:function or file.py:function")
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--kwargs", default="{}", help="the case's arguments as JSON")
    parser.add_argument("--timeout-s", type=float, default=60.0, help="watchdog of the case")
    parser.add_argument("--transport-timeout-s", type=float, default=20.0)
    parser.add_argument("--ranks-per-device", type=int, default=1)
    parser.add_argument("--raw", action="store_true", help="the case makes its own transports")
    parser.add_argument("--connection", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.connection is not None:
        connection: Connection = Connection(args.connection)
        serve(connection, args.rank, args.world_size, torch.device(args.device), args.rendezvous)
        return 0
    if not args.case:
        parser.error("--case is required")
    from cptransport.testing.pool import CaseError, RankPool

    with RankPool(args.backend, args.world_size, args.ranks_per_device) as pool:
        try:
            results = pool.run(
                args.case,
                timeout_s=args.timeout_s,
                transport_timeout_s=args.transport_timeout_s,
                transport=not args.raw,
                **json.loads(args.kwargs),
            )
        except CaseError as failure:
            sys.stderr.write(f"{failure}\n")
            return 1
    sys.stdout.write(json.dumps(results, default=str) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
