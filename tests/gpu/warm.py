# SPDX-License-Identifier: Apache-2.0
"""Compiles the kernels of all op calls side by side, so that ranks find them on disk.

Every rank of every later step would compile the same kernels, one after the other. Here a process
per call runs it once, forward and backward, with two ranks that are threads.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import rig
from specs import SPECS, why_not

WORKERS = 2 if rig.REHEARSAL else 8


def run(name: str) -> tuple[str, float, str]:
    """Run a call; return its name, the seconds it took, and what was wrong."""
    from cptransport.testing.op_cases import OpCase
    from cptransport.testing.op_rank import run_rank
    from cptransport.transports import threads

    case = OpCase.of(SPECS[name].with_(world_size=2, explicit=True))
    start = time.monotonic()
    try:
        if not rig.REHEARSAL:
            import torch

            torch.linalg.inv(torch.ones(1, 1, device="cuda"))  # not first in two threads at once
        device = "cpu" if rig.REHEARSAL else "cuda:0"
        threads.run(lambda transport: run_rank(transport, case), 2, 140.0, device=device)
    except Exception as error:
        return name, time.monotonic() - start, f"{type(error).__name__}: {error}"
    return name, time.monotonic() - start, ""


def main() -> int:
    """Run all calls that have an explicit forward and backward; return 1 if one failed."""
    names = [n for n, spec in SPECS.items() if spec.op in ("kda", "ssd") and why_not(n) is None]
    if not rig.REHEARSAL:
        names = [name for name in names if SPECS[name].engine != "torch"]
    failed = 0
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as executor:
        for name, seconds, problem in executor.map(run, names):
            print(
                f"{name}: {seconds:.1f} s {problem.splitlines()[0] if problem else ''}", flush=True
            )
            failed += bool(problem)
    print(f"compiled in {os.environ.get('TRITON_CACHE_DIR', 'the default cache')}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
