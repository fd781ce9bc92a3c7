# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention, sequence-sharded: ``chunk_kda`` and the explicit forward and backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cptransport import env
from cptransport.context import CPContext
from cptransport.engines import KDAInputs, KDAOptions
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
    """Result of ``kda_forward``: o ``[B, T, HV, V]``, or THD; final_state if asked; what ``kda_backward`` takes."""

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
    check_context(cp_context)
    tensors = (q, k, v, g, beta, A_log, dt_bias)
    settings = _Settings(
        None if scale is None else float(scale),
        engine,
        state_v_first,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        safe_gate,
        lower_bound,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        output_final_state,
    )
    if torch.compiler.is_dynamo_compiling():
        refuse_upstream("chunk_kda", upstream, _UPSTREAM)
        given = {**dict(zip(_NAMES, tensors, strict=True)), "initial_state": initial_state}
        o, final_state = trace("chunk_kda", cp_context, given, settings._asdict())
        return o, final_state if output_final_state else None

    def prepare() -> tuple[OpCall, str]:
        return _prepare(cp_context, tensors, initial_state, settings, upstream)

    return apply(checked(cp_context, "chunk_kda", prepare), initial_state, *tensors)


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

    Packed input may also come without the batch axis, as THD: q, k ``[T, H, K]``, v ``[T, HV, V]``,
    g ``[T, HV, K]``, beta ``[T, HV]``; then o, its gradient and theirs are so too.

    Returns:
        KDAForward: hand ``saved`` to ``kda_backward``. Tensors in it alias inputs; do not write to
            those before.

    Raises, Collective, Stream: as ``chunk_kda``.
    """
    check_context(cp_context)
    thd = getattr(q, "ndim", 0) == 3
    tokens = (x[None] if thd else x for x in (q, k, v, g, beta))
    tensors = (*tokens, A_log, dt_bias)
    known = {name: options.pop(name) for name in _Settings._fields if name in options}
    settings = _Settings(**known, output_final_state=True)  # its gradient may be given later

    def prepare() -> tuple[OpCall, str]:
        return _prepare(cp_context, tensors, initial_state, settings, options)

    with torch.no_grad():
        call, result = compute(cp_context, "kda_forward", prepare, tensors, initial_state)
    final_state = result.final_states if output_final_state else None
    output = result.output[0] if thd else result.output
    return KDAForward(output, final_state, SavedCall(call, result.saved, thd))


def kda_backward(saved: SavedCall, do: Tensor, d_final_state: Tensor | None = None) -> KDAGrads:
    """Backward of ``kda_forward``.

    Args:
        saved: from ``kda_forward``.
        do: gradient of o, in its shape.
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
    shape: tuple[int, ...] = (facts.batch, local.num_tokens, facts.value_heads, facts.value_dim)
    words = "[B, T, HV, V]"
    if saved.thd:
        shape, words = shape[1:], "[T, HV, V]"

    def check() -> None:
        check_shape("do", do, shape, words)
        if d_final_state is not None:
            check_shape("d_final_state", d_final_state, call.state_shape, "the final state's shape")

    with torch.no_grad():
        grad = do[None] if saved.thd else do
        grads, d_initial = run_backward(call, saved.saved, grad, d_final_state, check=check)
    if saved.thd:
        for name in _TOKENS:
            found = grads.get(name)
            grads[name] = None if found is None else found[0]
    return KDAGrads(
        **{f"d{name}": grads.get(name) for name in call.names}, dinitial_state=d_initial
    )


class _Settings(NamedTuple):
    """The arguments of ``chunk_kda`` that are no tensors."""

    scale: float | None = None
    engine: str | None = None
    state_v_first: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_gate_in_kernel: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    output_final_state: bool = False


_TOKENS = ("q", "k", "v", "g", "beta")
_NAMES = (*_TOKENS, "A_log", "dt_bias")


def _prepare(
    context: CPContext,
    tensors: Sequence[Tensor | None],
    initial_state: Tensor | None,
    settings: _Settings,
    upstream: Mapping[str, Any],
) -> tuple[OpCall, str]:
    """Check a call and choose what runs it; see ``agree``."""
    refuse_upstream("chunk_kda", upstream, _UPSTREAM)
    call, text = recall(
        context,
        "chunk_kda",
        (*tensors, initial_state),
        settings,
        lambda: _make(context, tensors, initial_state, settings),
    )
    g: Any = tensors[3]
    if not settings.use_gate_in_kernel and env.flag(env.CHECK) and bool((g > 0).any()):
        raise OpInputError("g must be a natural-log decay in [-inf, 0], found positive values")
    return call, text


