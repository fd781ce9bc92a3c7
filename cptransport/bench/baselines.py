# SPDX-License-Identifier: Apache-2.0
"""Peers of the whole-op benches: how each is called, or why it cannot be here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

__all__ = ["BASELINES", "Call", "NotHereError", "load_baseline"]

#: Computes the output of the op from its inputs by name, on one rank, without CP.
Call = Callable[[Mapping[str, Tensor]], Tensor]


class NotHereError(Exception):
    """A peer cannot run here; the text says why."""


def _peer(module: str, device: torch.device, install: str) -> Any:
    """Import a peer; anything that keeps it from loading is the reason why it is not here."""
    package = module.partition(".")[0]
    if find_spec(package) is None:
        raise NotHereError(f"{package} is not installed: {install}")
    if device.type != "cuda":
        raise NotHereError(f"{package} needs a CUDA device")
    try:
        return import_module(module)
    except ImportError as error:
        raise NotHereError(f"cannot import {module}: {error}") from error


def _fla(device: torch.device, options: Mapping[str, Any]) -> Call:
    chunk_kda = _peer("fla.ops.kda", device, "pip install flash-linear-attention").chunk_kda

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = chunk_kda(**inputs)[0]
        return output

    return call


def _mamba_ssm(device: torch.device, options: Mapping[str, Any]) -> Call:
    module = _peer("mamba_ssm.ops.triton.ssd_combined", device, "pip install mamba-ssm")
    chunk_size = options["chunk_size"]

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        output: Tensor = module.mamba_chunk_scan_combined(
            chunk_size=chunk_size, dt_softplus=True, **inputs
        )
        return output

    return call


def _cudnn(device: torch.device, options: Mapping[str, Any]) -> Call:
    _peer("cudnn", device, "pip install nvidia-cudnn-frontend")
    raise NotHereError("this bench has no adapter for cuDNN yet")


def _all_to_all(device: torch.device, options: Mapping[str, Any]) -> Call:
    raise NotHereError(
        "it redistributes heads among all ranks; this bench runs one interior rank alone"
    )


#: op -> name -> how to get its ``Call``.
BASELINES: Mapping[str, Mapping[str, Callable[[torch.device, Mapping[str, Any]], Call]]] = {
    "kda": {"fla": _fla, "cudnn": _cudnn},
    "ssd": {"mamba_ssm": _mamba_ssm, "cudnn": _cudnn, "all_to_all": _all_to_all},
}


def load_baseline(op: str, name: str, device: torch.device, options: Mapping[str, Any]) -> Call:
    """Return how a peer is called.

    Raises:
        NotHereError: it cannot be; says why.
    """
    return BASELINES[op][name](device, options)
