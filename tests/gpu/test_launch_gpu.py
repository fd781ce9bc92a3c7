# SPDX-License-Identifier: Apache-2.0
"""``cptransport launch --share-gpu`` on a GPU: strict choice by variables, an exchange, no daemon left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

SCRIPT = """
import os
import torch
import torch.distributed as dist
import cptransport as cpt

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("cpu:gloo,cuda:nccl")
slot = cpt.Slot("values", (cpt.PartSpec("value", (1000,), torch.float32),))
with cpt.create_transport() as transport:
    assert transport.selection.source == "environment"
    for generation in range(5):
        transport.stage(slot)["value"].fill_(10 * generation + transport.rank)
        transport.publish(slot)
        gathered = transport.gather(slot)
        for rank in range(transport.world_size):
            assert gathered.tensor("value", rank).unique().tolist() == [10.0 * generation + rank]
    print(f"rank {transport.rank} had {transport.name}", flush=True)
dist.destroy_process_group()
"""


def daemons() -> set[str]:
    found = set()
    for comm in Path("/proc").glob("[0-9]*/comm"):
        try:
            if comm.read_text().startswith("nvidia-cuda-mps"):
                found.add(comm.parent.name)
        except OSError:
            continue
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", ["nccl", "cupy_ipc"])
def test_ranks_share_the_gpu(backend: str, ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.update(CULA_CP_COMM_BACKEND=backend, CULA_CP_STRICT="1", CULA_CP_TIMEOUT_S="30")
    before = daemons()
    command = [sys.executable, "-m", "cptransport", "launch", "--nproc", str(ranks), "--share-gpu"]
    done = subprocess.run(
        [*command, str(script)], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [f"rank {r} had {backend}" for r in range(ranks)]
    assert f"{ranks} ranks share one GPU" in done.stderr
    assert daemons() <= before
