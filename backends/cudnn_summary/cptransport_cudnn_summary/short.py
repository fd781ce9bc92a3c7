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


def summaries(
    call: Call, seed: Tensor | None, need: Sequence[Need], out: Mapping[str, Tensor]
) -> None:
    """Write E and M."""
    for pack, wanted in _wanted(call, need):
        states = call.states(seed, pack)
        if pack is call.layout.single:
            states = single.run(call.packed(pack), call.options, states)[1]
        _write(call, pack, wanted, states, need, out)


def grads(
    call: Call,
    do: Tensor,
    seed: Tensor | None,
    need: Sequence[Need],
    out: Mapping[str, Tensor],
) -> None:
    """Write dE and M; ``do`` are the rows of single tokens."""
    for pack, wanted in _wanted(call, need):
        found = call.states(seed, pack)
        if pack is call.layout.single:
            found = single.entering_grad(call.packed(pack), call.options, do, found)
        _write(call, pack, wanted, found, need, out)


def enter(call: Call, table: Tensor, output: Tensor, outgoing: Tensor) -> None:
    """Compute outputs and leaving states from those that enter."""
    lay = call.layout
    if lay.single.tokens:
        o, states = single.run(call.packed(lay.single), call.options, lay.single.take_states(table))
        lay.single.put(o, flat(output))
        lay.single.put_states(states, outgoing)
    if lay.empty.sequences:
        lay.empty.put_states(lay.empty.take_states(table), outgoing)


def leave(
    call: Call,
    entered: Tensor,
    do: Tensor,
    table: Tensor,
    found: dict[str, Tensor],
    incoming: Tensor,
) -> None:
    """Compute gradients from those of the states that leave; add to ``found`` and ``incoming``."""
    lay = call.layout
    if lay.single.tokens:
        pack = lay.single
        pulled, states = single.grads(
            call.packed(pack),
            call.options,
            pack.take_states(entered),
            do,
            pack.take_states(table),
        )
        for name, grad in pulled.items():
            if name in PARAMETERS:
                found[name] = found[name] + grad
            else:
                pack.put(grad, flat(found[name]))
        pack.put_states(states, incoming)
    if lay.empty.sequences:
        lay.empty.put_states(lay.empty.take_states(table), incoming)


def _wanted(call: Call, need: Sequence[Need]) -> list[tuple[Pack, list[int]]]:
    """Return the packs in which some sequence publishes a state, with those sequences."""
    packs = (call.layout.single, call.layout.empty)
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
    if pack is call.layout.single:
        return single.transition(call.packed(pack), call.options, call.dtype)
    heads, _, keys = call.state_shape
    eye = torch.eye(keys, dtype=call.dtype, device=call.layout.device)
    return eye.expand(len(pack.sequences), heads, keys, keys)
