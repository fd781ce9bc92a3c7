# SPDX-License-Identifier: Apache-2.0
"""SSD (Mamba2) through the kernels of ``cptransport_kernels``.

The local half computes what a segment adds to the state, nothing else, so that its summary leaves
early. The other half computes scores of pairs of tokens while summaries travel, then all outputs in
one walk from the true states. The backward mirrors it. Long segments are cut into pieces that run
side by side. Beside inputs, only the states that enter pieces are kept for the backward, of which
there are as many as fill a GPU, whatever the length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cptransport_kernels.ssd as kernels
from cptransport.engines import (
    Finished,
    Grads,
    LocalSegment,
    Need,
    OpFacts,
    OutputGrads,
    Saved,
    SSDInputs,
    StateTable,
)
from cptransport.transport import PartSpec
from cptransport_kernels.launch import interpreted, processors
from cptransport_kernels.ssd import SSDSteps, SSDTensors, Summaries
from cptransport_kernels.ssd_configs import SSDConfig, ssd_config, ssd_piece_tokens
from cptransport_kernels.ssd_tables import SSDSegment, SSDTables, build_ssd_tables

__all__ = ["TritonSSD"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TOKENS = ("x", "dt", "B", "C", "z")
_PARAMETERS = ("A", "D", "dt_bias")
_LARGEST = 256


@dataclass(frozen=True)
class _Plan:
    """What is fixed by shapes and segments."""

    config: SSDConfig
    steps: SSDSteps
    segments: tuple[LocalSegment, ...]
    piece_tokens: int
    tokens: int
    device: torch.device

    def tables(self, need: Sequence[Need], *, seeded: bool, reverse: bool) -> SSDTables:
        """Tables of one travel direction; ``seeded``: states that enter sequences are given."""
        segments = tuple(
            SSDSegment(
                start=segment.start,
                stop=segment.stop,
                at_rest=(segment.last if reverse else segment.first) and not seeded,
                state=wanted.state,
                transition=wanted.transition,
            )
            for segment, wanted in zip(self.segments, need, strict=True)
        )
        return build_ssd_tables(
            segments, self.tokens, self.config.chunk, self.piece_tokens, self.device, reverse
        )


@dataclass(frozen=True)
class _Local:
    plan: _Plan
    tables: SSDTables
    tensors: SSDTensors
    summaries: Summaries


@dataclass(frozen=True)
class _Meta:
    plan: _Plan
    tables: SSDTables


@dataclass(frozen=True)
class _LocalGrad:
    meta: _Meta
    tables: SSDTables
    tensors: SSDTensors
    entering: Tensor
    summaries: Summaries
    dy: Tensor


def _dense(tensor: Tensor, chunk: int) -> Tensor:
    """Return the tensor if its last axes are dense and a chunk's offsets fit 32 bits, else a copy."""
    expected = 1
    for size, stride in zip(tensor.shape[:1:-1], tensor.stride()[:1:-1], strict=True):
        if size != 1 and stride != expected:
            return tensor.contiguous()
        expected *= size
    return tensor if 0 <= chunk * tensor.stride(1) < 2**31 else tensor.contiguous()