def _make(
    context: CPContext,
    tensors: Sequence[Any],
    initial_state: Tensor | None,
    settings: _Settings,
) -> tuple[OpCall, str]:
    """Make a call of a signature that the context has not seen."""
    q, k, v, g, beta, a_log, dt_bias = tensors
    _check_settings(settings, {"A_log": a_log, "dt_bias": dt_bias})
    check_shape("q", q, (None, None, None, None), "[B, T, H, K]")
    states = check_batch("q", q, context)
    batch, length, heads, key_dim = q.shape
    check_shape("v", v, (batch, length, None, None), "[B, T, HV, V]")
    value_heads, value_dim = v.shape[2:]
    if heads < 1 or value_heads < 1 or value_heads % heads:
        raise OpInputError(f"HV must be a multiple of H, got HV = {value_heads}, H = {heads}")
    for name, size in (("K", key_dim), ("V", value_dim)):
        if not 1 <= size <= _MAX_HEAD_DIM:
            raise OpInputError(f"{name} must be between 1 and {_MAX_HEAD_DIM}, got {size}")
    check_shape("k", k, tuple(q.shape), "[B, T, H, K]")
    check_shape("g", g, (batch, length, value_heads, key_dim), "[B, T, HV, K]")
    check_shape("beta", beta, (batch, length, value_heads), "[B, T, HV]")
    if a_log is not None:
        check_shape("A_log", a_log, (value_heads,), "[HV]")
    if dt_bias is not None and dt_bias.shape != (value_heads * key_dim,):
        check_shape("dt_bias", dt_bias, (value_heads, key_dim), "[HV, K] or [HV * K]")
    state_shape = (states, value_heads, key_dim, value_dim)
    words = "[N, HV, K, V]"
    if settings.state_v_first:
        state_shape, words = (states, value_heads, value_dim, key_dim), "[N, HV, V, K]"
    if initial_state is not None:
        check_shape("initial_state", initial_state, state_shape, words)
    given = dict(zip(_NAMES, tensors, strict=True))
    check_floating({**given, "initial_state": initial_state}, op_device(context, q))
    check_same_dtype({"q": q, "k": k, "v": v})
    options = KDAOptions(
        scale=key_dim**-0.5 if settings.scale is None else float(settings.scale),
        use_qk_l2norm_in_kernel=settings.use_qk_l2norm_in_kernel,
        use_gate_in_kernel=settings.use_gate_in_kernel,
        safe_gate=settings.safe_gate,
        lower_bound=settings.lower_bound,
        use_beta_sigmoid_in_kernel=settings.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=settings.allow_neg_eigval,
    )

    def build(tensors: Sequence[Any], seed: Tensor | None) -> KDAInputs:
        q, k, v, g, beta, a_log, dt_bias = tensors
        if dt_bias is not None:
            dt_bias = dt_bias.reshape(value_heads, key_dim)
        return KDAInputs(
            q, k, v, g, beta, a_log, dt_bias, seed, options, settings.output_final_state
        )

    return make_call(
        "chunk_kda",
        "kda",
        context,
        given,
        initial_state,
        build,
        options,
        sizes=(batch, heads, value_heads, key_dim, value_dim),
        state_shape=state_shape,
        state_dtype=state_dtype(v),
        user_layout="v_major" if settings.state_v_first else "k_major",
        engine=settings.engine,
        flat={} if dt_bias is None else {"dt_bias": tuple(dt_bias.shape)},
        final=settings.output_final_state,
    )


def _check_settings(settings: _Settings, parameters: Mapping[str, Tensor | None]) -> None:
    if settings.allow_neg_eigval and not settings.use_beta_sigmoid_in_kernel:
        raise OpInputError("allow_neg_eigval needs use_beta_sigmoid_in_kernel")
    lower_bound = settings.lower_bound
    if not settings.use_gate_in_kernel:
        inside = {**parameters, "lower_bound": lower_bound}
        for name, value in inside.items():
            if value is not None:
                raise OpInputError(f"{name} needs use_gate_in_kernel")
    elif settings.safe_gate and lower_bound is None:
        raise OpInputError("safe_gate needs lower_bound when the gate is computed inside")
    if lower_bound is not None and not lower_bound < 0:
        raise OpInputError(f"lower_bound must be negative, got {lower_bound}")


def _like(
    context: CPContext, given: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Like, Like | None]:
    """Return what ``chunk_kda`` gives for inputs that fit together."""
    q, v = given["q"], given["v"]
    states = count_states(q, context)
    sizes = (q.shape[3], v.shape[3])
    shape = (states, v.shape[2], *(sizes[::-1] if settings["state_v_first"] else sizes))
    final = (shape, state_dtype(v)) if settings["output_final_state"] else None
    return (tuple(v.shape), v.dtype), final


register(chunk_kda, _like)
