# SPDX-License-Identifier: Apache-2.0
"""Random exchanges with random delays and deaths, for as long as wanted; every payload is checked.

::

    python -m cptransport.testing.soak --minutes 20 --json docs/results/soak.json

An episode is one transport of 2 to 4 ranks. Rounds stage random slots with random routes, take what
comes in random order, pause at random, hand off along chains. In some episodes one rank ends
without a word at a random moment: its peers must raise in time, close and exit with 0. Everything
follows from the seed but the moment of a death.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from cptransport.errors import PeerFailedError, TransportTimeoutError
from cptransport.testing.contract_base import GRACE_S
from cptransport.testing.contract_routes import random_routed_slot
from cptransport.testing.oracle import assert_bytes, fill
from cptransport.testing.pool import CaseError, RankPool
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["main", "soak"]

SCHEMA = "cptransport.soak/1"
_EXIT = 23
_LIMIT_S = 15.0
_ENDLESS = 1 << 30
#: How often a rank sleeps for long.
_LONG_PAUSES = 0.01


def _episode(
    ranks: Ranks, seed: int, rounds: int, victim: int, long_pauses: float = _LONG_PAUSES
) -> dict[str, float]:
    """Exchange for so many rounds, or until the victim's death ends it; returns what was checked."""
    transport = ranks.create(timeout_s=_LIMIT_S)
    counts: Counter[str] = Counter()
    if ranks.rank == victim:
        delay = random.Random().uniform(0.0, 1.5)
        threading.Timer(delay, os._exit, [_EXIT]).start()
    ours = random.Random(seed)  # alike on all ranks
    mine = random.Random(seed * 64 + ranks.rank)
    numbers: Counter[str] = Counter()
    start = time.monotonic()
    try:
        for turn in range(rounds):
            start = time.monotonic()
            _round(transport, ours, mine, numbers, seed + turn, counts, long_pauses)
    except (PeerFailedError, TransportTimeoutError):
        if victim < 0:
            raise
        waited = time.monotonic() - start
        assert waited < _LIMIT_S + GRACE_S, f"survivor raised after {waited:.2f} s"
        begin = time.monotonic()
        transport.close()
        counts["survivors"] += 1
        return {
            **counts,
            "slowest_error_s": waited,
            "slowest_close_s": time.monotonic() - begin,
        }
    return dict(counts)


def _round(
    transport: BoundaryTransport,
    ours: random.Random,
    mine: random.Random,
    numbers: Counter[str],
    seed: int,
    counts: Counter[str],
    long_pauses: float,
) -> None:
    size, me = transport.world_size, transport.rank
    name = ours.choice(("a", "b", "c", "d"))
    kind = ours.choice(("routed", "routed", "plain", "chain", "barrier"))
    if kind == "barrier":
        transport.barrier()
        counts["barriers"] += 1
        return
    numbers[name] += 1
    number = numbers[name]
    if kind == "routed":
        slot = random_routed_slot(name, size, seed)
    elif kind == "plain":
        rows = ours.choice((0, 1, 7, 300, 20_000))
        slot = Slot(name, (PartSpec("p", (rows, 3), torch.float32),))
    else:
        chain = frozenset((r, r + 1) for r in range(size - 1))
        slot = Slot(name, (PartSpec("p", (ours.choice((1, 5000)),), torch.int64, chain),))
    fill(transport, slot, number)
    _pause(mine, long_pauses)
    if kind != "chain" or me == 0 or not transport.capabilities.pairwise:
        transport.publish(slot)
    wanted = [
        (part, source)
        for part in slot.parts
        for source in range(size)
        if part.rows(source, me) != ()
    ]
    mine.shuffle(wanted)
    for part, source in wanted:
        if part.routes is not None and mine.random() < 0.2:
            continue
        got = transport.fetch(slot, part.name, source=source)
        if mine.random() < 0.2:
            _pause(mine, long_pauses)
        rows_moved = part.rows(source, me)
        for row in (None,) if rows_moved is None else rows_moved:
            assert_bytes(got, part, rank=source, slot=name, generation=number, row=row)
        counts["payloads"] += 1
        counts["bytes"] += part.moved_bytes(source, me)
    if kind == "chain" and me > 0 and transport.capabilities.pairwise:
        transport.publish(slot)
    counts["generations"] += 1


def _pause(chance: random.Random, long_pauses: float) -> None:
    draw = chance.random()
    if draw < long_pauses:
        time.sleep(chance.uniform(0.05, 0.2))
    elif draw < 0.2:
        time.sleep(chance.uniform(0.0, 0.004))


def soak(
    seconds: float,
    *,
    backends: Sequence[str] = ("gloo", "threads"),
    seed: int = 1,
    deaths: float = 0.3,
    processes: bool | None = None,
) -> dict[str, Any]:
    """Run episodes until the time is over.

    Args:
        seconds: how long; the last episode is finished.
        backends: taken in turn; deaths only where ranks are processes.
        seed: of the first episode.
        deaths: how often an episode has one.
        processes: as in ``RankPool``.

    Returns:
        The report: what was done, what was checked, every failure with its text.
    """
    totals: Counter[str] = Counter()
    worst = {"slowest_error_s": 0.0, "slowest_close_s": 0.0}
    failures: list[dict[str, Any]] = []
    chance = random.Random(seed)
    start = time.monotonic()
    pools: dict[tuple[str, int], RankPool] = {}
    while time.monotonic() - start < seconds:
        episode = totals["episodes"]
        backend = backends[episode % len(backends)]
        size = chance.randint(2, 4)
        ranks = pools.setdefault((backend, size), RankPool(backend, size, processes=processes))
        dies = ranks.processes and chance.random() < deaths
        victim = chance.randrange(size) if dies else -1
        totals["episodes"] += 1
        totals["deaths"] += dies
        try:
            results = ranks.run(
                _episode,
                transport=False,
                timeout_s=120.0,
                exits={victim: _EXIT} if dies else None,
                seed=seed + 1000 * episode,
                rounds=_ENDLESS if dies else chance.randint(20, 200),
                victim=victim,
            )
        except CaseError as error:
            failures.append(
                {"episode": episode, "backend": backend, "world_size": size, "text": str(error)}
            )
            continue
        for result in results:
            for key, value in (result or {}).items():
                if key in worst:
                    worst[key] = max(worst[key], value)
                else:
                    totals[key] += value
    for used in pools.values():
        used.close()
    return {
        "schema": SCHEMA,
        "backends": list(backends),
        "seed": seed,
        "seconds": round(time.monotonic() - start, 1),
        "wait_limit_s": _LIMIT_S,
        **{key: totals[key] for key in sorted(totals)},
        **{key: round(value, 3) for key, value in worst.items()},
        "lost_or_stale_payloads": sum(_is_payload(failure["text"]) for failure in failures),
        "failures": failures,
    }


def _is_payload(text: str) -> bool:
    """Whether a failure is one of the oracle's, not a wait or an exit code."""
    return "got the payload of" in text or "bytes differ" in text


def main(arguments: list[str] | None = None) -> int:
    """Run a soak from the command line; exit code 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m cptransport.testing.soak")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--backend", action="append", help="default: gloo and threads in turn")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the report goes")
    args = parser.parse_args(arguments)
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    report = {
        **soak(60 * args.minutes, backends=args.backend or ("gloo", "threads"), seed=args.seed),
        "started_utc": started,
        "command": ["python", "-m", "cptransport.testing.soak", *(arguments or sys.argv[1:])],
        "machine": {"platform": platform.platform(), "cpus": os.cpu_count()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    text = json.dumps(report, indent=2) + "\n"
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
