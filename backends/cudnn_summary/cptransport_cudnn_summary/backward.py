# SPDX-License-Identifier: Apache-2.0
"""The backward of engine ``cudnn``; see ``engine`` for what runs when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cptransport.engines import Grads, Need, OutputGrads, Saved, StateTable
from cptransport_cudnn_summary import short
from cptransport_cudnn_summary.activation import Tokens, pull_back
from cptransport_cudnn_summary.call import PARAMETERS, TOKENS, Call, Kept, reopen, spread
from cptransport_cudnn_summary.concat import Stack
from cptransport_cudnn_summary.packing import Pack, Picked, flat

__all__ = ["Backward", "begin", "finish"]

#: Whether products of 16-bit matrices can keep their float32 sums; since torch 2.8.
_WIDE_SUMS = "dtype" in torch.ops.aten.bmm.overloads()


@dataclass
class Backward:
    """Between the halves.

    Attributes:
        call, kept: of the forward. seed: gradients of final states, in rows of last segments.
        do: gradient of the output, rows of ``layout.long``. do_single: of ``layout.single``.
        rest: segments that have not run.
        grads: of activated tokens so far. parameters: of activated parameters, summed.
        incoming: gradients of entering states, ``[R, HV, V, K]``.
    """

    call: Call
    kept: Kept
    seed: Tensor | None
    do: Tensor
    do_single: Tensor
    rest: frozenset[int]
    grads: Picked
    incoming: Tensor
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def run(
        self, segments: frozenset[int], leaving: Tensor, stacked: Stack | None = None
    ) -> Tensor:
        """Run cuDNN's backward of segments from what comes to their ends; return what goes on."""
        call = self.call
        group = call.layout.group(segments)
        grads, entering = call.contract.backward(
            group.take(self.do),
            call.tokens(group),
            group.cu_seqlens,
            group.take_states(self.kept.enter),
            leaving,
            stacked,
        )
        self.grads.put(group, **dict(zip(TOKENS, grads[:5], strict=True)))
        for name, grad in (("a_log", grads.a_log), ("dt_bias", grads.dt_bias)):
            if grad is not None:
                self.parameters[name] = self.parameters.get(name, 0) + grad
        group.put_states(entering, self.incoming)
        self.rest -= segments
        return entering


def begin(
    saved: Saved, grad_out: OutputGrads, need: Sequence[Need], out: Mapping[str, Tensor]
) -> Backward:
    """Run last segments that publish, and what gives dE of interior ones."""
    call, kept = reopen(saved)
    lay = call.layout
    do = grad_out.output.to(call.inputs["v"].dtype)
    run = Backward(
        call,
        kept,
        grad_out.seed,
        lay.long.take(flat(do)),
        lay.single.take(flat(do)),
        lay.longs(),
        Picked(lay.long.tokens),
        torch.empty_like(kept.enter),
    )
    if kept.delegated is not None:
        kept.delegated.backward_local(do, call.state_shape[2], out)
    elif kept.interior:
        group = lay.group(kept.interior)
        group.put_states(_entering_grads(run, group), out["state"])
        assert kept.m is not None
        group.put_states(kept.m, out["transition"])
    urgent = frozenset(i for i in run.rest if need[i].state and lay.segments[i].last)
    if urgent:
        group = lay.group(urgent)
        group.put_states(run.run(urgent, call.states(run.seed, group)), out["state"])
    short.grads(call, run.do_single, run.seed, need, out)
    return run


def _entering_grads(run: Backward, group: Pack) -> Tensor:
    """Return dE of interior segments, ``[N, HV, V, K]``: cuDNN's summary, or ``dO^T R`` summed in the state dtype."""
    call, do, r = run.call, group.take(run.do), run.kept.r
    if r is None:
        return call.contract.summary_backward(do, call.tokens(group), group.cu_seqlens)
    found = []
    for start, stop in group.spans:
        left = do[start:stop].permute(1, 2, 0)
        right = r[start:stop].transpose(0, 1)
        if do.is_cuda and do.dtype != call.dtype and _WIDE_SUMS:
            found.append(torch.bmm(left, right, out_dtype=call.dtype))
        else:
            found.append(torch.bmm(left.to(call.dtype), right.to(call.dtype)))
    return torch.stack(found)


def finish(run: Backward, grad_outgoing: StateTable) -> Grads:
    """Run the other segments, then pull everything back through what is applied outside."""
    call, lay = run.call, run.call.layout
    only = frozenset(i for i in run.rest if lay.segments[i].last)
    if only:
        run.run(only, call.states(run.seed, lay.group(only)))
    stacked = call.stacked(run.rest, grad_outgoing, run.seed, reverse=True)
    if stacked is not None:
        run.run(run.rest, stacked.start, stacked)
    table = None
    if run.rest or lay.single.sequences or lay.empty.sequences:
        table = grad_outgoing()
    if run.rest:
        assert table is not None
        run.run(run.rest, lay.group(run.rest).take_states(table))
    pulled: dict[str, Tensor] = {}
    if lay.long.tokens:
        grads = Tokens(*(run.grads.values[name] for name in TOKENS), **run.parameters)
        pulled = pull_back(
            call.packed(lay.long), grads, call.options, call.contract.outside, call.dtype
        )
    found = {
        name: pulled.get(name, torch.zeros_like(x))
        if name in PARAMETERS
        else spread(x, lay, pulled.get(name))
        for name, x in call.inputs.items()
    }
    if table is not None:
        short.leave(call, run.kept.enter, run.do_single, table, found, run.incoming)
    inputs = {name: found.get(name) for name in (*TOKENS, *PARAMETERS)}
    return Grads(inputs, run.incoming)
