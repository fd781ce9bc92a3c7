# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention, sequence-sharded: ``chunk_kda`` and the explicit forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cptransport import env
from cptransport.context import CPContext
from cptransport.engines import KDAInputs, KDAOptions
from cptransport.errors import OpInputError
from cptransport.ops.call import OpCall, SavedCall, apply, run_backward, run_forward
from cptransport.ops.inputs import (
    check_batch,
    check_context,
    check_floating,
    check_same_dtype,
    check_shape,
    op_device,
    refuse_upstream,
    state_dtype,
)
from cptransport.ops.prepare import make_call
from cptransport.ops.scope import agree, op_step

__all__ = ["KDAForward", "KDAGrads", "chunk_kda", "kda_backward", "kda_forward"]

_MAX_HEAD_DIM = 256

_UPSTREAM = {
    "cu_seqlens": "the plan in cp_context says where sequences start",
    "cu_seqlens_cpu": "the plan in cp_context says where sequences start",
    "chunk_indices": "engines make their own chunk tables from the plan",
    "disable_recompute": "the engine decides what is recomputed; use torch.utils.checkpoint around the op",
    "return_intermediate_states": "intermediate states stay on their rank",
    "use_graph": "capture the call in a torch.cuda.CUDAGraph",
    "max_num_seqs": "the plan in cp_context fixes the number of sequences",
    "transpose_state_layout": "the argument is state_v_first",
}


@dataclass(frozen=True)
class KDAForward:
    """Result of ``kda_forward``: o ``[B, T, HV, V]``, final_state if asked, and what ``kda_backward`` takes."""

    o: Tensor
    final_state: Tensor | None
    saved: SavedCall


@dataclass(frozen=True)
class KDAGrads:
    """Gradients of KDA's inputs: of this rank's tokens, and its contribution for replicated inputs; None if absent."""

    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dg: Tensor | None
    dbeta: Tensor | None
    dA_log: Tensor | None
    ddt_bias: Tensor | None
    dinitial_state: Tensor | None


