# SPDX-License-Identifier: Apache-2.0
"""The Mamba2 SSD core, sequence-sharded: ``mamba_chunk_scan_combined`` and the explicit forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cptransport.context import CPContext
from cptransport.engines import SSDInputs, SSDOptions
from cptransport.errors import OpInputError
from cptransport.ops.call import OpCall, SavedCall, apply, checked, compute, run_backward
from cptransport.ops.inputs import (
    check_batch,
    check_context,
    check_floating,
    check_same_dtype,
    check_shape,
    count_states,
    op_device,
    refuse_upstream,
    state_dtype,
)
from cptransport.ops.prepare import make_call, recall
from cptransport.ops.traced import Like, register, trace

__all__ = ["SSDForward", "SSDGrads", "mamba_chunk_scan_combined", "ssd_backward", "ssd_forward"]

_UPSTREAM = {
    "seq_idx": "the plan in cp_context says where sequences start",
    "cu_seqlens": "the plan in cp_context says where sequences start",
    "chunk_indices": "engines make their own chunk tables from the plan",
    "chunk_offsets": "engines make their own chunk tables from the plan",
    "out": "the op allocates its output",
    "return_varlen_states": "return_final_states gives one state per sequence of the plan",
    "return_intermediate_states": "intermediate states stay on their rank",
    "state_dtype": "states are fp32 (fp64 for fp64 inputs)",
}


@dataclass(frozen=True)
class SSDForward:
    """Result of ``ssd_forward``: y ``[B, T, nheads, headdim]``, final_states if asked, what ``ssd_backward`` takes."""

    y: Tensor
    final_states: Tensor | None
    saved: SavedCall


@dataclass(frozen=True)
class SSDGrads:
    """Gradients of the SSD core's inputs: this rank's tokens and contributions; None if absent."""

    dx: Tensor | None
    ddt: Tensor | None
    dA: Tensor | None
    dB: Tensor | None
    dC: Tensor | None
    dD: Tensor | None
    dz: Tensor | None
    ddt_bias: Tensor | None
    dinitial_states: Tensor | None


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    cp_context: CPContext,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    engine: str | None = None,
    **upstream: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba2's state-space dual scan over sequences that are sharded as ``cp_context`` says.

    ``d = clamp(softplus(dt + dt_bias))``, ``S_t = exp(A d_t) S_{t-1} + d_t x_t B_t^T``, ``y_t = S_t
    C_t + D x_t``, times ``silu(z_t)``.

    Args:
        x: ``[B, T, nheads, headdim]``, T this rank's local length.
        dt: ``[B, T, nheads]``.
        A: ``[nheads]``, negative.
        B, C: ``[B, T, ngroups, dstate]``, nheads a multiple of ngroups.
        chunk_size: a power of two >= 16. No length need divide by it.
        cp_context: from ``build_cp_context``. Packed plans need B = 1; a plan of one sequence takes
            any B.
        D: ``[nheads]`` or ``[nheads, headdim]``.
        z: like x; the output is multiplied by ``silu(z)``.
        dt_bias: ``[nheads]``.
        initial_states: ``[N, nheads, headdim, dstate]`` any float dtype, replicated, one row per
            sequence (dense: N = B).
        dt_softplus: apply softplus to ``dt + dt_bias``.
        dt_limit: clamp of the result.
        return_final_states: return the states after each sequence's last token.
        engine: beats ``CULA_CP_ENGINE``.
        upstream: mamba's other arguments; refused by name.

    Returns:
        y ``[B, T, nheads, headdim]`` in x's dtype; with ``return_final_states`` also ``[N, nheads,
        headdim, dstate]`` fp32 (fp64 for fp64 inputs) on the rank that owns each sequence's last
        token, zeros elsewhere.

    Raises:
        OpInputError (a ValueError): shapes, dtypes or options do not fit together or do not fit the
            plan.
        UnsupportedOptionError: an argument or mode that is not served.
        PeerFailedError, TransportTimeoutError: another rank failed or did not come.

    Collective: yes, forward and backward, over the context's transport.
    Stream: ordered on the current stream.
    Source: Mamba-2 paper, section 6; argument names as ``mamba_ssm.ops.triton.ssd_combined``.
    """
    check_context(cp_context)
    if torch.compiler.is_dynamo_compiling():
        refuse_upstream("mamba_chunk_scan_combined", upstream, _UPSTREAM)
        given = {
            "x": x, "dt": dt, "A": A, "B": B, "C": C, "D": D, "z": z, "dt_bias": dt_bias,
            "initial_states": initial_states,
        }  # fmt: skip
        settings = {
            "chunk_size": chunk_size, "dt_softplus": dt_softplus, "dt_limit": dt_limit,
            "return_final_states": return_final_states, "engine": engine,
        }  # fmt: skip
        y, final_states = trace("mamba_chunk_scan_combined", cp_context, given, settings)
        return (y, final_states) if return_final_states else y
    inputs = ScanInputs(x, dt, A, B, C, D, z, dt_bias, initial_states)

    def prepare() -> tuple[OpCall, str]:
        return prepare_scan(
            inputs,
            cp_context,
            chunk_size,
            dt_softplus=dt_softplus,
            dt_limit=dt_limit,
            engine=engine,
            final=return_final_states,
            **upstream,
        )

    call = checked(cp_context, "mamba_chunk_scan_combined", prepare)
    y, final_states = apply(call, initial_states, *inputs.tensors().values())
    return (y, final_states) if return_final_states else y


