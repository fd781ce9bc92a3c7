# SPDX-License-Identifier: Apache-2.0
"""The algebra of summaries: how one step of a fold acts on a state, and on a transition.

A segment maps the state that enters to the one that leaves, ``S -> M S + E``; a gradient goes the
other way, ``dS -> M^T dS + dE``. What M is depends on the op:

* ``"kda"``: a matrix ``[HV, K, K]``; K-major states ``[HV, K, V]``, or V-major ``[HV, V, K]`` with
  the transition transposed;
* ``"ssd"``: a natural-log decay ``[nheads]``; states ``[nheads, headdim, dstate]``; its transpose
  is itself.

Two segments are one, ``(M2, E2) after (M1, E1) = (M2 M1, M2 E1 + E2)``: the state part is a step of
a fold, the transition part is ``compose``. In the backward the map of a transition is its
transpose, so that of both is stored as ``M1 M2``.

Composition is done in the tables' dtype (float32, or float64 for float64 inputs), never in TF32.

Source: docs/algebra.md.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from cptransport.precision import ieee_math

__all__ = ["Advance", "Compose", "advance", "compose", "exactly"]

#: ``compose(later, earlier) -> transition of both``, in travel order, over any leading axes.
Compose = Callable[[Tensor, Tensor], Tensor]


class Advance(Protocol):
    """A fold step: ``M state + summary`` over any leading axes, in ``out`` if there is one."""

    def __call__(
        self, transition: Tensor, state: Tensor, summary: Tensor, out: Tensor | None = None
    ) -> Tensor:
        """Return the state after the segment."""
        ...


def advance(op: str, direction: str, layout: str) -> Advance:
    """Return the fold step of an op.

    Args:
        op: ``"kda"`` or ``"ssd"``.
        direction: ``"forward"`` (M) or ``"backward"`` (M transposed).
        layout: ``"k_major"`` or ``"v_major"``, of the slot's tables; only the KDA step depends on
            it.
    """
    if op == "ssd":
        return _decay
    transposed = direction == "backward"
    if layout == "v_major":
        return _right_transposed if transposed else _right
    return _left_transposed if transposed else _left


def compose(op: str, direction: str, layout: str) -> Compose:
    """Return how the transitions of two segments become one; arguments as ``advance``."""
    if op == "ssd":
        return torch.add
    # K-major, forward, a transition is applied from the left: the later one stands first. A V-major
    # table holds transposes, a backward applies transposes; each reverses the order of a product.
    if (direction == "backward") == (layout == "v_major"):
        return _later_first
    return _earlier_first


def exactly(op: str, device_type: str) -> AbstractContextManager[object]:
    """Return the context that ``advance`` and ``compose`` of an op need: products of matrices never in TF32.

    Element by element nothing is ever narrowed, and the context would show in the time of a fold.
    """
    return nullcontext() if op == "ssd" else ieee_math(device_type)


def _decay(transition: Tensor, state: Tensor, summary: Tensor, out: Tensor | None = None) -> Tensor:
    decay = transition.exp().unsqueeze(-1).unsqueeze(-1)
    return torch.addcmul(summary, decay, state, out=out)


def _left(transition: Tensor, state: Tensor, summary: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.add(transition @ state, summary, out=out)


def _left_transposed(
    transition: Tensor, state: Tensor, summary: Tensor, out: Tensor | None = None
) -> Tensor:
    return torch.add(transition.mT @ state, summary, out=out)


def _right(transition: Tensor, state: Tensor, summary: Tensor, out: Tensor | None = None) -> Tensor:
    return torch.add(state @ transition, summary, out=out)


def _right_transposed(
    transition: Tensor, state: Tensor, summary: Tensor, out: Tensor | None = None
) -> Tensor:
    return torch.add(state @ transition.mT, summary, out=out)


def _later_first(later: Tensor, earlier: Tensor) -> Tensor:
    return later @ earlier


def _earlier_first(later: Tensor, earlier: Tensor) -> Tensor:
    return earlier @ later
