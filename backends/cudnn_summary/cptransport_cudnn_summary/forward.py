# SPDX-License-Identifier: Apache-2.0
"""The forward of engine ``cudnn``; see ``engine`` for what runs when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from cptransport.engines import Finished, KDAInputs, LocalSegment, Need, StateTable
from cptransport_cudnn_summary import short
from cptransport_cudnn_summary.call import Call, Kept, keep, spread
from cptransport_cudnn_summary.concat import Stack
from cptransport_cudnn_summary.interior import Delegated
from cptransport_cudnn_summary.packing import Pack, Picked, flat

__all__ = ["Forward", "begin", "finish"]


@dataclass
class Forward:
    """Between the halves.

    Attributes:
        call, seed: of it; states that enter first segments.
        interior: segments whose E and M were written. late: those that have not run.
        o: outputs so far, rows of ``layout.long``.
        r, m, delegated: see ``Kept``.
        outgoing: states that left so far, ``[R, HV, V, K]``.
    """

    call: Call
    seed: Tensor | None
    interior: frozenset[int]
    late: frozenset[int]
    o: Picked
    outgoing: Tensor
    r: Tensor | None = None
    m: Tensor | None = None
    delegated: Delegated | None = field(default=None)

    def run(
        self, segments: frozenset[int], entering: Tensor, stacked: Stack | None = None
    ) -> Tensor:
        """Run cuDNN's forward of segments from what enters them; return the states that leave."""
        call = self.call
        group = call.layout.group(segments)
        o, states = call.contract.forward(call.tokens(group), group.cu_seqlens, entering, stacked)
        self.o.put(group, o=o)
        group.put_states(states, self.outgoing)
        return states


def begin(
    inputs: KDAInputs,
    segments: Sequence[LocalSegment],
    need: Sequence[Need],
    out: Mapping[str, Tensor],
) -> Forward:
    """Run first segments, and what gives E and M of interior ones."""
    call = Call.of(inputs, segments)
    lay, contract = call.layout, call.contract
    longs = lay.longs()
    early = frozenset(i for i in longs if need[i].state)
    interior = frozenset(i for i in early if need[i].transition)
    states = inputs.v.new_empty(len(lay.segments) * lay.batch, *call.state_shape, dtype=call.dtype)
    run = Forward(call, inputs.seed, interior, longs - early, Picked(lay.long.tokens), states)
    if interior and contract.interior == "triton":
        run.delegated = Delegated.of(interior, lay)
        run.delegated.forward_local(inputs, out)
    if interior and contract.interior == "summary":
        group = lay.group(interior)
        state, run.m = contract.summary(call.tokens(group), group.cu_seqlens)
        group.put_states(state, out["state"])
        group.put_states(run.m, out["transition"])
    started = early if contract.interior == "identity" else early - interior
    if started:
        group = lay.group(started)
        group.put_states(run.run(started, call.states(run.seed, group)), out["state"])
    if interior and contract.interior == "identity":
        group = lay.group(interior)
        run.r, run.m = contract.identity(call.tokens(group), group.cu_seqlens)
        group.put_states(run.m, out["transition"])
    short.summaries(call, run.seed, need, out)
    return run


def finish(run: Forward, incoming: StateTable) -> Finished:
    """Run the other segments; correct interior ones by what entered."""
    call, lay = run.call, run.call.layout
    only = frozenset(i for i in run.late if lay.segments[i].first)
    if only:
        run.run(only, call.states(run.seed, lay.group(only)))
    waiting = run.late - only
    if call.contract.interior == "summary":
        waiting |= run.interior
    stacked = call.stacked(waiting, incoming, run.seed, reverse=False)
    if stacked is not None:
        run.run(waiting, stacked.start, stacked)
        waiting = frozenset()
    # Where cuDNN composed, this comes after its kernels, for the backward.
    table = incoming()
    if waiting:
        run.run(waiting, lay.group(waiting).take_states(table))
    if run.r is not None:
        _correct(run.o.values["o"], run.r, lay.group(run.interior), table)
    if run.delegated is not None:
        o = lay.long.take(flat(run.delegated.forward_finish(table)))
        group = lay.group(run.interior)
        run.o.put(group, o=group.take(o))
    output = spread(call.inputs["v"], lay, run.o.values.get("o"))
    short.enter(call, table, output, run.outgoing)
    kept = Kept(table.clone(), run.r, run.m, run.interior, run.delegated)
    return Finished(output, run.outgoing, keep(call, kept))


def _correct(o: Tensor, r: Tensor, group: Pack, table: Tensor) -> None:
    """Add ``R X0`` to the outputs of interior segments; operands in o's dtype, sums in float32."""
    inner = group.take(o)
    states = group.take_states(table).to(o.dtype)
    for (start, stop), state in zip(group.spans, states, strict=True):
        # [HV, t, V] += [HV, t, K] @ [HV, K, V], in place.
        inner[start:stop].transpose(0, 1).baddbmm_(r[start:stop].transpose(0, 1), state.mT)
    if inner is not o:
        group.put(inner, o)
