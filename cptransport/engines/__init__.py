# SPDX-License-Identifier: Apache-2.0
"""The engine protocol: how one rank computes its own segments of one op.

An engine knows nothing of ranks, transports or plans. The orchestration in ``cptransport.ops``
calls it in this order, with the exchange between the calls::

    forward_local   -> publish -> (receive) -> forward_finish
    backward_local  -> publish -> (receive) -> backward_finish

An engine that has more than one way may have a method ``detail(facts) -> str`` too: how it computes
such calls, for ``last_run()``. One whose calls depend on environment variables of its own names these
in ``variables``.

Conventions shared by all engines:

* A *segment* is a run of local rows of one sequence. Segments may have zero length; rows of no
  segment are padding: they get zero outputs and zero gradients, whatever they hold (NaN included).
* Tables of states have one row per (segment, batch row): ``row = segment * B + b``; ``R =
  len(segments) * B``.
* State layout is ``[HV, K, V]`` (KDA, K-major) or ``[nheads, headdim, dstate]`` (SSD), in
  ``facts.state_dtype``. An engine whose slots are V-major (``[HV, V, K]``, transition transposed)
  says so in ``state_layout``.
* The SSD transition is one natural-log decay per head, ``[nheads]``; the KDA transition is the
  matrix M ``[HV, K, K]``.

Source: algebra of the affine boundary, ``docs/algebra.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from cptransport.same import Same
from cptransport.transport import PartSpec

__all__ = [
    "Engine",
    "Finished",
    "Grads",
    "KDAInputs",
    "KDAOptions",
    "Local",
    "LocalGrad",
    "LocalSegment",
    "Need",
    "OpFacts",
    "OutputGrads",
    "SSDInputs",
    "SSDOptions",
    "Same",
    "Saved",
    "StateTable",
]

#: Resolves to a ``[R, ...]`` table of states when called; calling may wait for peers, so call it as
#: late as possible. Nobody writes to the table after that. It may have a method ``summaries()``: what
#: came, not folded, for an engine that composes by itself, or None (``exchange.Summaries``).
StateTable = Callable[[], Tensor]


@dataclass(frozen=True)
class LocalSegment:
    """One run of local rows of one sequence.

    Attributes:
        start, stop: local row range, ``start <= stop``.
        sequence: index of the sequence in the plan.
        first, last: whether it begins, ends its sequence's chain. Both for a sequence on one rank
            only.
    """

    start: int
    stop: int
    sequence: int
    first: bool
    last: bool

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Need:
    """What one segment must write into the staged tables.

    Attributes:
        state: forward: E, the final state from this segment's seed (the initial state for a first
            segment, zero for others). Backward: dE, the gradient of the state that enters, from
            this segment's seed (the gradient of the final state for a last segment, zero for
            others).
        transition: M (backward writes it again, from what forward kept).
    """

    state: bool
    transition: bool


@dataclass(frozen=True)
class OpFacts:
    """What every rank knows alike about one op call; the only thing an engine may decide on.

    Attributes:
        op: ``"kda"`` or ``"ssd"``.
        device_type: e.g. ``"cpu"``, ``"cuda"``.
        world_size: ranks of the group.
        batch: B.
        heads: H (query/key heads), or ngroups.
        value_heads: HV, or nheads.
        key_dim: K, or dstate.
        value_dim: V, or headdim.
        dtypes: input name -> dtype, of the inputs that were given (``initial_state`` included).
        state_dtype: float64 for float64 inputs, else float32.
        max_segments: the plan's maximum number of segments of a rank (n).
        max_tokens: the plan's maximum number of local rows of a rank.
        requires_grad: names of the inputs that require gradients.
        options: the op's ``KDAOptions`` or ``SSDOptions``.
        named: the caller asked for this engine by name, and so answers for what only the data would
            show; an engine may then serve what it declines as an automatic choice.
    """

    op: str
    device_type: str
    world_size: int
    batch: int
    heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    dtypes: Mapping[str, torch.dtype]
    state_dtype: torch.dtype
    max_segments: int
    max_tokens: int
    requires_grad: frozenset[str]
    options: KDAOptions | SSDOptions
    named: bool = False


@dataclass(frozen=True)
class KDAOptions:
    """Options of ``chunk_kda``; names and meanings as there."""

    scale: float
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False


@dataclass(frozen=True)
class KDAInputs:
    """One rank's inputs of KDA.

    Attributes:
        q, k: ``[B, T, H, K]``.
        v: ``[B, T, HV, V]``.
        g: ``[B, T, HV, K]``, natural-log decay, or the gate's input with ``use_gate_in_kernel``.
        beta: ``[B, T, HV]``.
        A_log: ``[HV]`` or None. dt_bias: ``[HV, K]`` (already reshaped) or None.
        seed: ``[R, HV, K, V]`` in the state dtype: initial states in the rows of first segments,
            zeros elsewhere. None: all zero.
        options: see ``KDAOptions``.
        outgoing: whether the states that leave last segments are read, and may get a gradient.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    seed: Tensor | None
    options: KDAOptions
    outgoing: bool = True


