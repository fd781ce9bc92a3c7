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
from cptransport.same import Same
from cptransport.transport import PartSpec
from cptransport_kernels.configs import HEAD_DIMS, head_dims, kda_config, piece_tokens
from cptransport_kernels.kda import KDAForward, KDAKept, KDATensors
from cptransport_kernels.kda_kernels import KDAKernels, Transforms, kda_kernels
from cptransport_kernels.launch import interpreted, processors
from cptransport_kernels.pieces import Pieces, SegmentSpec, build_pieces

__all__ = ["TritonKDA"]

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_TENSOR_FIELDS = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")


@dataclass(frozen=True, eq=False)
class _Plan:
    """What is fixed by shapes, options and segments.

    Attributes:
        outgoing: whether the states that leave last segments are read.
    """

    kernels: KDAKernels
    padding: Padding
    segments: tuple[LocalSegment, ...]
    outgoing: bool
    piece_tokens: int
    batch: int
    tokens: int
    device: torch.device

    def pieces(self, need: Sequence[Need], *, backward: bool) -> Pieces:
        """Return the tables of one direction."""
        return _pieces(self, Same(need), backward)


@lru_cache(maxsize=256)
def _plan(
    query: tuple[int, ...],
    value: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    options: KDAOptions,
    outgoing: bool,
    segments: Same,
    device: torch.device,
) -> _Plan:
    batch, tokens, heads, key_dim = query
    value_heads, value_dim = value[2:]
    padding = Padding(key_dim, value_dim, head_dims(dtypes, key_dim))
    key_dim, value_dim = padding.padded
    config = kda_config(dtypes, key_dim, value_dim)
    transforms = Transforms(
        scale=options.scale,
        l2norm=options.use_qk_l2norm_in_kernel,
        gate=options.use_gate_in_kernel,
        lower_bound=options.lower_bound,
        beta_sigmoid=options.use_beta_sigmoid_in_kernel,
        beta_scale=2.0 if options.allow_neg_eigval else 1.0,
    )
    return _Plan(
        kernels=kda_kernels(config, transforms, key_dim, value_dim, heads != value_heads),
        padding=padding,
        segments=tuple(segments.it),
        outgoing=outgoing,
        piece_tokens=piece_tokens(
            tokens,
            len(segments.it),
            batch * value_heads,
            value_dim,
            config,
            processors(device),
        ),
        batch=batch,
        tokens=tokens,
        device=device,
    )


@lru_cache(maxsize=512)
def _pieces(plan: _Plan, need: Same, backward: bool) -> Pieces:
    specs = tuple(
        SegmentSpec(
            start=segment.start,
            stop=segment.stop,
            seeded=segment.first,
            state=wanted.state and not backward,
            transition=wanted.transition and not backward,
            grad_state=wanted.state and backward,
            grad_transition=wanted.transition and backward,
            outgoing=plan.outgoing and segment.last,
        )
        for segment, wanted in zip(plan.segments, need.it, strict=True)
    )
    chunk = plan.kernels.config.chunk
    return build_pieces(specs, plan.tokens, chunk, plan.piece_tokens, plan.device)


@dataclass(frozen=True)
class _Local:
    plan: _Plan
    pieces: Pieces
    tensors: tuple[Tensor | None, ...]
    done: KDAForward


@dataclass(frozen=True)
class _LocalGrad:
    plan: _Plan
    pieces: Pieces
    tensors: KDATensors
    kept: KDAKept
    do: Tensor
    de: Tensor | None


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
        plan = _plan(
            inputs.q.shape,
            inputs.v.shape,
            (inputs.q.dtype, inputs.k.dtype, inputs.v.dtype),
            inputs.options,
            inputs.outgoing,
            Same(segments),
            inputs.q.device,
        )
        pad = plan.padding.pad
        given = (
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.A_log, inputs.dt_bias
        )  # fmt: skip
        tensors = tuple(
            None if x is None else pad(name, x).contiguous()
            for name, x in zip(_TENSOR_FIELDS, given, strict=True)
        )
        pieces = plan.pieces(need, backward=False)
        tables = plan.padding.summaries(out)
        done = kernels.forward(
            KDATensors(*tensors),  # type: ignore[arg-type]
            plan.kernels,
            pieces,
            seed=None if inputs.seed is None else plan.padding.pad_states(inputs.seed),
            state=tables.get("state"),
            transition=tables.get("transition"),
        )
        plan.padding.publish(tables, out, need, plan.batch)
        return _Local(plan, pieces, tensors, done)

    def forward_finish(self, local: _Local, incoming: StateTable) -> Finished:
        """Correct the outputs; what is kept for the backward is R, M, and of the chunks what is small."""
        plan, pieces, done = local.plan, local.pieces, local.done
        outgoing = kernels.enter(
            done,
            plan.kernels,
            pieces,
            plan.padding.pad_states(incoming()) if pieces.unseeded else None,
        )
        kept = done.kept
        saved = (*local.tensors, kept.s_in, kept.m, kept.r, kept.aqk, kept.tinv, kept.rnorm)
        output = plan.padding.crop("o", done.o)
        assert output is not None
        return Finished(
            output,
            None if outgoing is None else plan.padding.crop_states(outgoing),
            Saved(saved, plan),
        )

    def backward_local(
        self,
        saved: Saved,
        grad_out: OutputGrads,
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> _LocalGrad:
        """Write dE = R^T dO and M."""
        plan: _Plan = saved.meta
        inputs = len(_TENSOR_FIELDS)
        x = KDATensors(*saved.tensors[:inputs])  # type: ignore[arg-type]
        kept = KDAKept(*saved.tensors[inputs:])  # type: ignore[arg-type]
        do = plan.padding.pad("o", grad_out.output).contiguous()
        pieces = plan.pieces(need, backward=True)
        tables = plan.padding.summaries(out)
        de = kernels.entering_grad(
            kept,
            plan.kernels,
            pieces,
            do,
            seed=None if grad_out.seed is None else plan.padding.pad_states(grad_out.seed),
            state=tables.get("state"),
            transition=tables.get("transition"),
        )
        plan.padding.publish(tables, out, need, plan.batch)
        return _LocalGrad(plan, pieces, x, kept, do, de)

    def backward_finish(self, local_grad: _LocalGrad, grad_outgoing: StateTable) -> Grads:
        """Make the chunks again, wait, walk the pieces both ways, then all chunks at once."""
        plan = local_grad.plan
        grads = kernels.backward(
            local_grad.tensors,
            plan.kernels,
            local_grad.pieces,
            local_grad.kept,
            local_grad.do,
            local_grad.de,
            lambda: plan.padding.pad_states(grad_outgoing()),
        )
        found = (
            grads.dq, grads.dk, grads.dv, grads.dg, grads.dbeta, grads.dA_log, grads.ddt_bias
        )  # fmt: skip
        crop = plan.padding.crop
        inputs = {name: crop(name, x) for name, x in zip(_TENSOR_FIELDS, found, strict=True)}
        return Grads(inputs, plan.padding.crop_states(grads.ds_in))
