# SPDX-License-Identifier: Apache-2.0
"""The torch engine on CUDA: the same numbers, and never a host synchronisation."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import pytest
import torch

from cptransport.plan import build_plan

pytestmark = pytest.mark.gpu


@contextmanager
def no_synchronisation():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def reduced_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cuda", torch.bfloat16):
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_cuda_equals_the_recurrence_without_synchronising(lab, engines, op, seed):
    case = lab.random_case(op, seed)
    expected = lab.reference(case)
    for dtype in (torch.float64, torch.float32):
        chain = lab.chain(lab.within(engines[op], no_synchronisation), case.to(dtype, "cuda"))
        lab.compare(chain.run(), expected, dtype)


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_tf32_does_not_enter(lab, engines, op):
    case = lab.make_case(op, build_plan([0, 200], world_size=3), heads=(4, 4), dims=(64, 64))
    engine = lab.within(engines[op], reduced_precision)
    result = lab.chain(engine, case.to(torch.float32, "cuda")).run()
    lab.compare(result, lab.reference(case), torch.float32)
