# SPDX-License-Identifier: Apache-2.0
"""The backward of engine ``cudnn``; see ``engine`` for what runs when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from cptransport.engines import Grads, Need, OutputGrads, Same, Saved, StateTable
from cptransport_cudnn_summary import short
from cptransport_cudnn_summary.activation import Tokens
from cptransport_cudnn_summary.call import INPUTS, PARAMETERS, TOKENS, Call, Kept, reopen, spread
from cptransport_cudnn_summary.concat import Stack
from cptransport_cudnn_summary.packing import Layout, Pack, Picked, flat

__all__ = ["Backward", "begin", "finish"]

#: Whether products of 16-bit matrices can keep their float32 sums; since torch 2.8.
_WIDE_SUMS = "dtype" in torch.ops.aten.bmm.overloads()


@dataclass(frozen=True, eq=False)
class _Turns:
    """What runs when, None for nothing.

    Attributes:
        early: last segments that publish; they run from their seeds first.
        only: other last ones. waiting: those that run from what came in.
    """

    early: Pack | None
    only: Pack | None
    waiting: Pack | None


@lru_cache(maxsize=512)
def _turns(lay: Layout, need: Same) -> _Turns:
    last = frozenset(i for i in lay.longs if lay.segments[i].last)
    early = frozenset(i for i in last if need.it[i].state)
    return _Turns(lay.group(early), lay.group(last - early), lay.group(lay.longs - last))


@dataclass
class Backward:
    """Between the halves.

    Attributes:
        call, kept: of the forward. turns: see there.
        do: gradient of the output, ``[B * T, HV, V]``. do_long: its rows of ``layout.long``.
        grads: of activated tokens so far, and of states that entered, ``incoming``.
        parameters: of activated parameters, summed.
    """

    call: Call
    kept: Kept
    turns: _Turns
    do: Tensor
    do_long: Tensor
    grads: Picked = field(default_factory=Picked)
    parameters: dict[str, Tensor] = field(default_factory=dict)

    def run(self, group: Pack, leaving: Tensor, stacked: Stack | None = None) -> Tensor:
        """Run cuDNN's backward of a group from what comes to its ends; return what goes on."""
        call = self.call
        grads, entering = call.frame.contract.backward(
            group.rows.take(self.do_long),
            call.tokens(group),
            group.cu_seqlens,
            group.states.take(self.kept.enter),
            leaving,
            stacked,
        )
        self.grads.put(group.rows, **dict(zip(TOKENS, grads[:5], strict=True)))
        self.grads.put(group.states, incoming=entering)
        for name, grad in (("a_log", grads.a_log), ("dt_bias", grads.dt_bias)):
            if grad is not None:
                self.parameters[name] = self.parameters.get(name, 0) + grad
        return entering


def begin(
    saved: Saved, grad_out: OutputGrads, need: Sequence[Need], out: Mapping[str, Tensor]
) -> Backward:
    """Run last segments that publish, and what gives dE of interior ones."""
    call, kept = reopen(saved, grad_out.seed)
    lay = call.frame.layout
    output = grad_out.output.to(call.inputs["v"].dtype).contiguous()
    do = flat(output)
    run = Backward(call, kept, _turns(lay, Same(need)), do, lay.long.rows.take(do))
    if kept.delegated is not None:
        kept.delegated.backward_local(output, out)
    elif kept.interior is not None:
        assert kept.m is not None
        kept.interior.states.put(_entering_grads(run, kept.interior), out["state"])
        kept.interior.states.put(kept.m, out["transition"])
    early = run.turns.early
    if early is not None:
        early.states.put(run.run(early, call.start(early)), out["state"])
    short.grads(call, do, need, out)
    return run


def _entering_grads(run: Backward, group: Pack) -> Tensor:
    """Return dE of interior segments, ``[N, HV, V, K]``: cuDNN's summary, or ``dO^T R`` summed in the state dtype."""
    call, do, r = run.call, group.rows.take(run.do_long), run.kept.r
    dtype = call.frame.dtype
    if r is None:
        return call.frame.contract.summary_backward(do, call.tokens(group), group.cu_seqlens)
    found = []
    for start, stop in group.spans:
        left = do[start:stop].permute(1, 2, 0)
        right = r[start:stop].transpose(0, 1)
        if do.is_cuda and do.dtype != dtype and _WIDE_SUMS:
            found.append(torch.bmm(left, right, out_dtype=dtype))
        else:
            found.append(torch.bmm(left.to(dtype), right.to(dtype)))
    return found[0][None] if len(found) == 1 else torch.stack(found)


def finish(run: Backward, grad_outgoing: StateTable) -> Grads:
    """Run the other segments, then pull everything back through what is applied outside."""
    call, turns, lay = run.call, run.turns, run.call.frame.layout
    if turns.only is not None:
        run.run(turns.only, call.start(turns.only))
    waiting = turns.waiting
    if waiting is not None:
        stacked = call.stacked(waiting, grad_outgoing, reverse=True)
        if stacked is not None:
            run.run(waiting, stacked.start, stacked)
            waiting = None
    table = grad_outgoing() if waiting is not None or lay.shorts else None
    if waiting is not None:
        assert table is not None
        run.run(waiting, waiting.states.take(table))
    pulled: dict[str, Tensor] = {}
    if lay.long.tokens:
        tokens = (run.grads[name] for name in TOKENS)
        pulled = call.activated.pull_back(Tokens(*tokens, **run.parameters))
    found = {
        name: (pulled[name] if name in pulled else torch.zeros_like(x))
        if name in PARAMETERS
        else spread(x, lay, pulled.get(name))
        for name, x in call.inputs.items()
    }
    incoming = run.grads.get("incoming")
    if incoming is None:
        incoming = torch.empty_like(run.kept.enter)
    if table is not None:
        short.leave(call, run.kept.enter, run.do, table, found, incoming)
    return Grads({name: found.get(name) for name in INPUTS}, incoming)
