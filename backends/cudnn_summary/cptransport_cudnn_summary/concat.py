# SPDX-License-Identifier: Apache-2.0
"""cuDNN's concatenated-summary API: found by signature and schema, checked by numbers, then used.

It composes summaries inside KDA's forward and backward. Its source is revision
``9e056425989e75f406a5ce3ad58cb563e4dff8b5`` of the frontend; no release has it (1.32.2 does not), and
of its arguments only ``preceding_state_update`` and ``preceding_transition`` are known by name. So
the rest is looked up, and what cannot be looked up is assumed and then checked:

* forward: ``preceding_state_update [P, N, HV, V, K]`` and ``preceding_transition [P, N, HV, K, K]``,
  float32, in causal order: ``X0 = initial_state; X0 = X0 @ transition[j] + state_update[j]``;
* backward: a pair of the same form under another prefix, for the segments that follow, in causal
  order: ``dX = d_final_state; dX = dX @ transition[j].mT + state_update[j]``, the last j first. The
  forward's pair, if the backward takes it too, may be left out in favour of ``initial_state``.

``fault`` runs both on a small case and compares with the composition in float32. Whatever differs
from what is assumed shows there, and the composition outside goes on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cptransport.transport import Gathered

__all__ = ["Binding", "Stack", "fault", "find_binding", "stack"]

_PRECEDING = "preceding"
_FORWARD = (f"{_PRECEDING}_state_update", f"{_PRECEDING}_transition")
#: Larger than the rounding of 16-bit operands, far below what a wrong order or a missing transpose
#: makes of the check's case.
_CLOSE = 2e-2


@dataclass(frozen=True)
class Binding:
    """Names of the arguments.

    Attributes:
        forward: of the forward op, state update and transition of the segments before.
        backward: of the backward op, the same of the segments after.
    """

    forward: tuple[str, str]
    backward: tuple[str, str]

    def __str__(self) -> str:
        return f"forward {', '.join(self.forward)}; backward {', '.join(self.backward)}"


def find_binding(public: Any, forward: Any, backward: Any) -> tuple[Binding | None, str]:
    """Look the arguments up.

    Args:
        public: ``kimi_delta_attention``. forward, backward: overloads of the registered ops.

    Returns:
        The binding, or None and what is absent.
    """
    given = set(inspect.signature(public).parameters) if callable(public) else set()
    for where, names in (("the signature", given), ("the forward op's schema", _names(forward))):
        missing = [name for name in _FORWARD if name not in names]
        if missing:
            return None, f"absent: {where} has no {' and no '.join(missing)}"
    pairs = _pairs(_names(backward))
    pairs.pop(_PRECEDING, None)
    if len(pairs) != 1:
        return None, (
            "absent: the backward op's schema has no such pair for the segments that follow"
            if not pairs
            else f"not understood: the backward op's schema has the pairs {sorted(pairs)}"
        )
    return Binding(_FORWARD, next(iter(pairs.values()))), ""


def _names(op: Any) -> set[str]:
    return {argument.name for argument in op._schema.arguments}


def _pairs(names: set[str]) -> dict[str, tuple[str, str]]:
    """Return prefix -> (state argument, transition argument)."""
    pairs = {}
    for name in names:
        prefix, _, rest = name.partition("_")
        states = [n for n in names if n.startswith(f"{prefix}_state_")]
        if rest == "transition" and len(states) == 1:
            pairs[prefix] = (states[0], name)
    return pairs


@dataclass(frozen=True)
class Stack:
    """Summaries that enter the segments of one call, as cuDNN takes them.

    Attributes:
        start: ``[N, HV, V, K]``, the finished state of each chain's first segment in travel order.
        state: ``[P, N, HV, V, K]`` of the others, causal order. transition: ``[P, N, HV, K, K]``.
    """

    start: Tensor
    state: Tensor
    transition: Tensor


def stack(
    sources: list[list[tuple[int, int]]],
    gathered: Gathered,
    seed: Tensor,
    key_dim: int,
    *,
    reverse: bool,
) -> Stack:
    """Lay gathered summaries side by side.

    A segment with fewer sources than others is padded with what changes nothing, (0, I). One
    segment whose sources are the only row of successive ranks, densely gathered, costs no copy.

    Args:
        sources: per segment (rank, row) in travel order, possibly none.
        gathered: parts ``state`` and ``transition``.
        seed: ``[N, HV, V, K]``; the start of segments without sources.
        key_dim: K.
        reverse: travel order is the reverse of causal order.
    """
    rows = [chain[1:] for chain in sources]
    start = seed.clone()
    for index, chain in enumerate(sources):
        if chain:
            rank, row = chain[0]
            start[index] = gathered.tensor("state", rank)[row]
    most = max(map(len, rows), default=0)
    if most == 0:
        heads, values = seed.shape[1:3]
        count = len(sources)
        return Stack(
            start,
            seed.new_empty(0, count, heads, values, key_dim),
            seed.new_empty(0, count, heads, key_dim, key_dim),
        )
    if reverse:
        rows = [chain[::-1] for chain in rows]
    if len(rows) == 1 and (tables := _dense(gathered, rows[0])):
        first, row = rows[0][0]
        run = slice(first, first + most)
        # A slice of slots of more than one row has gaps.
        return Stack(start, *(table[run, row : row + 1].contiguous() for table in tables))
    # Pads stand where the composition begins: before all others in travel order.
    padded = [
        [*chain, *[None] * (most - len(chain))]
        if reverse
        else [*[None] * (most - len(chain)), *chain]
        for chain in rows
    ]
    eye = torch.eye(key_dim, dtype=seed.dtype, device=seed.device).expand(seed.shape[1], -1, -1)
    pads = {"state": torch.zeros_like(seed[0]), "transition": eye}

    def table(part: str) -> Tensor:
        columns = [
            torch.stack(
                [pads[part] if s is None else gathered.tensor(part, s[0])[s[1]] for s in chain]
            )
            for chain in padded
        ]
        return torch.stack(columns, 1)

    return Stack(start, table("state"), table("transition"))


def _dense(gathered: Gathered, chain: list[tuple[int, int]]) -> list[Tensor]:
    """Return the dense tables of both parts if a chain is one row of successive ranks, else nothing."""
    first, row = chain[0]
    tables = [gathered[part] for part in ("state", "transition")]
    if chain != [(first + i, row) for i in range(len(chain))]:
        return []
    found = [table for table in tables if isinstance(table, Tensor)]
    return found if len(found) == len(tables) else []


#: ``run(initial, preceding) -> (o, final)`` and ``run_backward(initial, d_final, following) ->
#: (dq, dk, dv, dg, dbeta, d_initial)`` on the check's inputs.
RunForward = Callable[[Tensor, "Stack | None"], tuple[Tensor, ...]]
RunBackward = Callable[[Tensor, Tensor, "Stack | None"], tuple[Tensor, ...]]


def fault(
    forward: RunForward, backward: RunBackward, shape: tuple[int, int, int, int], like: Tensor
) -> str | None:
    """Compare the API with the composition outside; None: it computes what is assumed.

    Args:
        forward, backward: run the ops on some inputs, with or without summaries.
        shape: N, HV, V, K.
        like: gives device and dtype of states.

    Stream: waits for the device.
    """
    count, heads, values, keys = shape
    generator = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        made = torch.randn(*sizes, generator=generator, dtype=torch.float64)
        return made.to(like.device, like.dtype)

    start, end = normal(count, heads, values, keys), normal(count, heads, values, keys)
    others = normal(3, count, heads, values, keys)
    # Far from symmetric and of order one, so that any other order or transpose shows.
    maps = normal(3, count, heads, keys, keys) / keys**0.5
    entering, leaving = start.double(), end.double()
    for j in range(3):
        entering = entering @ maps[j].double() + others[j].double()
        leaving = leaving @ maps[2 - j].double().mT + others[2 - j].double()
    entering, leaving = entering.to(like.dtype), leaving.to(like.dtype)
    try:
        pairs = [
            ("forward", forward(start, Stack(start, others, maps)), forward(entering, None)),
            (
                "backward",
                backward(start, end, Stack(end, others, maps)),
                backward(start, leaving, None),
            ),
        ]
        for direction, found, right in pairs:
            for got, want in zip(found, right, strict=True):
                error = (got.double() - want.double()).norm() / want.double().norm().clamp(
                    min=1e-30
                )
                if not float(error) < _CLOSE:
                    return f"its {direction} differs from the composition by {float(error):.1e}"
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    return None
