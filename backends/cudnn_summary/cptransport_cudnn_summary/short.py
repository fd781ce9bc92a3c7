# SPDX-License-Identifier: Apache-2.0
"""What segments of one token or none contribute; cuDNN's kernels never see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from cptransport.engines import Need
from cptransport_cudnn_summary import single
from cptransport_cudnn_summary.call import PARAMETERS, Call
from cptransport_cudnn_summary.packing import Pack, flat

__all__ = ["enter", "grads", "leave", "summaries"]


def summaries(call: Call, need: Sequence[Need], out: Mapping[str, Tensor]) -> None:
    """Write E and M."""
    for pack, wanted in _wanted(call, need):
        states = call.start(pack)
        if pack is call.frame.layout.single:
            states = single.run(call.packed(pack), call.frame.options, states)[1]
        _write(call, pack, wanted, states, need, out)


def grads(
    call: Call,
    do: Tensor,
    need: Sequence[Need],
    out: Mapping[str, Tensor],
) -> None:
    """Write dE and M; ``do`` is ``[B * T, HV, V]``."""
    for pack, wanted in _wanted(call, need):
        found = call.start(pack)
        if pack is call.frame.layout.single:
            given = call.packed(pack), call.frame.options, pack.rows.take(do)
            found = single.entering_grad(*given, found)
        _write(call, pack, wanted, found, need, out)


def enter(call: Call, table: Tensor, output: Tensor, outgoing: Tensor | None) -> None:
    """Compute outputs, and the states that leave if these are asked for, from those that enter."""
    one, none = call.frame.layout.single, call.frame.layout.empty
    if one.tokens:
        o, states = single.run(call.packed(one), call.frame.options, one.states.take(table))
        one.rows.put(o, flat(output))
        if outgoing is not None:
            one.states.put(states, outgoing)
    if none.sequences and outgoing is not None:
        none.states.put(none.states.take(table), outgoing)


def leave(
    call: Call,
    entered: Tensor,
    do: Tensor,
    table: Tensor,
    found: dict[str, Tensor],
    incoming: Tensor,
) -> None:
    """Compute gradients from those of the states that leave; add to ``found`` and ``incoming``."""
    lay = call.frame.layout
    if lay.single.tokens:
        pack = lay.single
        pulled, states = single.grads(
            call.packed(pack),
            call.frame.options,
            pack.states.take(entered),
            pack.rows.take(do),
            pack.states.take(table),
        )
        for name, grad in pulled.items():
            if name in PARAMETERS:
                found[name] = found[name] + grad
            else:
                pack.rows.put(grad, flat(found[name]))
        pack.states.put(states, incoming)
    if lay.empty.sequences:
        lay.empty.states.put(lay.empty.states.take(table), incoming)


def _wanted(call: Call, need: Sequence[Need]) -> list[tuple[Pack, list[int]]]:
    """Return the packs in which some sequence publishes a state, with those sequences."""
    packs = (call.frame.layout.single, call.frame.layout.empty)
    found = [
        (pack, [i for i, each in enumerate(pack.sequences) if need[each.segment].state])
        for pack in packs
    ]
    return [(pack, wanted) for pack, wanted in found if wanted]


def _write(
    call: Call,
    pack: Pack,
    wanted: Sequence[int],
    states: Tensor,
    need: Sequence[Need],
    out: Mapping[str, Tensor],
) -> None:
    maps = None
    if any(need[pack.sequences[i].segment].transition for i in wanted):
        maps = _transitions(call, pack)
    for i in wanted:
        row = pack.sequences[i].state
        out["state"][row] = states[i]
        if need[pack.sequences[i].segment].transition:
            assert maps is not None
            out["transition"][row] = maps[i]


def _transitions(call: Call, pack: Pack) -> Tensor:
    frame = call.frame
    if pack is frame.layout.single:
        return single.transition(call.packed(pack), frame.options, frame.dtype)
    heads, _, keys = frame.state_shape
    eye = torch.eye(keys, dtype=frame.dtype, device=frame.layout.device)
    return eye.expand(len(pack.sequences), heads, keys, keys)
