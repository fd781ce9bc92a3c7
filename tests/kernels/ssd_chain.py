# SPDX-License-Identifier: Apache-2.0
"""The Triton engine of SSD, driven rank by rank with the tools of the engines' tests."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cptransport.engines import LocalSegment, Need, OutputGrads, SSDInputs, SSDOptions
from cptransport.engines.triton import SSD_ENGINE
from cptransport.testing.numerics import relative_rms

__all__ = ["Rank", "check", "lab", "mixed", "rms_errors"]

_path = Path(__file__).parents[1] / "engines" / "conftest.py"
_spec = spec_from_file_location("cptransport_engine_lab", _path)
assert _spec is not None
assert _spec.loader is not None
_module = module_from_spec(_spec)
sys.modules[_spec.name] = _module
_spec.loader.exec_module(_module)

#: ``tests/engines``: cases, a chain of ranks, the recurrence in float64.
lab = _module.Lab()

_WIDE = ("dt", "A", "D", "dt_bias")


def mixed(case: Any, dtype: torch.dtype, device: str) -> Any:
    """Return the case with x, B, C, z and dy in ``dtype``, the rest in float32."""
    rounded = case.to(dtype, device)
    wide = case.to(torch.float32, device)
    inputs = {n: wide.inputs[n] if n in _WIDE else x for n, x in rounded.inputs.items()}
    return replace(rounded, inputs=inputs)


def check(case: Any, *zero: str, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Run all ranks and compare everything with the recurrence; return the results.

    What ``zero`` names must be exactly zero in both.
    """
    case = mixed(case, dtype, device)
    actual = lab.chain(SSD_ENGINE, case).run()
    for name, value in actual.items().items():
        assert value.isfinite().all(), name
    lab.compare(actual, lab.reference(case), dtype, *zero)
    return actual


def rms_errors(actual: Any, expected: Any) -> dict[str, float]:
    """Return the relative root mean squares of all differences."""
    wanted = expected.items()
    return {name: relative_rms(value, wanted[name]) for name, value in actual.items().items()}


class Rank:
    """One rank with random inputs and random summaries of its peers.

    Args:
        segments: of the rank.
        tokens: local rows.
        groups, heads, headdim, dstate: sizes.
        dtype: of x, B, C, z.
        poison: rows that hold NaN.
        tokenwise: replaces inputs by name.
    """

    def __init__(
        self,
        segments: list[LocalSegment],
        tokens: int,
        *,
        groups: int = 1,
        heads: int = 2,
        headdim: int = 5,
        dstate: int = 6,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        gated: bool = False,
        poison: list[int] | None = None,
        tokenwise: dict[str, Tensor] | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(1)

        def normal(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, kind)

        x = {
            "x": normal(1, tokens, heads, headdim, kind=dtype),
            "dt": normal(1, tokens, heads),
            "A": -normal(heads).exp(),
            "B": normal(1, tokens, groups, dstate, kind=dtype),
            "C": normal(1, tokens, groups, dstate, kind=dtype),
            "D": normal(heads),
            "z": normal(1, tokens, heads, headdim, kind=dtype) if gated else None,
            "dt_bias": normal(heads),
        }
        self.dy = normal(1, tokens, heads, headdim, kind=dtype)
        x.update(tokenwise or {})
        for name in ("x", "dt", "B", "C", "z"):
            if poison and x[name] is not None:
                x[name][:, poison] = math.nan
        if poison:
            self.dy[:, poison] = math.nan
        # What is prepared for segments is found again by this list.
        self.segments = list(segments)
        self.table = normal(len(segments), heads, headdim, dstate)
        self.out = {
            "state": torch.empty_like(self.table),
            "transition": torch.empty(len(segments), heads, device=device),
        }
        self.inputs = SSDInputs(**x, seed=None, options=SSDOptions(64, dt_softplus=True))

    def forward(self, need: Need, incoming: Any = None) -> Any:
        """Run the forward; ``incoming`` replaces the table of states that enter."""
        needs = [need] * len(self.segments)
        local = SSD_ENGINE.forward_local(self.inputs, self.segments, needs, self.out)
        return SSD_ENGINE.forward_finish(local, incoming or (lambda: self.table))

    def backward(self, finished: Any, need: Need, incoming: Any = None) -> Any:
        """Run the backward of a forward."""
        needs = [need] * len(self.segments)
        grad = OutputGrads(self.dy, None)
        local = SSD_ENGINE.backward_local(finished.saved, grad, needs, self.out)
        return SSD_ENGINE.backward_finish(local, incoming or (lambda: self.table))