def chunk_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cp_context: CPContext,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    engine: str | None = None,
    **upstream: Any,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention over sequences that are sharded as ``cp_context`` says.

    ``S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T``, ``o_t = scale * S_t^T
    q_t``.

    Args:
        q, k: ``[B, T, H, K]``, T this rank's local length, K up to 256.
        v: ``[B, T, HV, V]``, HV a multiple of H, V up to 256; value head j reads query head ``j //
            (HV / H)``.
        g: ``[B, T, HV, K]`` natural-log decay in [-inf, 0]; with ``use_gate_in_kernel`` the gate's
            input.
        beta: ``[B, T, HV]``; with ``use_beta_sigmoid_in_kernel`` logits.
        cp_context: from ``build_cp_context``. Packed plans need B = 1; a plan of one sequence takes
            any B.
        scale: default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]`` any float dtype, replicated, one row per sequence (dense: N
            = B).
        output_final_state: return the states after each sequence's last token.
        use_qk_l2norm_in_kernel: ``x * rsqrt(sum x^2 + 1e-6)`` on q and k.
        use_gate_in_kernel: ``g = -exp(A_log) softplus(g + dt_bias)``, or with ``lower_bound``
            ``lower_bound * sigmoid(exp(A_log) (g + dt_bias))``.
        A_log: ``[HV]``; absent: ``exp(A_log) = 1``.
        dt_bias: ``[HV, K]`` or ``[HV * K]``; absent: 0.
        safe_gate: says that the gate is bounded; never changes the result. Needs ``lower_bound``
            with the gate inside.
        lower_bound: a negative number, see ``use_gate_in_kernel``.
        use_beta_sigmoid_in_kernel: ``beta = sigmoid(beta)``.
        allow_neg_eigval: ``beta = 2 sigmoid(beta)``.
        state_v_first: both states are ``[N, HV, V, K]``.
        engine: beats ``CULA_CP_ENGINE``.
        upstream: FLA's other arguments; refused by name.

    Returns:
        o ``[B, T, HV, V]`` in v's dtype, and final_state ``[N, HV, K, V]`` fp32 (fp64 for fp64
        inputs) on the rank that owns each sequence's last token, zeros elsewhere; None unless
        asked.

    Raises:
        OpInputError (a ValueError): shapes, dtypes or options do not fit together or do not fit the
            plan.
        UnsupportedOptionError: an argument or mode that is not served.
        PeerFailedError, TransportTimeoutError: another rank failed or did not come.

    Collective: yes, forward and backward, over the context's transport.
    Stream: ordered on the current stream.
    Source: Kimi Linear report, section 2.1; argument names as ``fla.ops.kda.chunk_kda``.
    """
    transport = check_context(cp_context).transport
    inputs = _Arguments(q, k, v, g, beta, A_log, dt_bias, initial_state)
    with op_step(transport):
        call = agree(
            transport,
            "chunk_kda",
            lambda: _prepare(
                inputs,
                cp_context,
                scale=scale,
                engine=engine,
                state_v_first=state_v_first,
                use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
                use_gate_in_kernel=use_gate_in_kernel,
                safe_gate=safe_gate,
                lower_bound=lower_bound,
                use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
                allow_neg_eigval=allow_neg_eigval,
                **upstream,
            ),
        )
    o, final_state = apply(call, initial_state, *inputs.tensors().values())
    return o, final_state if output_final_state else None


def kda_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cp_context: CPContext,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **options: Any,
) -> KDAForward:
    """Forward of ``chunk_kda`` without autograd, for frameworks that own theirs. Arguments as there.

    Returns:
        KDAForward: hand ``saved`` to ``kda_backward``. Tensors in it alias inputs; do not write to
            those before.

    Raises, Collective, Stream: as ``chunk_kda``.
    """
    transport = check_context(cp_context).transport
    inputs = _Arguments(q, k, v, g, beta, A_log, dt_bias, initial_state)
    with torch.no_grad(), op_step(transport):
        call = agree(transport, "kda_forward", lambda: _prepare(inputs, cp_context, **options))
        result = run_forward(call, tuple(inputs.tensors().values()), initial_state)
    final_state = result.final_states if output_final_state else None
    return KDAForward(result.output, final_state, SavedCall(call, result.saved))


def kda_backward(saved: SavedCall, do: Tensor, d_final_state: Tensor | None = None) -> KDAGrads:
    """Backward of ``kda_forward``.

    Args:
        saved: from ``kda_forward``.
        do: gradient of o, ``[B, T, HV, V]``.
        d_final_state: gradient of the final states, in their layout; rows of sequences that this
            rank does not own are ignored.

    Returns:
        KDAGrads: the gradient of every input that was given.

    Raises:
        OpInputError: a gradient's shape is not that of its output.

    Collective: yes; all ranks in the same order as the forwards they belong to, or any other common
        order.
    """
    call = saved.call
    facts, local = call.facts, call.context.local
    shape = (facts.batch, local.num_tokens, facts.value_heads, facts.value_dim)

    def check() -> None:
        check_shape("do", do, shape, "[B, T, HV, V]")
        if d_final_state is not None:
            check_shape("d_final_state", d_final_state, call.state_shape, "the final state's shape")

    with torch.no_grad():
        grads, d_initial = run_backward(call, saved.saved, do, d_final_state, check=check)
    return KDAGrads(
        **{f"d{name}": grads.get(name) for name in call.names}, dinitial_state=d_initial
    )


@dataclass(frozen=True)
class _Arguments:
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    initial_state: Tensor | None

    def tensors(self) -> dict[str, Tensor | None]:
        names = ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
        return {name: getattr(self, name) for name in names}


def _prepare(
    given: _Arguments,
    context: CPContext,
    /,
    *,
    scale: float | None = None,
    engine: str | None = None,
    state_v_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    **upstream: Any,
) -> tuple[OpCall, str]:
    """Check a call and choose what runs it; see ``agree``."""
    refuse_upstream("chunk_kda", upstream, _UPSTREAM)
    _check_options(
        given,
        use_gate_in_kernel,
        safe_gate,
        lower_bound,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
    )
    check_shape("q", given.q, (None, None, None, None), "[B, T, H, K]")
    states = check_batch("q", given.q, context)
    batch, length, heads, key_dim = given.q.shape
    check_shape("v", given.v, (batch, length, None, None), "[B, T, HV, V]")
    value_heads, value_dim = given.v.shape[2:]
    if heads < 1 or value_heads < 1 or value_heads % heads:
        raise OpInputError(f"HV must be a multiple of H, got HV = {value_heads}, H = {heads}")
    for name, size in (("K", key_dim), ("V", value_dim)):
        if not 1 <= size <= _MAX_HEAD_DIM:
            raise OpInputError(f"{name} must be between 1 and {_MAX_HEAD_DIM}, got {size}")
    check_shape("k", given.k, tuple(given.q.shape), "[B, T, H, K]")
    check_shape("g", given.g, (batch, length, value_heads, key_dim), "[B, T, HV, K]")
    check_shape("beta", given.beta, (batch, length, value_heads), "[B, T, HV]")
    if given.A_log is not None:
        check_shape("A_log", given.A_log, (value_heads,), "[HV]")
    if given.dt_bias is not None and given.dt_bias.shape != (value_heads * key_dim,):
        check_shape("dt_bias", given.dt_bias, (value_heads, key_dim), "[HV, K] or [HV * K]")
    state_shape = (states, value_heads, key_dim, value_dim)
    words = "[N, HV, K, V]"
    if state_v_first:
        state_shape, words = (states, value_heads, value_dim, key_dim), "[N, HV, V, K]"
    if given.initial_state is not None:
        check_shape("initial_state", given.initial_state, state_shape, words)
    check_floating(
        {**given.tensors(), "initial_state": given.initial_state}, op_device(context, given.q)
    )
    check_same_dtype({"q": given.q, "k": given.k, "v": given.v})
    if env.flag(env.CHECK) and not use_gate_in_kernel and bool((given.g > 0).any()):
        raise OpInputError("g must be a natural-log decay in [-inf, 0], found positive values")
    options = KDAOptions(
        scale=key_dim**-0.5 if scale is None else float(scale),
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
    )

    def build(tensors: Sequence[Any], seed: Tensor | None) -> KDAInputs:
        q, k, v, g, beta, a_log, dt_bias = tensors
        if dt_bias is not None:
            dt_bias = dt_bias.reshape(value_heads, key_dim)
        return KDAInputs(q, k, v, g, beta, a_log, dt_bias, seed, options)

    return make_call(
        "chunk_kda",
        "kda",
        context,
        given.tensors(),
        given.initial_state,
        build,
        options,
        sizes=(batch, heads, value_heads, key_dim, value_dim),
        state_shape=state_shape,
        state_dtype=state_dtype(given.v),
        user_layout="v_major" if state_v_first else "k_major",
        engine=engine,
        flat={} if given.dt_bias is None else {"dt_bias": tuple(given.dt_bias.shape)},
    )


def _check_options(
    given: _Arguments,
    use_gate_in_kernel: bool,
    safe_gate: bool,
    lower_bound: float | None,
    use_beta_sigmoid_in_kernel: bool,
    allow_neg_eigval: bool,
) -> None:
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        raise OpInputError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    if not use_gate_in_kernel:
        inside = {"A_log": given.A_log, "dt_bias": given.dt_bias, "lower_bound": lower_bound}
        for name, value in inside.items():
            if value is not None:
                raise OpInputError(f"{name} needs use_gate_in_kernel")
    elif safe_gate and lower_bound is None:
        raise OpInputError("safe_gate needs lower_bound when the gate is computed inside")
    if lower_bound is not None and not lower_bound < 0:
        raise OpInputError(f"lower_bound must be negative, got {lower_bound}")
