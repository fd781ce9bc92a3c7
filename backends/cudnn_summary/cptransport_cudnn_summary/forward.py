# SPDX-License-Identifier: Apache-2.0
"""The forward of engine ``cudnn``; see ``engine`` for what runs when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from torch import Tensor

from cptransport.engines import Finished, KDAInputs, LocalSegment, Need, Same, StateTable
from cptransport_cudnn_summary import short
from cptransport_cudnn_summary.call import Call, Kept, keep, spread
from cptransport_cudnn_summary.concat import Stack
from cptransport_cudnn_summary.interior import Delegated, Share
from cptransport_cudnn_summary.packing import Layout, Pack, Picked, flat

__all__ = ["Forward", "begin", "finish"]


@dataclass(frozen=True, eq=False)
class _Turns:
    """What runs when, None for nothing.

    Attributes:
        interior: segments whose E and M are asked for. share: the same for the triton engine.
        early: those that run from their seeds before anything is published.
        only: those that are their whole sequences. waiting: those that run from what came in.
    """

    interior: Pack | None
    share: Share | None
    early: Pack | None
    only: Pack | None
    waiting: Pack | None


@lru_cache(maxsize=512)
def _turns(lay: Layout, need: Same, way: str) -> _Turns:
    longs = lay.longs
    early = frozenset(i for i in longs if need.it[i].state)
    interior = frozenset(i for i in early if need.it[i].transition)
    only = frozenset(i for i in longs - early if lay.segments[i].first)
    waiting = longs - early - only
    return _Turns(
        lay.group(interior),
        Share.of(interior, lay) if interior and way == "triton" else None,
        lay.group(early if way == "identity" else early - interior),
        lay.group(only),
        lay.group(waiting | interior if way == "summary" else waiting),
    )


@dataclass
class Forward:
    """Between the halves.

    Attributes:
        call, turns: see there.
        outgoing: whether the states that leave are read.
        made: outputs ``o`` so far, rows of ``layout.long``, and states that left, ``outgoing``.
        r, m, delegated: see ``Kept``.
    """

    call: Call
    turns: _Turns
    outgoing: bool
    made: Picked = field(default_factory=Picked)
    r: Tensor | None = None
    m: Tensor | None = None
    delegated: Delegated | None = None

    def run(self, group: Pack, entering: Tensor, stacked: Stack | None = None) -> Tensor:
        """Run cuDNN's forward of a group from what enters it; return the states that leave."""
        call = self.call
        o, states = call.frame.contract.forward(
            call.tokens(group), group.cu_seqlens, entering, stacked
        )
        self.made.put(group.rows, o=o)
        if self.outgoing:
            self.made.put(group.states, outgoing=states)
        return states


def begin(
    inputs: KDAInputs,
    segments: Sequence[LocalSegment],
    need: Sequence[Need],
    out: Mapping[str, Tensor],
) -> Forward:
    """Run first segments, and what gives E and M of interior ones."""
    call = Call.of(inputs, segments)
    contract = call.frame.contract
    turns = _turns(call.frame.layout, Same(need), contract.interior)
    run = Forward(call, turns, inputs.outgoing)
    interior, early = turns.interior, turns.early
    if turns.share is not None:
        run.delegated = Delegated(turns.share)
        run.delegated.forward_local(inputs, out)
    if interior is not None and contract.interior == "summary":
        state, run.m = contract.summary(call.tokens(interior), interior.cu_seqlens)
        interior.states.put(state, out["state"])
        interior.states.put(run.m, out["transition"])
    if early is not None:
        early.states.put(run.run(early, call.start(early)), out["state"])
    if interior is not None and contract.interior == "identity":
        run.r, run.m = contract.identity(call.tokens(interior), interior.cu_seqlens)
        interior.states.put(run.m, out["transition"])
    short.summaries(call, need, out)
    return run


def finish(run: Forward, incoming: StateTable) -> Finished:
    """Run the other segments; correct interior ones by what entered."""
    call, turns, lay = run.call, run.turns, run.call.frame.layout
    if turns.only is not None:
        run.run(turns.only, call.start(turns.only))
    waiting, interior = turns.waiting, turns.interior
    if waiting is not None:
        stacked = call.stacked(waiting, incoming, reverse=False)
        if stacked is not None:
            run.run(waiting, stacked.start, stacked)
            waiting = None
    # Where cuDNN composed, this comes after its kernels, for the backward.
    entered = turns.waiting is not None or interior is not None or lay.shorts
    enter = incoming() if entered else call.start()
    if waiting is not None:
        run.run(waiting, waiting.states.take(enter))
    if run.r is not None:
        assert interior is not None
        _correct(run.made["o"], run.r, interior, enter)
    output = _output(run, enter)
    outgoing = None
    if run.outgoing:
        outgoing = run.made.get("outgoing")
        outgoing = enter.new_empty(enter.shape) if outgoing is None else outgoing
    short.enter(call, enter, output, outgoing)
    kept = Kept(enter, run.r, run.m, None if run.delegated else interior, run.delegated)
    return Finished(output, outgoing, keep(call, kept))


def _output(run: Forward, enter: Tensor) -> Tensor:
    """Return o ``[B, T, HV, V]``, but for single tokens; complete what is delegated."""
    call, group = run.call, run.turns.interior
    lay = call.frame.layout
    if run.delegated is not None:
        assert group is not None
        o = run.delegated.forward_finish(enter)
        if group.rows.whole and not lay.single.tokens:
            return o
        run.made.put(group.rows, o=group.rows.take(lay.long.rows.take(flat(o))))
    return spread(call.inputs["v"], lay, run.made.get("o"))


def _correct(o: Tensor, r: Tensor, group: Pack, table: Tensor) -> None:
    """Add ``R X0`` to the outputs of interior segments; operands in o's dtype, sums in float32."""
    inner = group.rows.take(o)
    states = group.states.take(table).to(o.dtype)
    for (start, stop), state in zip(group.spans, states, strict=True):
        # [HV, t, V] += [HV, t, K] @ [HV, K, V], in place.
        inner[start:stop].transpose(0, 1).baddbmm_(r[start:stop].transpose(0, 1), state.mT)
    if group.rows.index is not None:  # else these are rows of o
        group.rows.put(inner, o)
