# SPDX-License-Identifier: Apache-2.0
"""The kernels of SSD with their compile-time arguments, by configuration, sizes and options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from cptransport_kernels.launch import Bound, bind, interpreted
from cptransport_kernels.ssd_chunk_backward import (
    ssd_pair_grads_kernel,
    ssd_read_grads_kernel,
    ssd_sum_grads_kernel,
    ssd_write_grads_kernel,
)
from cptransport_kernels.ssd_configs import Run, SSDConfig
from cptransport_kernels.ssd_output import ssd_output_kernel, ssd_scores_kernel
from cptransport_kernels.ssd_states import (
    ssd_chunk_states_kernel,
    ssd_join_kernel,
    ssd_summary_kernel,
)

__all__ = ["ELEMENTS", "GradientKernels", "SSDKernels", "SSDSteps", "ssd_kernels"]

#: Elements of a state that one program of the scan over pieces takes; of a sum of parts likewise.
ELEMENTS = 1024


@dataclass(frozen=True)
class SSDSteps:
    """How a step is made of dt; meanings as in the op's options."""

    softplus: bool
    low: float
    high: float


class GradientKernels(NamedTuple):
    """The kernels of gradients for one number of parts of sums over a group's heads."""

    pair_grads: Bound
    write_grads: Bound
    read_grads: Bound
    sum_grads: Bound


class SSDKernels:
    """What runs for one configuration.

    Args:
        config, steps: see there.
        headdim, dstate: P and N.
        skips: values of D per head; 0 without D.
        per_channel: whether D has one per channel.

    Attributes:
        blocks: of P, programs of a walk.
        sums: numbers that a chunk and head give to the gradients of parameters.
        summary, states: by whether segments are cut and whether the way is back.
        join: by whether the way is back. output: by whether segments are cut. scores: alike for all.
    """

    def __init__(
        self,
        config: SSDConfig,
        steps: SSDSteps,
        headdim: int,
        dstate: int,
        *,
        skips: int,
        per_channel: bool,
    ) -> None:
        self.config = config
        self.steps = steps
        self.blocks = -(-headdim // config.channels)
        self.sums = 2 + skips
        # The interpreter's products are exact, and it knows no other.
        row: dict[str, Any] = {
            "N": dstate,
            "BT": config.chunk,
            "BN": config.columns,
            "PREC": "ieee" if interpreted() else config.precision,
        }
        tile = {**row, "P": headdim, "BP": config.channels, "SOFTPLUS": steps.softplus}
        bf16 = config.dtype == torch.bfloat16
        ways = [(cut, reverse) for cut in (False, True) for reverse in (False, True)]
        self.summary = {
            (cut, reverse): _bind(
                ssd_summary_kernel, config.summary, CUT=cut, REVERSE=reverse, BF16=bf16, **tile
            )
            for cut, reverse in ways
        }
        self.states = {
            (cut, reverse): _bind(
                ssd_chunk_states_kernel, config.states, CUT=cut, REVERSE=reverse, **tile
            )
            for cut, reverse in ways
        }
        self.join = [
            _bind(ssd_join_kernel, _SUM, E=headdim * dstate, BE=ELEMENTS, REVERSE=reverse)
            for reverse in (False, True)
        ]
        self.scores = _bind(ssd_scores_kernel, config.scores, **row)
        self.output = [
            _bind(ssd_output_kernel, config.output, CUT=cut, CHANNEL_D=per_channel, **tile)
            for cut in (False, True)
        ]
        self._tile = {**tile, "CHANNEL_D": per_channel, "SUMS": self.sums}
        self._gradients: dict[int, GradientKernels] = {}

    def gradients(self, splits: int) -> GradientKernels:
        """Return the kernels of gradients when a group's heads go into ``splits`` programs."""
        found = self._gradients.get(splits)
        if found is None:
            config, tile = self.config, {**self._tile, "SPLITS": splits}
            found = self._gradients[splits] = GradientKernels(
                _bind(ssd_pair_grads_kernel, config.pair_grads, **tile),
                _bind(ssd_write_grads_kernel, config.write_grads, **tile),
                _bind(ssd_read_grads_kernel, config.read_grads, **tile),
                _bind(
                    ssd_sum_grads_kernel,
                    _SUM,
                    SUMS=self.sums,
                    BR=64,
                    BS=max(4, 1 << (self.sums - 1).bit_length()),
                    SPLITS=splits,
                    BE=ELEMENTS,
                ),
            )
        return found


_SUM = Run(4, 1)


@lru_cache(maxsize=256)
def ssd_kernels(
    config: SSDConfig, steps: SSDSteps, headdim: int, dstate: int, skips: int, per_channel: bool
) -> SSDKernels:
    """Return the kernels of these, the same object every time."""
    return SSDKernels(config, steps, headdim, dstate, skips=skips, per_channel=per_channel)


def _bind(kernel: Any, run: Run, **constants: Any) -> Bound:
    return bind(kernel, **constants, num_warps=run.warps, num_stages=run.stages)
