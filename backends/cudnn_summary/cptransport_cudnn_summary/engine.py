# SPDX-License-Identifier: Apache-2.0
"""Engine ``cudnn``: KDA through cuDNN's registered ops, V-major slots.

What of a rank's segments is computed when, and by how many calls (a call takes any number of
segments)::

    forward_local     a first segment: forward from its seed; E is its final state
                      interior ones:   E and M                          (``contract``: how)
    forward_finish    only segments:   forward from their seeds, before waiting
                      last ones:       forward from what came in
                      interior ones:   what is left to do
    backward_local    last segments:   backward from their seeds; dE is the initial states' gradient
                      interior ones:   dE, and M again
    backward_finish   all others:      backward from what came in

The local backward with the true entering state and the true leaving gradient is complete; nothing
is differentiated through E and M, so all of this runs without autograd, as ops call their engines.
Most of a call's time is the host's: what no tensor changes is worked out once (``call.Frame``, the
turns of both directions), and nothing is copied that is right where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from cptransport.engines import (
    Finished,
    Grads,
    KDAInputs,
    KDAOptions,
    LocalSegment,
    Need,
    OpFacts,
    OutputGrads,
    Saved,
    StateTable,
)
from cptransport.transport import PartSpec
from cptransport_cudnn_summary import BACKEND, backward, forward
from cptransport_cudnn_summary.call import contract_of
from cptransport_cudnn_summary.contract import Kind
from cptransport_cudnn_summary.resolve import insist, resolve

__all__ = ["KDA_ENGINE", "CudnnKDA"]

#: Natural log decay that 16 tokens may sum to: beyond it a chunk's factors leave float32.
_CHUNK_TOKENS, _CHUNK_DECAY = 16, 87.0
#: Sequences times heads that cuDNN's grids have room for.
_GRID = 65535


class CudnnKDA:
    """KDA by cuDNN; 16-bit inputs, float32 states."""

    op = "kda"
    name = "cudnn"
    state_layout = "v_major"
    variables = tuple(variable.name for variable in BACKEND.variables)

    def eligible(self, facts: OpFacts) -> str | None:
        """Serve what cuDNN was seen to serve here in both directions, with gates that are bounded.

        Gates that may be stronger than the kernels' range are declined, unless the caller named
        this engine and so answers for them.

        Raises:
            BackendUnavailableError: it would serve, but not as ``CULA_CP_CUDNN_CONCAT=require`` wants.
            EnvVarError: one of the variables has no valid value.
        """
        if facts.op != "kda":
            return f"serves kda, not {facts.op}"
        options = facts.options
        assert isinstance(options, KDAOptions)
        resolved = resolve(Kind.of_facts(facts))
        if isinstance(resolved, str):
            return resolved
        if facts.max_segments * facts.batch * facts.value_heads > _GRID:
            return (
                f"needs segments * B * HV <= {_GRID}, not {facts.max_segments} * {facts.batch} * "
                f"{facts.value_heads}"
            )
        reason = None if facts.named else _unbounded(options)
        if reason is None:
            insist(resolved)
        return reason

    def slot_parts(self, facts: OpFacts) -> tuple[PartSpec, ...]:
        """Give state ``[n * B, HV, V, K]`` and transition (its transpose) ``[n * B, HV, K, K]``."""
        rows = facts.max_segments * facts.batch
        heads, keys = facts.value_heads, facts.key_dim
        return (
            PartSpec("state", (rows, heads, facts.value_dim, keys), facts.state_dtype),
            PartSpec("transition", (rows, heads, keys, keys), facts.state_dtype),
        )

    def detail(self, facts: OpFacts) -> str:
        """Say how calls like this one are computed."""
        return "; ".join(contract_of(Kind.of_facts(facts)).notes)

    def forward_local(
        self,
        inputs: KDAInputs,
        segments: Sequence[LocalSegment],
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> forward.Forward:
        """See ``Engine``."""
        return forward.begin(inputs, segments, need, out)

    def forward_finish(self, local: forward.Forward, incoming: StateTable) -> Finished:
        """See ``Engine``."""
        return forward.finish(local, incoming)

    def backward_local(
        self,
        saved: Saved,
        grad_out: OutputGrads,
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> backward.Backward:
        """See ``Engine``."""
        return backward.begin(saved, grad_out, need, out)

    def backward_finish(self, local_grad: backward.Backward, grad_outgoing: StateTable) -> Grads:
        """See ``Engine``."""
        return backward.finish(local_grad, grad_outgoing)


def _unbounded(options: KDAOptions) -> str | None:
    """Say why a gate may leave the kernels' range, None if it cannot."""
    least = -_CHUNK_DECAY / _CHUNK_TOKENS
    if options.use_gate_in_kernel and options.lower_bound is not None:
        if options.lower_bound > least:
            return None
        return (
            f"its kernels need a gate above {least:g} on average, lower_bound is "
            f"{options.lower_bound:g}"
        )
    if options.safe_gate:
        return None
    return (
        f"its kernels need a gate above {least:g} on average over {_CHUNK_TOKENS} tokens, which "
        "nothing says of this one: give lower_bound or safe_gate, or name the engine"
    )


KDA_ENGINE = CudnnKDA()
