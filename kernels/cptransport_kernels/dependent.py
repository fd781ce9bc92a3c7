# SPDX-License-Identifier: Apache-2.0
"""Kernels that are launched while the one before them still runs (programmatic dependent launch).

Between two small kernels the launch of the second takes as long as its work. Here it takes place
while the first one runs: a kernel calls ``after_those_before`` before it touches memory, which
returns when all that its stream was given before is done and visible, and ``let_next_start`` when
the next one may occupy the device. Kernels that do neither, of whatever library, come in order all
the same.

From compute capability 9 and Triton 3.4 on; else, and in the interpreter, all of this is nothing.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from cptransport_kernels.launch import interpreted

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # Triton 3.3, which comes with torch 2.7, cannot launch kernels so
    gdc_launch_dependents = gdc_wait = None

__all__ = ["after_those_before", "launched_early", "let_next_start"]


@triton.jit
def after_those_before(EARLY: tl.constexpr):
    if EARLY:
        gdc_wait()


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()


@lru_cache
def launched_early(device: torch.device) -> dict[str, Any]:
    """Return the compile-time arguments of a kernel that does so on this device."""
    compiled = device.type == "cuda" and not interpreted() and gdc_wait is not None
    if not compiled or torch.cuda.get_device_capability(device) < (9, 0):
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