def ssd_forward(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    *,
    cp_context: CPContext,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    **options: Any,
) -> SSDForward:
    """Forward of ``mamba_chunk_scan_combined`` without autograd. Arguments as there.

    Returns:
        SSDForward: hand ``saved`` to ``ssd_backward``. Tensors in it alias inputs; do not write to
            those before.

    Raises, Collective, Stream: as ``mamba_chunk_scan_combined``.
    """
    check_context(cp_context)
    inputs = ScanInputs(x, dt, A, B, C, D, z, dt_bias, initial_states)

    def prepare() -> tuple[OpCall, str]:
        return prepare_scan(inputs, cp_context, chunk_size, final=True, **options)

    with torch.no_grad():
        tensors = tuple(inputs.tensors().values())
        call, result = compute(cp_context, "ssd_forward", prepare, tensors, initial_states)
    final_states = result.final_states if return_final_states else None
    return SSDForward(result.output, final_states, SavedCall(call, result.saved))


def ssd_backward(saved: SavedCall, dy: Tensor, d_final_states: Tensor | None = None) -> SSDGrads:
    """Backward of ``ssd_forward``.

    Args:
        saved: from ``ssd_forward``.
        dy: gradient of y, ``[B, T, nheads, headdim]``.
        d_final_states: gradient of the final states; rows of sequences that this rank does not own
            are ignored.

    Returns:
        SSDGrads: the gradient of every input that was given.

    Raises:
        OpInputError: a gradient's shape is not that of its output.

    Collective: yes, in one order on all ranks.
    """
    call = saved.call
    facts, local = call.facts, call.context.local
    shape = (facts.batch, local.num_tokens, facts.value_heads, facts.value_dim)

    def check() -> None:
        check_shape("dy", dy, shape, "[B, T, nheads, headdim]")
        if d_final_states is not None:
            check_shape(
                "d_final_states", d_final_states, call.state_shape, "the final states' shape"
            )

    with torch.no_grad():
        grads, d_initial = run_backward(call, saved.saved, dy, d_final_states, check=check)
    return SSDGrads(
        **{f"d{name}": grads.get(name) for name in call.names}, dinitial_states=d_initial
    )


@dataclass(frozen=True)
class ScanInputs:
    """The tensors of a call."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None
    z: Tensor | None
    dt_bias: Tensor | None
    initial_states: Tensor | None

    def tensors(self) -> dict[str, Tensor | None]:
        """Return all but the initial states, in the order that the engine's inputs are made of."""
        names = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
        return {name: getattr(self, name) for name in names}


def check_chunk_size(chunk_size: object) -> int:
    """Return a chunk size that is a power of two >= 16.

    Raises:
        OpInputError: it is not.
    """
    if (
        isinstance(chunk_size, bool)
        or not isinstance(chunk_size, int)
        or chunk_size < 16
        or chunk_size & (chunk_size - 1)
    ):
        raise OpInputError(f"chunk_size must be a power of two >= 16, got {chunk_size!r}")
    return chunk_size


