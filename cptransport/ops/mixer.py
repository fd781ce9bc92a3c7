# SPDX-License-Identifier: Apache-2.0
"""The Mamba2 mixer core, sequence-sharded: convolution, SSD and gate of one ``zxbcdt`` projection."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cptransport import env
from cptransport.context import CPContext
from cptransport.errors import OpInputError
from cptransport.ops.heads import MixerSizes
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
from cptransport.ops.mamba2 import check_chunk_size
from cptransport.ops.mixer_modes import Mixer, check_mode, run_mode
from cptransport.ops.scope import agree, last_run, op_step, record_run
from cptransport.ops.traced import Like, register, trace

__all__ = ["mamba_split_conv1d_scan_combined"]

_TITLE = "mamba_split_conv1d_scan_combined"

_UPSTREAM = {
    "seq_idx": "the plan in cp_context says where sequences start",
    "rmsnorm_weight": "apply the gated norm outside; y comes gated by silu(z)",
    "rmsnorm_eps": "apply the gated norm outside",
    "norm_before_gate": "apply the gated norm outside",
    "outproj_weight": "apply the output projection outside",
    "outproj_bias": "apply the output projection outside",
    "state_dtype": "states are fp32 (fp64 for fp64 inputs)",
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
        load_balancing: ``none`` (in place; the plan must be contiguous), ``virtual`` (in place, any
            plan), ``permute_p2p`` or ``permute_a2a`` (any plan; tokens go to a contiguous plan and
            outputs back) or ``all_to_all`` (any plan; every rank gets the whole stream for its share
            of the heads, which divide by the world size); default
            ``CULA_CP_MAMBA_LOAD_BALANCING``. Results are the same up to rounding.
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
        as ``mamba_chunk_scan_combined``; also mode ``none`` with a plan that is not contiguous, and
        ``all_to_all`` with heads that do not divide. EnvVarError: an unknown mode.

    Collective: yes, forward and backward.
    Source: argument names as
        ``mamba_ssm.ops.triton.ssd_combined.mamba_split_conv1d_scan_combined``.
    """
    transport = check_context(cp_context).transport
    if torch.compiler.is_dynamo_compiling():
        refuse_upstream(_TITLE, upstream, _UPSTREAM)
        given = {
            "zxbcdt": zxbcdt, "conv1d_weight": conv1d_weight, "conv1d_bias": conv1d_bias,
            "dt_bias": dt_bias, "A": A, "D": D, "initial_states": initial_states,
        }  # fmt: skip
        named = {
            "chunk_size": chunk_size, "headdim": headdim, "ngroups": ngroups,
            "load_balancing": load_balancing, "activation": activation,
            "return_final_states": return_final_states, "dt_limit": dt_limit, "engine": engine,
        }  # fmt: skip
        output, states = trace(_TITLE, cp_context, given, named)
        return (output, states) if return_final_states else output
    with op_step(transport):
        mode, mixer = agree(
            transport,
            _TITLE,
            lambda: _prepare(
                Mixer(
                    zxbcdt,
                    conv1d_weight,
                    conv1d_bias,
                    dt_bias,
                    A,
                    D,
                    initial_states,
                    MixerSizes(0, headdim, ngroups, 0),
                    chunk_size,
                    activation,
                    dt_limit,
                    engine,
                    bool(return_final_states),
                ),
                cp_context,
                load_balancing,
                upstream,
            ),
        )
    y, final_states = run_mode(mode, mixer, cp_context)
    record = last_run()
    assert record is not None
    if mode == "all_to_all" and transport.world_size > 1:
        # Inside, the op ran on this rank alone.
        record = replace(
            record, transport=transport.name, world_size=transport.world_size, composition=mode
        )
    record_run(replace(record, op=_TITLE))
    return y if final_states is None else (y, final_states)