class TritonSSD:
    """SSD in Triton: bf16, fp16 and fp32 inputs, fp32 states."""

    op = "ssd"
    name = "triton"

    def eligible(self, facts: OpFacts) -> str | None:
        """Serve float32 states on CUDA, for headdim and dstate up to 256."""
        if facts.op != "ssd":
            return f"serves ssd, not {facts.op}"
        if facts.device_type != "cuda" and not (facts.device_type == "cpu" and interpreted()):
            return f"needs CUDA tensors, not {facts.device_type}"
        for name, size in (("headdim", facts.value_dim), ("dstate", facts.key_dim)):
            if not 1 <= size <= _LARGEST:
                return f"needs {name} from 1 to {_LARGEST}, not {size}"
        for name, dtype in facts.dtypes.items():
            if dtype not in _FLOATS and name != "initial_state":
                return f"needs {name} in bfloat16, float16 or float32, not {dtype}"
        if facts.device_type == "cpu" and facts.dtypes.get("x") is torch.bfloat16:
            return "Triton's interpreter multiplies bfloat16 wrongly"
        return None

    def slot_parts(self, facts: OpFacts) -> tuple[PartSpec, ...]:
        """Give state ``[n * B, nheads, headdim, dstate]`` and transition ``[n * B, nheads]``."""
        rows, heads = facts.max_segments * facts.batch, facts.value_heads
        return (
            PartSpec("state", (rows, heads, facts.value_dim, facts.key_dim), facts.state_dtype),
            PartSpec("transition", (rows, heads), facts.state_dtype),
        )

    def forward_local(
        self,
        inputs: SSDInputs,
        segments: Sequence[LocalSegment],
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> _Local:
        """Compute what segments add to the state."""
        batch, tokens, heads, headdim = inputs.x.shape
        options = inputs.options
        config = ssd_config(inputs.x.dtype, headdim, inputs.B.shape[3])
        given: dict[str, Any] = {}
        for name in _TOKENS + _PARAMETERS:
            tensor = getattr(inputs, name)
            if tensor is not None:
                tensor = tensor.detach()
                dense = _dense(tensor, config.chunk) if name in _TOKENS else tensor.contiguous()
                given[name] = dense
        x = SSDTensors(**given)
        plan = _Plan(
            config=config,
            steps=SSDSteps(options.dt_softplus, options.dt_min, options.dt_max),
            segments=tuple(segments),
            piece_tokens=ssd_piece_tokens(
                tokens, len(segments), batch * heads, headdim, config, processors(x.x.device)
            ),
            tokens=tokens,
            device=x.x.device,
        )
        tables = plan.tables(need, seeded=inputs.seed is not None, reverse=False)
        summaries = kernels.summarise(
            x,
            plan.steps,
            config,
            tables,
            None,
            seed=inputs.seed,
            state=out.get("state"),
            transition=out.get("transition"),
        )
        return _Local(plan, tables, x, summaries)

    def forward_finish(self, local: _Local, incoming: StateTable) -> Finished:
        """Compute scores, wait, then all outputs; keep the states that enter pieces."""
        plan, tables, x = local.plan, local.tables, local.tensors
        pairs = kernels.scores(x, plan.config, tables)
        output, outgoing, entering = kernels.outputs(
            x, plan.steps, plan.config, tables, local.summaries, pairs, incoming()
        )
        tensors = [getattr(x, name) for name in _TOKENS + _PARAMETERS]
        return Finished(output, outgoing, Saved((*tensors, entering), _Meta(plan, tables)))

    def backward_local(
        self,
        saved: Saved,
        grad_out: OutputGrads,
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> _LocalGrad:
        """Compute what segments add to the gradient of the state."""
        meta: _Meta = saved.meta
        plan = meta.plan
        *values, entering = saved.tensors
        assert entering is not None
        given: dict[str, Any] = dict(zip(_TOKENS + _PARAMETERS, values, strict=True))
        x = SSDTensors(**given)
        dy = _dense(grad_out.output, plan.config.chunk)
        tables = plan.tables(need, seeded=grad_out.seed is not None, reverse=True)
        summaries = kernels.summarise(
            x,
            plan.steps,
            plan.config,
            tables,
            dy,
            seed=grad_out.seed,
            state=out.get("state"),
            transition=out.get("transition"),
        )
        return _LocalGrad(meta, tables, x, entering, summaries, dy)

    def backward_finish(self, local_grad: _LocalGrad, grad_outgoing: StateTable) -> Grads:
        """Compute the states of all chunks again and what pairs of tokens say, wait, then the rest."""
        plan, x = local_grad.meta.plan, local_grad.tensors
        tables = local_grad.meta.tables
        given = (x, plan.steps, plan.config, tables)
        dy, dz = local_grad.dy, None
        if x.z is None:
            h, _, _ = kernels.chunk_states(*given, local_grad.entering)
        else:
            h, dz, dy = kernels.gate_gradient(*given, local_grad.entering, dy)
            x = replace(x, z=None)
        pairs = kernels.pair_gradients(x, plan.steps, plan.config, tables, dy)
        grads = kernels.gradients(
            x,
            plan.steps,
            plan.config,
            tables,
            local_grad.tables,
            local_grad.summaries,
            h,
            pairs,
            dy,
            grad_outgoing(),
        )
        found = {**vars(grads), "dz": dz}
        inputs = {name: found["d" + name] for name in _TOKENS + _PARAMETERS}
        return Grads(inputs, grads.dincoming)
