# SPDX-License-Identifier: Apache-2.0
"""Forward only, piece by piece: the states that a piece leaves behind are those that the next begins with."""

from __future__ import annotations

import torch
from torch import Tensor

from cptransport import CPContext, build_plan, threads
from cptransport.ops import causal_conv1d, mamba_chunk_scan_combined
from cptransport.testing import relative_error
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import reference
from cptransport.transport import BoundaryTransport

#: Tokens, ranks and layout of each piece; some are shorter than the convolution's halo, one is empty.
PIECES = [
    (1, 3, "zigzag"),
    (1, 2, "contiguous"),
    (0, 2, "zigzag"),
    (2, 4, "zigzag"),
    (17, 1, "contiguous"),
    (20, 3, "zigzag"),
    (19, 2, "contiguous"),
]
CASE = OpCase.of(
    OpSpec(
        "mixer",
        [0, sum(tokens for tokens, _, _ in PIECES)],
        1,
        width=5,
        heads=2,
        value_heads=4,
        dtype="float64",
        options={"chunk_size": 16},
        optional=("conv1d_bias", "initial_states"),
    )
)

_States = tuple[Tensor | None, Tensor | None]


def _advance(
    transport: BoundaryTransport, tokens: Tensor, layout: str, states: _States
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's y of a piece, and the states of its owner."""
    spec, given = CASE.spec, CASE.parameters
    plan = build_plan([0, tokens.shape[1]], world_size=transport.world_size, layout=layout)
    context = CPContext(plan, transport)
    heads, groups = (spec.value_heads, spec.value_dim), (spec.heads, spec.key_dim)
    inner, grouped = heads[0] * heads[1], groups[0] * groups[1]
    z, xbc, dt = plan.shard(tokens, transport.rank).split(
        [inner, inner + 2 * grouped, heads[0]], dim=-1
    )
    xbc, window = causal_conv1d(
        xbc,
        given["conv1d_weight"],
        given["conv1d_bias"],
        cp_context=context,
        activation="silu",
        initial_state=states[0],
        output_final_state=True,
    )
    x, B, C = xbc.split([inner, grouped, grouped], dim=-1)
    y, state = mamba_chunk_scan_combined(
        x.unflatten(-1, heads),
        dt,
        given["A"],
        B.unflatten(-1, groups),
        C.unflatten(-1, groups),
        16,
        cp_context=context,
        D=given["D"],
        z=z.unflatten(-1, heads),
        dt_bias=given["dt_bias"],
        dt_softplus=True,
        initial_states=states[1],
        return_final_states=True,
    )
    assert window is not None
    return y.flatten(2), window, state


def test_pieces_of_changing_groups_give_the_whole() -> None:
    """Convolution and scan over pieces, each on other ranks, against the recurrence over all tokens."""
    right = reference(CASE)
    states: _States = (None, CASE.initial)
    outputs, start = [], 0
    for count, ranks, layout in PIECES:
        tokens = CASE.tokens["zxbcdt"][:, start : start + count]

        def body(
            transport: BoundaryTransport,
            tokens: Tensor = tokens,
            layout: str = layout,
            states: _States = states,
        ) -> tuple[Tensor, Tensor, Tensor]:
            with torch.no_grad():
                return _advance(transport, tokens, layout, states)

        found = threads.run(body, ranks, 20.0)
        plan = build_plan([0, count], world_size=ranks, layout=layout)
        outputs.append(plan.unshard([y for y, _, _ in found]))
        # Owners have them, the others zeros.
        window, state = (torch.stack(each).sum(0) for each in list(zip(*found, strict=True))[1:])
        states = window, state
        start += count
    assert relative_error(torch.cat(outputs, 1), right.output) < 1e-9
    assert states[1] is not None
    assert relative_error(states[1], right.final) < 1e-9
