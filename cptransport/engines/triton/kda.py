# SPDX-License-Identifier: Apache-2.0
"""KDA through the kernels of ``cptransport_kernels``.

One pass over the columns ``[V | K]`` in the forward gives state update, transition, local output
and effective query R of every segment that does not start its sequence; outputs are then corrected
by ``R S_in``, and the backward summary is ``R^T dO``. Long segments are cut into pieces that run
side by side; the same fold joins them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import cptransport_kernels.kda as kernels
from cptransport.engines import (
    Finished,
    Grads,
    KDAInputs,
    KDAOptions,
    LocalSegment,
    Need,
    OpFacts,
    OutputGrads,
    Saved,
    StateTable,
)
from cptransport.engines.triton.padding import Padding
from cptransport.transport import PartSpec
from cptransport_kernels.configs import HEAD_DIMS, KDAConfig, kda_config, piece_tokens
from cptransport_kernels.kda import KDAForward, KDATensors, Transforms
from cptransport_kernels.launch import interpreted
from cptransport_kernels.pieces import Pieces, SegmentSpec, build_pieces

__all__ = ["TritonKDA"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TENSOR_FIELDS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
_KEPT = ("m", "s_in", "r", "gc", "qg", "kd", "w", "u0", "aqk", "tinv", "rnorm")


@dataclass(frozen=True)
class _Plan:
    """What is fixed by shapes and segments."""

    config: KDAConfig
    padding: Padding
    transforms: Transforms
    segments: tuple[LocalSegment, ...]
    piece_tokens: int
    batch: int
    tokens: int
    device: torch.device

    def pieces(self, need: Sequence[Need], *, backward: bool) -> Pieces:
        specs = tuple(
            SegmentSpec(
                start=segment.start,
                stop=segment.stop,
                seeded=segment.first,
                state=wanted.state and not backward,
                transition=wanted.transition and not backward,
                grad_state=wanted.state and backward,
                grad_transition=wanted.transition and backward,
            )
            for segment, wanted in zip(self.segments, need, strict=True)
        )
        return build_pieces(specs, self.tokens, self.config.chunk, self.piece_tokens, self.device)


@dataclass(frozen=True)
class _Local:
    plan: _Plan
    pieces: Pieces
    tensors: KDATensors
    done: KDAForward


@dataclass(frozen=True)
class _LocalGrad:
    plan: _Plan
    pieces: Pieces
    tensors: KDATensors
    done: KDAForward
    do: Tensor
    de: Tensor | None


@lru_cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _transforms(options: KDAOptions) -> Transforms:
    return Transforms(
        scale=options.scale,
        l2norm=options.use_qk_l2norm_in_kernel,
        gate=options.use_gate_in_kernel,
        lower_bound=options.lower_bound,
        beta_sigmoid=options.use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if options.allow_neg_eigval else 1.0,
    )


class TritonKDA:
    """KDA in Triton: bf16, fp16 and fp32 inputs, fp32 states."""

    op = "kda"
    name = "triton"

    def eligible(self, facts: OpFacts) -> str | None:
        """Serve float32 states on CUDA, for head sizes up to 256."""
        if facts.op != "kda":
            return f"serves kda, not {facts.op}"
        if facts.device_type != "cuda" and not (facts.device_type == "cpu" and interpreted()):
            return f"needs CUDA tensors, not {facts.device_type}"
        for name, size in (("K", facts.key_dim), ("V", facts.value_dim)):
            if not 1 <= size <= HEAD_DIMS[-1]:
                return f"needs {name} from 1 to {HEAD_DIMS[-1]}, not {size}"
        for name, dtype in facts.dtypes.items():
            if dtype not in _FLOATS:
                return f"needs {name} in bfloat16, float16 or float32, not {dtype}"
        bf16 = any(facts.dtypes.get(name) is torch.bfloat16 for name in ("q", "k", "v"))
        if bf16 and facts.device_type == "cpu":
            return "Triton's interpreter multiplies bfloat16 wrongly"
        return None

    def slot_parts(self, facts: OpFacts) -> tuple[PartSpec, ...]:
        """Give state ``[n * B, HV, K, V]`` and transition ``[n * B, HV, K, K]``."""
        rows = facts.max_segments * facts.batch
        heads, keys = facts.value_heads, facts.key_dim
        return (
            PartSpec("state", (rows, heads, keys, facts.value_dim), facts.state_dtype),
            PartSpec("transition", (rows, heads, keys, keys), facts.state_dtype),
        )

    def forward_local(
        self,
        inputs: KDAInputs,
        segments: Sequence[LocalSegment],
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> _Local:
        """Run everything but the correction by the states that enter."""
        batch, tokens, _, key_dim = inputs.q.shape
        value_heads, value_dim = inputs.v.shape[2:]
        padding = Padding(key_dim, value_dim)
        given: dict[str, Any] = {name: getattr(inputs, name) for name in _TENSOR_FIELDS}
        for name, tensor in given.items():
            if tensor is not None:
                given[name] = padding.pad(name, tensor.detach()).contiguous()
        x = KDATensors(**given)
        value_dim = x.v.shape[3]
        config = kda_config((x.q.dtype, x.k.dtype, x.v.dtype), x.q.shape[3], value_dim)
        plan = _Plan(
            config=config,
            padding=padding,
            transforms=_transforms(inputs.options),
            segments=tuple(segments),
            piece_tokens=piece_tokens(
                tokens,
                len(segments),
                batch * value_heads,
                value_dim,
                config,
                _processors(x.q.device),
            ),
            batch=batch,
            tokens=tokens,
            device=x.q.device,
        )
        pieces = plan.pieces(need, backward=False)
        tables = padding.summaries(out)
        done = kernels.forward(
            x,
            plan.transforms,
            config,
            pieces,
            seed=None if inputs.seed is None else padding.pad_states(inputs.seed),
            state=tables.get("state"),
            transition=tables.get("transition"),
            keep_r=True,
        )
        padding.publish(tables, out, need, batch)
        return _Local(plan, pieces, x, done)

    def forward_finish(self, local: _Local, incoming: StateTable) -> Finished:
        """Correct the outputs; what is kept for the backward are chunk-local results, R and M."""
        plan, pieces, done = local.plan, local.pieces, local.done
        outgoing = kernels.enter(
            done,
            plan.config,
            pieces,
            plan.padding.pad_states(incoming()) if pieces.unseeded else None,
            outgoing=any(segment.last for segment in plan.segments),
        )
        tensors = [getattr(local.tensors, name) for name in _TENSOR_FIELDS]
        kept = [getattr(done, name) for name in _KEPT]
        output = plan.padding.crop("o", done.o)
        assert output is not None
        return Finished(output, plan.padding.crop_states(outgoing), Saved((*tensors, *kept), plan))

    def backward_local(
        self,
        saved: Saved,
        grad_out: OutputGrads,
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> _LocalGrad:
        """Write dE = R^T dO and M."""
        plan: _Plan = saved.meta
        names = (*_TENSOR_FIELDS, *_KEPT)
        kept: dict[str, Any] = dict(zip(names, saved.tensors, strict=True))
        x = KDATensors(**{name: kept.pop(name) for name in _TENSOR_FIELDS})
        do = plan.padding.pad("o", grad_out.output).contiguous()
        done = KDAForward(o=do, e=kept["s_in"], **kept)
        pieces = plan.pieces(need, backward=True)
        tables = plan.padding.summaries(out)
        de = kernels.entering_grad(
            done,
            plan.config,
            pieces,
            do,
            seed=None if grad_out.seed is None else plan.padding.pad_states(grad_out.seed),
            state=tables.get("state"),
            transition=tables.get("transition"),
        )
        plan.padding.publish(tables, out, need, plan.batch)
        return _LocalGrad(plan, pieces, x, done, do, de)

    def backward_finish(self, local_grad: _LocalGrad, grad_outgoing: StateTable) -> Grads:
        """Walk the pieces both ways, then all chunks at once."""
        plan, x = local_grad.plan, local_grad.tensors
        grads = kernels.backward(
            x,
            plan.transforms,
            plan.config,
            local_grad.pieces,
            local_grad.done,
            local_grad.do,
            local_grad.de,
            plan.padding.pad_states(grad_outgoing()),
        )
        found = {name: getattr(grads, "d" + name) for name in _TENSOR_FIELDS}
        inputs = {name: plan.padding.crop(name, grad) for name, grad in found.items()}
        return Grads(inputs, plan.padding.crop_states(grads.ds_in))