@dataclass(frozen=True)
class SSDOptions:
    """Options of the SSD core; names and meanings as in ``mamba_chunk_scan_combined``."""

    chunk_size: int
    dt_softplus: bool = False
    dt_min: float = 0.0
    dt_max: float = float("inf")


@dataclass(frozen=True)
class SSDInputs:
    """One rank's inputs of SSD.

    Attributes:
        x: ``[B, T, nheads, headdim]``. dt: ``[B, T, nheads]``. A: ``[nheads]``.
        B, C: ``[B, T, ngroups, dstate]``.
        D: ``[nheads]`` or ``[nheads, headdim]`` or None. z: like x or None. dt_bias: ``[nheads]``
            or None.
        seed: ``[R, nheads, headdim, dstate]`` as in ``KDAInputs``.
        options: see ``SSDOptions``.
    """

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    seed: Tensor | None
    options: SSDOptions


@dataclass(frozen=True)
class Saved:
    """What the backward needs: tensors (for ``save_for_backward``; the same number on every rank) and plain data."""

    tensors: tuple[Tensor | None, ...]
    meta: Any = None


@dataclass(frozen=True)
class Finished:
    """Result of the forward.

    Attributes:
        output: o ``[B, T, HV, V]`` or y ``[B, T, nheads, headdim]`` in v's (x's) dtype.
        outgoing: ``[R, ...]`` states that leave the segments; only the rows of last segments are
            read. May be None where the inputs say that nobody reads them.
        saved: what the backward needs; nothing in it aliases a staged tensor.
    """

    output: Tensor
    outgoing: Tensor | None
    saved: Saved


@dataclass(frozen=True)
class OutputGrads:
    """Gradients that enter a backward.

    Attributes:
        output: gradient of the output, same shape and dtype, any strides.
        seed: ``[R, ...]`` gradients of final states in the rows of last segments, zeros elsewhere.
            None: all zero.
    """

    output: Tensor
    seed: Tensor | None


@dataclass(frozen=True)
class Grads:
    """Result of a backward.

    Attributes:
        inputs: input name -> gradient (this rank's own contribution for replicated inputs), in the
            input's dtype.
        incoming: ``[R, ...]`` gradients of the states that entered the segments; only first
            segments' rows are read.
    """

    inputs: Mapping[str, Tensor | None]
    incoming: Tensor


#: Engine-private carriers between the two halves of a pass.
Local = Any
LocalGrad = Any


@runtime_checkable
class Engine(Protocol):
    """Local compute of one op; one per op and implementation."""

    op: str
    name: str

    def eligible(self, facts: OpFacts) -> str | None:
        """Return None when it serves forward and backward, else the reason. A pure function of the facts."""
        ...

    def slot_parts(self, facts: OpFacts) -> tuple[PartSpec, ...]:
        """Return the parts ``state`` and ``transition``, ``[max_segments * B, ...]``, without routes."""
        ...

    def forward_local(
        self,
        inputs: Any,
        segments: Sequence[LocalSegment],
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> Local:
        """Write what ``need`` says into ``out["state"]`` and ``out["transition"]``, and no other row."""
        ...

    def forward_finish(self, local: Local, incoming: StateTable) -> Finished:
        """Compute outputs and outgoing states from the states that enter (first segments: their seed)."""
        ...

    def backward_local(
        self,
        saved: Saved,
        grad_out: OutputGrads,
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> LocalGrad:
        """Write what ``need`` says: dE into ``out["state"]``, M again into ``out["transition"]``."""
        ...

    def backward_finish(self, local_grad: LocalGrad, grad_outgoing: StateTable) -> Grads:
        """Compute gradients of inputs and of incoming states from the gradients of the states that leave."""
        ...
