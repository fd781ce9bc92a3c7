# SPDX-License-Identifier: Apache-2.0
"""The Mamba2 mixer core, sequence-sharded: convolution, SSD and gate of one ``zxbcdt`` projection."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cptransport import env
from cptransport.context import CPContext
from cptransport.errors import OpInputError, UnsupportedOptionError
from cptransport.ops.conv1d import causal_conv1d
from cptransport.ops.inputs import check_context, check_shape, refuse_upstream
from cptransport.ops.mamba2 import check_chunk_size, mamba_chunk_scan_combined
from cptransport.ops.scope import agree, op_step

__all__ = ["mamba_split_conv1d_scan_combined"]

_UPSTREAM = {
    "seq_idx": "the plan in cp_context says where sequences start",
    "rmsnorm_weight": "apply the gated norm outside; y comes gated by silu(z)",
    "rmsnorm_eps": "apply the gated norm outside",
    "norm_before_gate": "apply the gated norm outside",
    "outproj_weight": "apply the output projection outside",
    "outproj_bias": "apply the output projection outside",
}


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    *,
    cp_context: CPContext,
    headdim: int,
    ngroups: int,
    load_balancing: str | None = None,
    activation: str | None = "silu",
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    engine: str | None = None,
    **upstream: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Mamba2's mixer core between its two projections, sharded as ``cp_context`` says.

    Args:
        zxbcdt: ``[B, T, 2 nheads headdim + 2 ngroups dstate + nheads]`` in the order z, x, B, C,
            dt.
        conv1d_weight: ``[nheads headdim + 2 ngroups dstate, W]``, over x, B, C.
        conv1d_bias: ``[nheads headdim + 2 ngroups dstate]`` or None.
        dt_bias, A: ``[nheads]``.
        D: ``[nheads]`` or ``[nheads, headdim]``.
        chunk_size: a power of two >= 16.
        cp_context: from ``build_cp_context``.
        headdim, ngroups: of the mixer.
        load_balancing: ``none`` (the plan must be contiguous) or ``virtual`` (any plan, in place);
            default ``CULA_CP_MAMBA_LOAD_BALANCING``.
        activation: of the convolution, ``"silu"``, ``"swish"`` or None.
        initial_states: ``[N, nheads, headdim, dstate]``, replicated. The convolution starts from
            zeros.
        return_final_states: also return ``[N, nheads, headdim, dstate]``.
        dt_limit: clamp of ``softplus(dt + dt_bias)``.
        engine: beats ``CULA_CP_ENGINE``.
        upstream: mamba's other arguments; refused by name.

    Returns:
        y ``[B, T, nheads headdim]``, gated by ``silu(z)``; with ``return_final_states`` also the
        final states, on the rank that owns each sequence's last token in the caller's plan, zeros
        elsewhere.

    Raises:
        OpInputError (a ValueError), UnsupportedOptionError, PeerFailedError, TransportTimeoutError:
        as ``mamba_chunk_scan_combined``; also mode ``none`` with a plan that is not contiguous.

    Collective: yes, forward and backward.
    Source: argument names as
        ``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined``.
    """
    transport = check_context(cp_context).transport
    with op_step(transport):
        nheads, dstate = agree(
            transport,
            "mamba_split_conv1d_scan_combined",
            lambda: _prepare(
                zxbcdt,
                conv1d_weight,
                D,
                chunk_size,
                cp_context,
                headdim,
                ngroups,
                load_balancing,
                upstream,
            ),
        )
    batch, length = zxbcdt.shape[:2]
    inner, grouped = nheads * headdim, ngroups * dstate
    z, xbc, dt = torch.split(zxbcdt, [inner, inner + 2 * grouped, nheads], dim=-1)
    xbc, _ = causal_conv1d(
        xbc, conv1d_weight, conv1d_bias, cp_context=cp_context, activation=activation
    )
    x, B, C = torch.split(xbc, [inner, grouped, grouped], dim=-1)
    result = mamba_chunk_scan_combined(
        x.reshape(batch, length, nheads, headdim),
        dt,
        A,
        B.reshape(batch, length, ngroups, dstate),
        C.reshape(batch, length, ngroups, dstate),
        chunk_size,
        cp_context=cp_context,
        D=D,
        z=z.reshape(batch, length, nheads, headdim),
        dt_bias=dt_bias,
        initial_states=initial_states,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=return_final_states,
        engine=engine,
    )
    if isinstance(result, tuple):
        return result[0].reshape(batch, length, inner), result[1]
    return result.reshape(batch, length, inner)


def _prepare(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    D: Tensor,
    chunk_size: int,
    context: CPContext,
    headdim: int,
    ngroups: int,
    load_balancing: str | None,
    upstream: dict[str, Any],
) -> tuple[tuple[int, int], str]:
    """Check what the two ops inside cannot, and return nheads and dstate."""
    refuse_upstream("mamba_split_conv1d_scan_combined", upstream, _UPSTREAM)
    check_chunk_size(chunk_size)
    mode = env.choice(env.MAMBA_LOAD_BALANCING, load_balancing)
    if mode not in ("none", "virtual"):
        raise UnsupportedOptionError(
            f"load balancing {mode!r} is not served yet; use 'virtual' or 'none'"
        )
    if mode == "none" and context.plan.layout != "contiguous":
        raise OpInputError(
            f"load balancing 'none' needs a contiguous plan, this one is {context.plan.layout}; use 'virtual'"
        )
    check_shape(
        "zxbcdt", zxbcdt, (None, None, None), "[B, T, 2 nheads headdim + 2 ngroups dstate + nheads]"
    )
    if not isinstance(D, Tensor) or D.dim() not in (1, 2):
        raise OpInputError("D must be [nheads] or [nheads, headdim]")
    nheads = D.shape[0]
    check_shape("conv1d_weight", conv1d_weight, (None, None), "[channels, W]")
    channels = conv1d_weight.shape[0]
    rest = channels - nheads * headdim
    if headdim < 1 or ngroups < 1 or rest < 2 * ngroups or rest % (2 * ngroups):
        raise OpInputError(
            f"conv1d_weight has {channels} channels, which are not nheads headdim + 2 ngroups dstate for nheads = "
            f"{nheads}, headdim = {headdim}, ngroups = {ngroups}"
        )
    dstate = rest // (2 * ngroups)
    width = nheads * headdim + channels + nheads
    if zxbcdt.shape[-1] != width:
        raise OpInputError(
            f"zxbcdt must have 2 nheads headdim + 2 ngroups dstate + nheads = {width} columns, got {zxbcdt.shape[-1]}"
        )
    return (nheads, dstate), f"load balancing {mode}; columns {width}; plan {context.plan.digest()}"