def _check_dt_limit(dt_limit: object) -> tuple[float, float]:
    try:
        low, high = map(float, dt_limit)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        low, high = 1.0, 0.0
    if not low <= high:
        raise OpInputError(f"dt_limit must be (low, high) with low <= high, got {dt_limit!r}")
    return low, high


def prepare_scan(
    given: ScanInputs,
    context: CPContext,
    chunk_size: int,
    /,
    *,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    engine: str | None = None,
    final: bool = True,
    **upstream: Any,
) -> tuple[OpCall, str]:
    """Check a call and choose what runs it; see ``agree``."""
    refuse_upstream("mamba_chunk_scan_combined", upstream, _UPSTREAM)
    settings = _Settings(chunk_size, dt_softplus, _check_dt_limit(dt_limit), engine, final)
    return recall(
        context,
        "mamba_chunk_scan_combined",
        (*given.tensors().values(), given.initial_states),
        settings,
        lambda: _make(given, context, settings),
    )


class _Settings(NamedTuple):
    chunk_size: int
    dt_softplus: bool
    dt_limit: tuple[float, float]
    engine: str | None
    final: bool


def _make(given: ScanInputs, context: CPContext, settings: _Settings) -> tuple[OpCall, str]:
    """Make a call of a signature that the context has not seen."""
    chunk_size, dt_softplus, (low, high), engine, final = settings
    check_chunk_size(chunk_size)
    check_shape("x", given.x, (None, None, None, None), "[B, T, nheads, headdim]")
    states = check_batch("x", given.x, context)
    batch, length, nheads, headdim = given.x.shape
    check_shape("dt", given.dt, (batch, length, nheads), "[B, T, nheads]")
    check_shape("A", given.A, (nheads,), "[nheads]")
    check_shape("B", given.B, (batch, length, None, None), "[B, T, ngroups, dstate]")
    check_shape("C", given.C, tuple(given.B.shape), "[B, T, ngroups, dstate]")
    ngroups, dstate = given.B.shape[2:]
    if min(nheads, headdim, ngroups, dstate) < 1 or nheads % ngroups:
        raise OpInputError(
            f"nheads must be a multiple of ngroups and no size zero, got nheads = {nheads}, ngroups = {ngroups}, "
            f"headdim = {headdim}, dstate = {dstate}"
        )
    if given.D is not None and given.D.dim() == 2:
        check_shape("D", given.D, (nheads, headdim), "[nheads, headdim]")
    elif given.D is not None:
        check_shape("D", given.D, (nheads,), "[nheads]")
    if given.z is not None:
        check_shape("z", given.z, tuple(given.x.shape), "[B, T, nheads, headdim]")
    if given.dt_bias is not None:
        check_shape("dt_bias", given.dt_bias, (nheads,), "[nheads]")
    state_shape = (states, nheads, headdim, dstate)
    if given.initial_states is not None:
        check_shape(
            "initial_states", given.initial_states, state_shape, "[N, nheads, headdim, dstate]"
        )
    check_floating(
        {**given.tensors(), "initial_states": given.initial_states}, op_device(context, given.x)
    )
    check_same_dtype({"x": given.x, "B": given.B, "C": given.C})
    options = SSDOptions(chunk_size, bool(dt_softplus), low, high)

    def build(tensors: Sequence[Any], seed: Tensor | None) -> SSDInputs:
        x, dt, a, b, c, d, z, dt_bias = tensors
        return SSDInputs(x, dt, a, b, c, d, z, dt_bias, seed, options)

    call, text = make_call(
        "mamba_chunk_scan_combined",
        "ssd",
        context,
        given.tensors(),
        given.initial_states,
        build,
        options,
        sizes=(batch, ngroups, nheads, dstate, headdim),
        state_shape=state_shape,
        state_dtype=state_dtype(given.x),
        user_layout="k_major",
        engine=engine,
        final=final,
    )
    return call, f"{text}; D {None if given.D is None else list(given.D.shape)}"


def _like(
    context: CPContext, given: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Like, Like | None]:
    """Return what ``mamba_chunk_scan_combined`` gives for inputs that fit together."""
    x = given["x"]
    states = count_states(x, context)
    final = ((states, *x.shape[2:], given["B"].shape[3]), state_dtype(x))
    return (tuple(x.shape), x.dtype), final if settings["return_final_states"] else None


register(mamba_chunk_scan_combined, _like)
