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
from functools import lru_cache
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
    SSDOptions,
    StateTable,
)
from cptransport.same import Same
from cptransport.transport import PartSpec
from cptransport_kernels.launch import interpreted, processors
from cptransport_kernels.ssd import SSDTensors, Summaries
from cptransport_kernels.ssd_configs import ssd_config, ssd_piece_tokens
from cptransport_kernels.ssd_kernels import SSDKernels, SSDSteps, ssd_kernels
from cptransport_kernels.ssd_tables import SSDSegment, SSDTables, build_ssd_tables

__all__ = ["TritonSSD"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TOKENS = ("x", "dt", "B", "C", "z")
_PARAMETERS = ("A", "D", "dt_bias")
_LARGEST = 256


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is fixed by shapes and segments."""

    kernels: SSDKernels
    segments: tuple[LocalSegment, ...]
    piece_tokens: int
    tokens: int
    device: torch.device

    def tables(self, need: Sequence[Need], *, seeded: bool, reverse: bool) -> SSDTables:
        """Tables of one travel direction; ``seeded``: states that enter sequences are given."""
        return _tables(self, Same(need), seeded, reverse)


@lru_cache(maxsize=256)
def _plan(
    x: tuple[int, ...],
    dstate: int,
    dtype: torch.dtype,
    skip: tuple[int, ...] | None,
    options: SSDOptions,
    segments: Same,
    device: torch.device,
) -> _Plan:
    """Return the plan of shapes of x and D, and of all else."""
    batch, tokens, heads, headdim = x
    config = ssd_config(dtype, headdim, dstate)
    per_channel = skip is not None and len(skip) == 2
    return _Plan(
        kernels=ssd_kernels(
            config,
            SSDSteps(options.dt_softplus, options.dt_min, options.dt_max),
            headdim,
            dstate,
            headdim if per_channel else int(skip is not None),
            per_channel,
        ),
        segments=tuple(segments.it),
        piece_tokens=ssd_piece_tokens(
            tokens, len(segments.it), batch * heads, headdim, config, processors(device)
        ),
        tokens=tokens,
        device=device,
    )


@lru_cache(maxsize=512)
def _tables(plan: _Plan, need: Same, seeded: bool, reverse: bool) -> SSDTables:
    segments = tuple(
        SSDSegment(
            start=segment.start,
            stop=segment.stop,
            at_rest=(segment.last if reverse else segment.first) and not seeded,
            state=wanted.state,
            transition=wanted.transition,
        )
        for segment, wanted in zip(plan.segments, need.it, strict=True)
    )
    chunk = plan.kernels.config.chunk
    return build_ssd_tables(segments, plan.tokens, chunk, plan.piece_tokens, plan.device, reverse)


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
    if tensor.is_contiguous():
        return tensor
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
        plan = _plan(
            inputs.x.shape,
            inputs.B.shape[3],
            inputs.x.dtype,
            None if inputs.D is None else inputs.D.shape,
            inputs.options,
            Same(segments),
            inputs.x.device,
        )
        chunk = plan.kernels.config.chunk
        given: dict[str, Any] = {}
        for name in _TOKENS:
            tensor = getattr(inputs, name)
            given[name] = None if tensor is None else _dense(tensor, chunk)
        for name in _PARAMETERS:
            tensor = getattr(inputs, name)
            given[name] = None if tensor is None else tensor.contiguous()
        x = SSDTensors(**given)
        tables = plan.tables(need, seeded=inputs.seed is not None, reverse=False)
        summaries = kernels.summarise(
            x,
            plan.kernels,
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
        pairs = kernels.scores(x, plan.kernels, tables)
        entering = incoming() if tables.entered else None
        output, outgoing, kept = kernels.outputs(
            x, plan.kernels, tables, local.summaries, pairs, entering
        )
        tensors = [getattr(x, name) for name in _TOKENS + _PARAMETERS]
        return Finished(output, outgoing, Saved((*tensors, kept), _Meta(plan, tables)))

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
        dy = _dense(grad_out.output, plan.kernels.config.chunk)
        tables = plan.tables(need, seeded=grad_out.seed is not None, reverse=True)
        summaries = kernels.summarise(
            x,
            plan.kernels,
            tables,
            dy,
            seed=grad_out.seed,
            state=out.get("state"),
            transition=out.get("transition"),
        )
        return _LocalGrad(meta, tables, x, entering, summaries, dy)

    def backward_finish(self, local_grad: _LocalGrad, grad_outgoing: StateTable) -> Grads:
        """Compute the states of all chunks again and what pairs of tokens say, wait, then the rest."""
        meta, x, reverse = local_grad.meta, local_grad.tensors, local_grad.tables
        given = meta.plan.kernels, meta.tables
        dy, dz = local_grad.dy, None
        if x.z is None:
            h, _, _ = kernels.chunk_states(x, *given, local_grad.entering)
        else:
            h, dz, dy = kernels.gate_gradient(x, *given, local_grad.entering, dy)
            x = replace(x, z=None)
        pairs = kernels.pair_gradients(x, *given, dy)
        leaving = grad_outgoing() if reverse.entered else None
        grads = kernels.gradients(x, *given, reverse, local_grad.summaries, h, pairs, dy, leaving)
        found = {**vars(grads), "dz": dz}
        inputs = {name: found["d" + name] for name in _TOKENS + _PARAMETERS}
        return Grads(inputs, grads.dincoming)
