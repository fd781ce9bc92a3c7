# SPDX-License-Identifier: Apache-2.0
"""Peers of the whole-op benches: how each is called, or why it cannot be here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from cptransport.bench.tuning import TuningLimitError, tuning

__all__ = ["BASELINES", "Call", "NotHereError", "Peer", "Place", "load_peers", "peer_module"]

#: Computes the output of the op from its inputs by name.
Call = Callable[[Mapping[str, Tensor]], Tensor]


class NotHereError(Exception):
    """A peer cannot run here; the text says why."""


@dataclass(frozen=True)
class Place:
    """Where peers run: on one rank of several whose inputs are all here.

    Attributes:
        op: ``"kda"`` or ``"ssd"``.
        device, dtype: of the tensors under test.
        rank, world_size: the rank that is measured.
        local: a rank's inputs by name. grad: of its output.
        options: of the op as the benches see it.
        limit_s: for preparing a peer, tuning included.
    """

    op: str
    device: torch.device
    dtype: torch.dtype
    rank: int
    world_size: int
    local: Callable[[int], Mapping[str, Tensor]]
    grad: Callable[[int], Tensor]
    options: Mapping[str, Any]
    limit_s: float


@dataclass(frozen=True)
class Peer:
    """One way to run a peer.

    Attributes:
        name: of its rows.
        call: None: it cannot run here.
        cp: it computes the rank's part of the whole, else the rank's tokens alone.
        absent: why it cannot run here.
    """

    name: str
    call: Call | None
    cp: bool = False
    absent: str | None = None


def peer_module(module: str, device: torch.device, install: str) -> Any:
    """Import a peer; anything that keeps it from loading is the reason why it is not here.

    Raises:
        NotHereError: with that reason.
    """
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise NotHereError(f"{package} is not installed: {install}")
    if device.type != "cuda":
        raise NotHereError(f"{package} needs a CUDA device")
    try:
        return import_module(module)
    except ImportError as error:
        raise NotHereError(f"cannot import {module}: {error}") from error


def _tuned(place: Place, call: Call, rank: int) -> None:
    """Run forward and backward once, so that nothing is compiled or tuned later."""
    leaves = {name: x.detach().requires_grad_() for name, x in place.local(rank).items()}
    try:
        with tuning(place.limit_s):
            output = call(leaves)
            torch.autograd.grad(output, list(leaves.values()), place.grad(rank), allow_unused=True)
    except TuningLimitError as error:
        raise NotHereError(str(error)) from error


def _fla(place: Place) -> list[Peer]:
    """FLA with its context parallelism, and without on the same kernels (a packed sequence)."""
    kda = peer_module("fla.ops.kda", place.device, "pip install fla-core==0.6.0")
    from cptransport.bench.fla_cp import Alone

    alone = Alone(place.world_size, place.local(place.rank)["q"].shape[1], place.device)

    def with_cp(inputs: Mapping[str, Tensor]) -> Tensor:
        with alone.forward() as context:
            output: Tensor = kda.chunk_kda(**inputs, cp_context=context)[0]
        return output

    def without(inputs: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = kda.chunk_kda(**inputs, cu_seqlens=alone.cu_seqlens)[0]
        return output

    for rank in [place.rank, *range(place.world_size)]:  # the first one tunes
        with alone.recorded(rank):
            _tuned(place, with_cp, rank)
    alone.replay(place.rank)
    _tuned(place, without, place.rank)
    return [Peer("fla", with_cp, cp=True), Peer("fla-no-cp", without)]


def _mamba_ssm(place: Place) -> list[Peer]:
    module = peer_module("mamba_ssm.ops.triton.ssd_combined", place.device, "pip install mamba-ssm")
    chunk_size = place.options["chunk_size"]

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = module.mamba_chunk_scan_combined(
            chunk_size=chunk_size, dt_softplus=True, **inputs
        )
        return output

    _tuned(place, call, place.rank)
    return [Peer("mamba_ssm", call)]


#: What cuDNN's KDA takes on Hopper, forward and backward: sizes of K and V, dtype of the stream, and
#: how far a log decay may sum up in the 16 tokens that it exponentiates at once.
_CUDNN_SIZE, _CUDNN_DTYPE, _CUDNN_SUM = 128, torch.bfloat16, -87.0


def _cudnn(place: Place) -> list[Peer]:
    module = peer_module("cudnn", place.device, "pip install nvidia-cudnn-frontend")
    if place.op != "kda":
        raise NotHereError("cuDNN has no Mamba2 on this GPU (Blackwell only)")
    x = place.local(place.rank)
    sizes = {x["q"].shape[-1], x["v"].shape[-1]}
    if place.dtype != _CUDNN_DTYPE or sizes != {_CUDNN_SIZE}:
        raise NotHereError(f"cuDNN's KDA takes bfloat16 and K = V = {_CUDNN_SIZE} here")
    if x["q"].shape[2] != x["v"].shape[2]:
        raise NotHereError("cuDNN's KDA has no backward here with more value heads than heads")
    lowest = 16 * float(x["g"].min())
    if lowest < _CUDNN_SUM:
        raise NotHereError(f"log decays down to {lowest:g} in 16 tokens overflow in cuDNN's KDA")
    try:
        attention = import_module("cudnn.linear_attention").kimi_delta_attention
    except ImportError as error:
        raise NotHereError(f"cannot import cudnn.linear_attention: {error}") from error
    ends = torch.tensor([0, x["q"].shape[1]], dtype=torch.int32, device=place.device)

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = attention(
            *(inputs[name][0] for name in ("q", "k", "v", "g", "beta")), ends
        )[0]
        return output[None]

    try:
        _tuned(place, call, place.rank)
    except module.cudnnGraphNotSupportedError as error:
        raise NotHereError(f"cuDNN: {error}") from error
    return [Peer("cudnn", call)]


#: op -> name -> how to get its ``Peer``s.
BASELINES: Mapping[str, Mapping[str, Callable[[Place], list[Peer]]]] = {
    "kda": {"fla": _fla, "cudnn": _cudnn},
    "ssd": {"mamba_ssm": _mamba_ssm, "cudnn": _cudnn},
}


def load_peers(name: str, place: Place) -> list[Peer]:
    """Return the ways to run a peer; one that cannot run here says why."""
    try:
        return BASELINES[place.op][name](place)
    except NotHereError as reason:
        return [Peer(name, None, absent=str(reason))]
