# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution, sequence-sharded: each segment borrows its halo from the ranks before it.

Forward moves the last inputs of predecessors, backward returns each halo row's gradient to the rank
it came from; which rows, ``cptransport.halo`` says. What a rank computes, an implementation does
that ``choose`` finds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cptransport import env, notices, registry
from cptransport.context import CPContext
from cptransport.errors import (
    BackendFallbackWarning,
    BackendNotFoundError,
    BackendUnavailableError,
    OpInputError,
)
from cptransport.ops.conv1d_exchange import ConvCall, Convolution, HaloExchange
from cptransport.ops.conv1d_torch import TorchConvolution
from cptransport.ops.inputs import (
    check_batch,
    check_context,
    check_floating,
    check_shape,
    count_states,
    op_device,
    refuse_upstream,
    state_dtype,
)
from cptransport.ops.once import history_of, once_differentiable
from cptransport.ops.prepare import recall
from cptransport.ops.scope import RunRecord, agree, op_step, record_run, reporting
from cptransport.ops.traced import Like, register, trace
from cptransport.transport import BoundaryTransport

__all__ = ["causal_conv1d"]

_UPSTREAM = {
    "cu_seqlens": "the plan in cp_context says where sequences start",
    "cu_seqlens_cpu": "the plan in cp_context says where sequences start",
    "chunk_indices": "segments come from the plan",
    "seq_idx": "the plan in cp_context says where sequences start",
    "backend": "use engine selection",
    "initial_states": "the argument is initial_state, [N, D, W-1]",
    "return_final_states": "the argument is output_final_state",
    "final_states_out": "the op allocates its final state",
}


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    cp_context: CPContext,
    activation: str | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    engine: str | None = None,
    **upstream: Any,
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution over sequences that are sharded as ``cp_context`` says.

    ``y_t = act(bias + sum_w weight[:, w] * x_{t - W + 1 + w}) + residual_t``; inputs before a
    sequence's start come from its initial state (oldest first), zeros without one.

    Args:
        x: ``[B, T, D]``, T this rank's local length, any strides.
        weight: ``[D, W]``, W >= 1.
        bias: ``[D]``.
        cp_context: from ``build_cp_context``.
        activation: None, ``"silu"`` or ``"swish"``.
        residual: ``[B, T, D]``, added last.
        initial_state: ``[N, D, W-1]``, any float dtype, replicated, one row per sequence (dense: N
            = B).
        output_final_state: return the last W-1 inputs of each sequence.
        engine: ``"torch"`` or ``"triton"``; beats ``CULA_CP_ENGINE``. An engine of other ops leaves
            a convolution the automatic choice: triton on CUDA but for float64, else torch.
        upstream: other libraries' arguments; refused by name.

    Returns:
        y ``[B, T, D]`` in x's dtype, and final_state ``[N, D, W-1]`` in x's dtype on the rank that
        owns each sequence's last token, zeros elsewhere; None unless asked.

    Raises:
        OpInputError (a ValueError), UnsupportedOptionError, BackendError, PeerFailedError,
        TransportTimeoutError: as ``chunk_kda``.

    Collective: yes, forward and backward, over the context's transport.
    Source: ``causal_conv1d`` of the package of that name, and FLA's ``ShortConvolution``.
    """
    transport = check_context(cp_context).transport
    settings = _Settings(activation, bool(output_final_state), engine)
    tensors = (x, weight, bias, residual, initial_state)
    if torch.compiler.is_dynamo_compiling():
        refuse_upstream("causal_conv1d", upstream, _UPSTREAM)
        given = dict(zip(_NAMES, tensors, strict=True))
        y, final_state = trace("causal_conv1d", cp_context, given, settings._asdict())
        return y, final_state if output_final_state else None

    def prepare() -> tuple[ConvCall, str]:
        refuse_upstream("causal_conv1d", upstream, _UPSTREAM)
        return recall(
            cp_context,
            "causal_conv1d",
            tensors,
            settings,
            lambda: _make(cp_context, *tensors, settings=settings),
        )

    with op_step(transport):
        call = agree(transport, "causal_conv1d", prepare)
    y, final_state, _ = _Conv.apply(call, *tensors)  # type: ignore[no-untyped-call]
    return y, final_state


class _Settings(NamedTuple):
    """The arguments of ``causal_conv1d`` that are no tensors."""

    activation: str | None
    output_final_state: bool
    engine: str | None


_NAMES = ("x", "weight", "bias", "residual", "initial_state")


def _make(
    context: CPContext,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    initial_state: Tensor | None,
    *,
    settings: _Settings,
) -> tuple[ConvCall, str]:
    """Check a call, and say what must be the same on every rank."""
    activation = settings.activation
    if activation not in (None, "silu", "swish"):
        raise OpInputError(f"activation must be None, 'silu' or 'swish', got {activation!r}")
    check_shape("x", x, (None, None, None), "[B, T, D]")
    states = check_batch("x", x, context)
    batch, length, channels = x.shape
    check_shape("weight", weight, (channels, None), "[D, W]")
    width = weight.shape[1]
    if width < 1:
        raise OpInputError("weight must be [D, W] with W >= 1, got W = 0")
    if bias is not None:
        check_shape("bias", bias, (channels,), "[D]")
    if residual is not None:
        check_shape("residual", residual, (batch, length, channels), "[B, T, D]")
    if initial_state is not None:
        check_shape("initial_state", initial_state, (states, channels, width - 1), "[N, D, W-1]")
    given = dict(zip(_NAMES, (x, weight, bias, residual, initial_state), strict=True))
    transport, plan = context.transport, context.plan
    device = op_device(context, x)
    check_floating(given, device)
    dtypes = {name: t.dtype for name, t in given.items() if t is not None}
    computes, reasons = choose(dtypes, device, transport, settings.engine)
    overlap = env.flag(env.OVERLAP)
    record = RunRecord(
        "causal_conv1d",
        computes.name,
        transport.name,
        "halo",
        overlap,
        transport.world_size,
        reasons,
    )
    record_run(record)
    call = ConvCall(
        context=context,
        width=width,
        batch=batch,
        channels=channels,
        states=states,
        silu=activation is not None,
        final=settings.output_final_state,
        overlap=overlap,
        dtype=x.dtype,
        compute=state_dtype(x),
        initial_dtype=None if initial_state is None else initial_state.dtype,
        device=device,
        computes=computes,
        record=record,
    )
    tracked = sorted(
        name
        for name, t in given.items()
        if t is not None and t.requires_grad and torch.is_grad_enabled()
    )
    text = (
        f"plan {plan.digest()}; B {batch}; D {channels}; W {width}; activation {activation}; "
        f"dtypes {sorted((name, str(dtype)) for name, dtype in dtypes.items())}; "
        f"requires_grad {tracked}; engine {computes.name}"
    )
    return call, text


_ENGINES = ("auto", "torch", "triton")


def choose(
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
    transport: BoundaryTransport,
    argument: str | None,
) -> tuple[Convolution, tuple[tuple[str, str], ...]]:
    """Return who computes a call, and who was passed over for which reason; alike on all ranks.

    Args:
        dtypes: of the inputs that were given.
        device: of the call.
        transport: its strict mode applies.
        argument: the op's ``engine=``; beats ``CULA_CP_ENGINE``.

    Raises:
        BackendNotFoundError: no op has an engine of that name. BackendLoadError: a broken plugin.
        BackendUnavailableError: strict, and triton was asked for and cannot serve.
    """
    requested, _ = env.text(env.ENGINE, argument)
    reasons = []
    if requested not in _ENGINES:
        try:
            registry.load_engine("conv1d", requested)
        except BackendUnavailableError as error:
            # It is meant for the ops around the convolution: no fallback that strict would refuse.
            reasons.append((requested, str(error)))
        except BackendNotFoundError:
            hint = env.suggestion(requested.lower(), _ENGINES)
            raise BackendNotFoundError(
                f"no engine is named {requested!r}{hint}; a convolution knows {', '.join(_ENGINES)}"
            ) from None
    if requested == "triton" or (requested != "torch" and device.type == "cuda"):
        found, reason = _triton(dtypes, device)
        if found is not None:
            return found, tuple(reasons)
        if requested == "triton":
            text = f"engine 'triton' cannot serve causal_conv1d: {reason}"
            if getattr(transport, "strict", False):
                raise BackendUnavailableError(text)
            notices.warn_once(f"{text}; torch runs", BackendFallbackWarning)
        reasons.append(("triton", reason))
    return TorchConvolution(), tuple(reasons)


def _triton(
    dtypes: Mapping[str, torch.dtype], device: torch.device
) -> tuple[Convolution | None, str]:
    try:
        from cptransport.ops import conv1d_triton
    except ModuleNotFoundError as error:
        return None, f"needs {error.name}: pip install triton"
    reason = conv1d_triton.why_not(device.type, dtypes)
    return (conv1d_triton.TritonConvolution(), "") if reason is None else (None, reason)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        call: ConvCall,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor | None,
        initial_state: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        with reporting(call.context.transport):
            exchange = HaloExchange(call, "forward", call.dtype)
            y, final, border = call.computes.forward(
                call, exchange, x, weight, bias, residual, initial_state
            )
        ctx.call = call
        ctx.residual_dtype = None if residual is None else residual.dtype
        ctx.set_materialize_grads(False)
        history = history_of(y)
        ctx.save_for_backward(history, x, border, weight, bias)
        return y, final, history

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_y: Tensor | None, grad_final: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        call: ConvCall = ctx.call
        _, x, border, weight, bias = ctx.saved_tensors
        transport = call.context.transport
        with op_step(transport):
            agree(
                transport,
                "causal_conv1d backward",
                lambda: (None, f"plan {call.context.plan.digest()}; W {call.width}"),
            )
            exchange = HaloExchange(call, "backward", call.compute)
            if grad_y is None:
                grad_y = x.new_zeros(()).expand(x.shape)
            grads = call.computes.backward(
                call, exchange, border, x, weight, bias, ctx.residual_dtype, grad_y, grad_final
            )
        return (
            None,
            grads.x,
            grads.weight,
            grads.bias,
            grads.residual,
            grads.initial_state,
        )


def _like(
    context: CPContext, given: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Like, Like | None]:
    """Return what ``causal_conv1d`` gives for inputs that fit together."""
    x = given["x"]
    states = count_states(x, context)
    final = ((states, x.shape[2], given["weight"].shape[1] - 1), x.dtype)
    return (tuple(x.shape), x.dtype), final if settings["output_final_state"] else None


register(causal_conv1d, _like)
