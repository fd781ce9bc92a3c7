# SPDX-License-Identifier: Apache-2.0
"""Plans that travel to other processes, and what they cache under a caller's torch modes."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import torch

from cptransport import build_plan


def test_a_plan_of_another_process_is_the_same_key(tmp_path: Path) -> None:
    plan = build_plan([0, 5, 13], world_size=4, layout="zigzag")
    assert {copy.deepcopy(plan), plan} == {plan}
    hash(plan), plan.segments  # fill what plans cache
    (tmp_path / "plan").write_bytes(pickle.dumps(plan))
    program = """
import pickle, sys
from cptransport import build_plan
plan = pickle.load(open(sys.argv[1], "rb"))
print(len({plan, build_plan([0, 5, 13], world_size=4, layout="zigzag")}))
"""
    found = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "plan")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.stdout.strip() == "1", found.stderr


def test_cached_tensors_serve_autograd_after_inference_mode() -> None:
    plan = build_plan([0, 3, 11], world_size=2, layout="zigzag")
    with torch.inference_mode():
        view = plan.for_rank(0)
        assert view.index.numel() == view.num_tokens
    x = torch.randn(11, requires_grad=True)
    x[view.index].sum().backward()
    assert x.grad is not None
    assert view.cu_seqlens is not None
    assert not view.cu_seqlens.is_inference()


def test_cached_tensors_are_on_the_cpu_whatever_the_default_device() -> None:
    with torch.device("meta"):
        view = build_plan([0, 4, 15], world_size=2, layout="zigzag").for_rank(1)
        assert view.index.device.type == "cpu"
        assert view.cu_seqlens is not None
        assert view.cu_seqlens.device.type == "cpu"