def _prepare(
    given: Mixer, context: CPContext, load_balancing: str | None, upstream: dict[str, Any]
) -> tuple[tuple[str, Mixer], str]:
    """Check all that does not need the tokens of others, before any of them moves.

    Returns:
        The mode, the mixer with all its sizes, and what must be the same on every rank.
    """
    refuse_upstream(_TITLE, upstream, _UPSTREAM)
    mode = env.choice(env.MAMBA_LOAD_BALANCING, load_balancing)
    check_chunk_size(given.chunk_size)
    if given.activation not in (None, "silu", "swish"):
        raise OpInputError(f"activation must be None, 'silu' or 'swish', got {given.activation!r}")
    sizes = _sizes(given)
    states = check_batch("zxbcdt", given.zxbcdt, context)
    channels, width = given.conv1d_weight.shape
    if width < 1:
        raise OpInputError("conv1d_weight must be [channels, W] with W >= 1, got W = 0")
    if given.conv1d_bias is not None:
        check_shape("conv1d_bias", given.conv1d_bias, (channels,), "[channels]")
    if sizes.nheads % sizes.ngroups:
        raise OpInputError(
            f"nheads must be a multiple of ngroups, got nheads = {sizes.nheads}, ngroups = {sizes.ngroups}"
        )
    for name, parameter in (("dt_bias", given.dt_bias), ("A", given.A)):
        check_shape(name, parameter, (sizes.nheads,), "[nheads]")
    if given.D.dim() == 2:
        check_shape("D", given.D, (sizes.nheads, sizes.headdim), "[nheads, headdim]")
    if given.initial_states is not None:
        shape = (states, sizes.nheads, sizes.headdim, sizes.dstate)
        check_shape("initial_states", given.initial_states, shape, "[N, nheads, headdim, dstate]")
    tensors = {
        "zxbcdt": given.zxbcdt,
        "conv1d_weight": given.conv1d_weight,
        "conv1d_bias": given.conv1d_bias,
        "dt_bias": given.dt_bias,
        "A": given.A,
        "D": given.D,
        "initial_states": given.initial_states,
    }
    check_floating(tensors, op_device(context, given.zxbcdt))
    mixer = replace(given, sizes=sizes)
    scan = check_mode(mode, mixer, context)
    dtypes = {name: str(t.dtype) for name, t in tensors.items() if t is not None}
    text = (
        f"load balancing {mode}; plan {context.plan.digest()}; {sizes}; W {width}; activation "
        f"{given.activation}; final states {given.final}; dtypes {dtypes}; {scan}"
    )
    return (mode, mixer), text


def _sizes(given: Mixer) -> MixerSizes:
    """Return the sizes that ``D`` and the convolution's channels imply."""
    for name, size in (("headdim", given.sizes.headdim), ("ngroups", given.sizes.ngroups)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise OpInputError(f"{name} must be an int, got {size!r}")
    words = "[B, T, 2 nheads headdim + 2 ngroups dstate + nheads]"
    check_shape("zxbcdt", given.zxbcdt, (None, None, None), words)
    if not isinstance(given.D, Tensor) or given.D.dim() not in (1, 2):
        raise OpInputError("D must be [nheads] or [nheads, headdim]")
    check_shape("conv1d_weight", given.conv1d_weight, (None, None), "[channels, W]")
    nheads, headdim, ngroups = given.D.shape[0], given.sizes.headdim, given.sizes.ngroups
    channels = given.conv1d_weight.shape[0]
    rest = channels - nheads * headdim
    if min(nheads, headdim, ngroups) < 1 or rest < 2 * ngroups or rest % (2 * ngroups):
        raise OpInputError(
            f"conv1d_weight has {channels} channels, which are not nheads headdim + 2 ngroups dstate for "
            f"nheads = {nheads}, headdim = {headdim}, ngroups = {ngroups}"
        )
    width = nheads * headdim + channels + nheads
    if given.zxbcdt.shape[-1] != width:
        raise OpInputError(
            f"zxbcdt must have 2 nheads headdim + 2 ngroups dstate + nheads = {width} columns, got "
            f"{given.zxbcdt.shape[-1]}"
        )
    return MixerSizes(nheads, headdim, ngroups, rest // (2 * ngroups))


def _like(
    context: CPContext, given: Mapping[str, Tensor], settings: Mapping[str, Any]
) -> tuple[Like, Like | None]:
    """Return what the op gives for inputs that fit together."""
    x, nheads = given["zxbcdt"], given["A"].shape[0]
    states = count_states(x, context)
    inner = nheads * settings["headdim"]
    dstate = (given["conv1d_weight"].shape[0] - inner) // (2 * settings["ngroups"])
    final = ((states, nheads, settings["headdim"], dstate), state_dtype(x))
    return ((*x.shape[:2], inner), x.dtype), final if settings["return_final_states"] else None


register(mamba_split_conv1d_scan_combined, _like)
