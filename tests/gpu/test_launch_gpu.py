# SPDX-License-Identifier: Apache-2.0
"""``cptransport launch --share-gpu`` on a GPU: strict choice by variables, an exchange, no daemon left."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import rig
import torch

from cptransport.bench.launch import advised_environment

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


def daemons(token: str) -> dict[str, str]:
    """Processes of MPS that inherited a variable with this value; a dead one that nobody has looked after is none."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            ours = token.encode() in (stat.parent / "environ").read_bytes()
            if name.startswith("nvidia-cuda-mps") and ours and rest.split()[0] != "Z":
                found[stat.parent.name] = f"{name} {rest[:40]}"
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("backend", rig.BACKENDS)
def test_ranks_share_the_gpu(backend: str, ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    env.update(CULA_CP_COMM_BACKEND=backend, CULA_CP_STRICT="1", CULA_CP_TIMEOUT_S="30")
    env.update(advised_environment(backend, torch.device("cuda")))
    token = env["CPTRANSPORT_TEST_TOKEN"] = uuid.uuid4().hex
    command = [sys.executable, "-m", "cptransport", "launch", "--nproc", str(ranks), "--share-gpu"]
    done = subprocess.run(
        [*command, str(script)], env=env, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank \d had \w+?(?=rank|\n)", done.stdout)  # lines may run together
    assert sorted(said) == [f"rank {rank} had {backend}" for rank in range(ranks)]
    assert f"{ranks} ranks share one GPU" in done.stderr
    assert not daemons(token)
