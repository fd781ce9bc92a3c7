# SPDX-License-Identifier: Apache-2.0
"""The load-balancing modes of the Mamba2 mixer core: where its tokens and heads are computed.

``none`` and ``virtual`` compute a rank's tokens where they are. ``permute_p2p`` and ``permute_a2a``
bring them to a contiguous plan first and the outputs back, ``all_to_all`` brings every rank the
whole stream for its heads. In all of them outputs, final states and gradients are where the
caller's plan says: y and the gradient of ``zxbcdt`` with their tokens, final states on the rank of
a sequence's last token, the gradient of an initial state on the rank of its first.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from cptransport.activations import Move
from cptransport.context import CPContext, alone, carrier_of
from cptransport.errors import OpInputError
from cptransport.ops.conv1d import causal_conv1d
from cptransport.ops.heads import (
    HeadShare,
    HeadsToStates,
    HeadsToTokens,
    MixerSizes,
    TokensToHeads,
    head_shares,
)
from cptransport.ops.mamba2 import ScanInputs, mamba_chunk_scan_combined, prepare_scan
from cptransport.ops.redistribute import Exchange, exchange, send_back
from cptransport.plan import Plan, build_plan
from cptransport.relayout import relayout, state_move

__all__ = ["Mixer", "check_mode", "run_mode"]

_TITLE = "mamba_split_conv1d_scan_combined"

#: y and, if asked for, the final states.
Result = tuple[Tensor, Tensor | None]


@dataclass(frozen=True)
class Mixer:
    """The core on the tokens and heads that one rank computes; tensors as the op takes them.

    Attributes:
        sizes: of its heads and groups.
        repeat: see ``HeadShare.repeat``.
        final: return the final states.
    """

    zxbcdt: Tensor
    conv1d_weight: Tensor
    conv1d_bias: Tensor | None
    dt_bias: Tensor
    A: Tensor
    D: Tensor
    initial_states: Tensor | None
    sizes: MixerSizes
    chunk_size: int
    activation: str | None
    dt_limit: tuple[float, float]
    engine: str | None
    final: bool
    repeat: tuple[int, ...] | None = None


def check_mode(mode: str, mixer: Mixer, context: CPContext) -> str:
    """Check that a mode serves a call, as far as all ranks see alike, and choose its engine.

    Returns:
        What must be the same on every rank.

    Raises:
        OpInputError: ``none`` with a plan that is not contiguous; ``all_to_all`` with heads that do
            not divide by the world size; as ``mamba_chunk_scan_combined``.
        BackendError: no engine can serve.

    Collective: no.
    """
    plan = context.plan
    if mode == "none" and plan.layout != "contiguous":
        raise OpInputError(
            f"load balancing 'none' needs a contiguous plan, this one is {plan.layout}; use 'virtual'"
        )
    if mode == "all_to_all" and mixer.sizes.nheads % plan.world_size:
        raise OpInputError(
            f"load balancing 'all_to_all' shares heads out evenly: nheads = {mixer.sizes.nheads} "
            f"does not divide by {plan.world_size} ranks"
        )
    if _is_heads(mode, plan):
        share = head_shares(mixer.sizes, plan.world_size)[context.rank]
        return _dry_run(_share_of(mixer, share), alone(context))
    if mode.startswith("permute"):
        context = CPContext(_straight(plan), context.transport)
    return _dry_run(mixer, context)


def run_mode(mode: str, mixer: Mixer, context: CPContext) -> Result:
    """Run the core in a mode that ``check_mode`` has found to serve it.

    Collective: yes, forward and backward.
    """
    if _is_heads(mode, context.plan):
        return _by_heads(mixer, context)
    if mode.startswith("permute") and context.plan.runs != _straight(context.plan).runs:
        return _permuted(mixer, context, mode.removeprefix("permute_"))
    return _in_place(mixer, context)


def _is_heads(mode: str, plan: Plan) -> bool:
    return mode == "all_to_all" and plan.world_size > 1


@lru_cache(maxsize=128)
def _straight(plan: Plan) -> Plan:
    """The contiguous plan that the permuting modes compute on; the plan itself if it is one."""
    if plan.layout == "contiguous":
        return plan
    return build_plan(
        plan.cu_seqlens, world_size=plan.world_size, padded_cu_seqlens=plan.padded_cu_seqlens
    )


def _in_place(mixer: Mixer, context: CPContext) -> Result:
    z, xbc, dt = _projections(mixer)
    xbc, _ = causal_conv1d(
        xbc,
        mixer.conv1d_weight,
        mixer.conv1d_bias,
        cp_context=context,
        activation=mixer.activation,
        engine=mixer.engine,
    )
    scan = _scan_inputs(mixer, z, xbc, dt)
    result = mamba_chunk_scan_combined(
        scan.x,
        scan.dt,
        scan.A,
        scan.B,
        scan.C,
        mixer.chunk_size,
        cp_context=context,
        D=scan.D,
        z=scan.z,
        dt_bias=scan.dt_bias,
        initial_states=scan.initial_states,
        dt_softplus=True,
        dt_limit=mixer.dt_limit,
        return_final_states=mixer.final,
        engine=mixer.engine,
    )
    y, final = result if isinstance(result, tuple) else (result, None)
    return y.flatten(2), final


def _projections(mixer: Mixer) -> tuple[Tensor, Tensor, Tensor]:
    sizes = mixer.sizes
    widths = [sizes.inner, sizes.inner + 2 * sizes.grouped, sizes.nheads]
    z, xbc, dt = torch.split(mixer.zxbcdt, widths, dim=-1)
    return z, xbc, dt


def _scan_inputs(mixer: Mixer, z: Tensor, xbc: Tensor, dt: Tensor) -> ScanInputs:
    sizes = mixer.sizes
    x, B, C = torch.split(xbc, [sizes.inner, sizes.grouped, sizes.grouped], dim=-1)
    heads, groups = (sizes.nheads, sizes.headdim), (sizes.ngroups, sizes.dstate)
    B, C = B.unflatten(-1, groups), C.unflatten(-1, groups)
    if mixer.repeat is not None:
        B, C = (torch.stack([t[:, :, g] for g in mixer.repeat], 2) for t in (B, C))
    return ScanInputs(
        x.unflatten(-1, heads),
        dt,
        mixer.A,
        B,
        C,
        mixer.D,
        z.unflatten(-1, heads),
        mixer.dt_bias,
        mixer.initial_states,
    )


def _dry_run(mixer: Mixer, context: CPContext) -> str:
    """Check the scan of a context without its tokens, which may be elsewhere yet."""
    given = mixer.zxbcdt
    tracked = given.requires_grad
    filtered = tracked or any(
        x is not None and x.requires_grad for x in (mixer.conv1d_weight, mixer.conv1d_bias)
    )

    def stand_in(columns: int, tracked: bool) -> Tensor:
        scalar = given.new_empty(()).requires_grad_(tracked)
        return scalar.expand(given.shape[0], context.local.num_tokens, columns)

    sizes = mixer.sizes
    scan = _scan_inputs(
        mixer,
        stand_in(sizes.inner, tracked),
        stand_in(sizes.inner + 2 * sizes.grouped, filtered),
        stand_in(sizes.nheads, tracked),
    )
    _, text = prepare_scan(
        scan,
        context,
        mixer.chunk_size,
        dt_softplus=True,
        dt_limit=mixer.dt_limit,
        engine=mixer.engine,
    )
    return text


def _permuted(mixer: Mixer, context: CPContext, method: str) -> Result:
    """Tokens to the contiguous plan, the core there, outputs and states back."""
    plan, straight, rank = context.plan, _straight(context.plan), context.rank
    batch = mixer.zxbcdt.shape[0]
    call = _calls(context, method)
    there = relayout(plan, straight, rank)
    (zxbcdt,) = exchange(call("tokens", there), mixer.zxbcdt)
    initial = mixer.initial_states
    if initial is not None:
        owners = state_move(straight, plan, rank, batch, "first")
        initial = send_back(call("gradient of initial states", owners), initial, slice(None))
    y, final = _in_place(
        replace(mixer, zxbcdt=zxbcdt, initial_states=initial),
        CPContext(straight, context.transport),
    )
    back = there.reverse
    if final is None:
        return exchange(call("outputs", back), y)[0], None
    owners = state_move(straight, plan, rank, batch, "last")
    y, final = exchange(call("outputs", back, owners), y, final)
    return y, final


def _by_heads(mixer: Mixer, context: CPContext) -> Result:
    """All tokens of some heads, the core there alone, outputs and states back."""
    plan, rank, sizes = context.plan, context.rank, mixer.sizes
    batch, _, width = mixer.zxbcdt.shape
    shares = head_shares(sizes, plan.world_size)
    call = _calls(context, "a2a")
    columns = tuple(share.columns for share in shares)
    (zxbcdt,) = exchange(call("tokens", TokensToHeads(plan, rank, columns, width)), mixer.zxbcdt)
    mine = replace(_share_of(mixer, shares[rank]), zxbcdt=zxbcdt)
    if mixer.initial_states is not None:
        owners = HeadsToStates(plan, rank, batch, "first", sizes.nheads)
        own = call("gradient of initial states", owners)
        initial = send_back(own, mixer.initial_states, shares[rank].heads)
        mine = replace(mine, initial_states=initial)
    y, final = _in_place(mine, alone(context))
    outputs = tuple(share.outputs for share in shares)
    back = HeadsToTokens(plan, rank, outputs, sizes.inner)
    if final is None:
        return exchange(call("outputs", back), y)[0], None
    owners = HeadsToStates(plan, rank, batch, "last", sizes.nheads)
    y, final = exchange(call("outputs", back, owners), y, final)
    return y, final


def _calls(context: CPContext, method: str) -> Callable[..., Exchange]:
    carrier, text = carrier_of(context), f"plan {context.plan.digest()}"

    def call(what: str, *moves: Move) -> Exchange:
        return Exchange(f"{_TITLE}, {what}", carrier, moves, method, text)

    return call


def _share_of(mixer: Mixer, share: HeadShare) -> Mixer:
    """Return the core of a rank's heads; tokens are not touched."""

    def channels(parameter: Tensor) -> Tensor:
        return torch.cat([parameter[piece] for piece in share.channels])

    heads, initial = share.heads, mixer.initial_states
    return replace(
        mixer,
        conv1d_weight=channels(mixer.conv1d_weight),
        conv1d_bias=None if mixer.conv1d_bias is None else channels(mixer.conv1d_bias),
        dt_bias=mixer.dt_bias[heads],
        A=mixer.A[heads],
        D=mixer.D[heads],
        initial_states=None if initial is None else initial[:, heads],
        sizes=share.sizes,
        repeat=share.repeat,
    )
