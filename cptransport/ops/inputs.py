# SPDX-License-Identifier: Apache-2.0
"""Checks of op inputs that all ops share; a failure is an ``OpInputError`` that names the tensor and both shapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from cptransport.context import CPContext
from cptransport.engines import KDAOptions, OpFacts, SSDOptions
from cptransport.errors import OpInputError, UnsupportedOptionError

__all__ = [
    "check_batch",
    "check_context",
    "check_floating",
    "check_same_dtype",
    "check_shape",
    "count_states",
    "describe_call",
    "op_device",
    "refuse_upstream",
    "state_dtype",
]


def check_context(cp_context: object) -> CPContext:
    """Return the context.

    Raises:
        OpInputError: it is none.
    """
    if not isinstance(cp_context, CPContext):
        raise OpInputError(f"cp_context must be a CPContext, got {type(cp_context).__name__}")
    return cp_context


def check_shape(name: str, tensor: Tensor, expected: tuple[int | None, ...], words: str) -> None:
    """Raise unless a tensor has the expected shape; None accepts any size.

    Args:
        name: of the input.
        tensor: the input.
        expected: sizes.
        words: the shape in letters, e.g. ``"[B, T, H, K]"``.
    """
    if not isinstance(tensor, Tensor):
        raise OpInputError(f"{name} must be a tensor of shape {words}, got {type(tensor).__name__}")
    fits = tensor.dim() == len(expected) and all(
        want is None or size == want for size, want in zip(tensor.shape, expected, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in expected)
        raise OpInputError(f"{name} must be {words} = [{sizes}], got {list(tensor.shape)}")


def check_floating(tensors: Mapping[str, Tensor | None], device: torch.device) -> None:
    """Raise unless all given tensors are real floating point and on the transport's device."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.dtype.is_floating_point or tensor.element_size() < 2:
            raise OpInputError(
                f"{name} must be bfloat16, float16, float32 or float64, got {tensor.dtype}"
            )
        if tensor.device.type != device.type or (
            device.index is not None and tensor.device.index != device.index
        ):
            raise OpInputError(f"{name} is on {tensor.device}, the transport on {device}")


def op_device(context: CPContext, tensor: Tensor) -> torch.device:
    """Where an op runs: on the transport's device, or in a group of one rank wherever its inputs are."""
    transport = context.transport
    return tensor.device if transport.world_size == 1 else transport.device


def check_same_dtype(tensors: Mapping[str, Tensor]) -> None:
    """Raise unless all tensors share one dtype."""
    if len({tensor.dtype for tensor in tensors.values()}) > 1:
        found = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise OpInputError(f"these inputs must have one dtype: {found}")


def check_batch(name: str, tensor: Tensor, context: CPContext) -> int:
    """Check B and the local length of ``[B, T, ...]`` against the plan and return the number of states N.

    Raises:
        OpInputError: packed input with B != 1, B = 0, or T is not this rank's length in the plan.
    """
    batch, length = tensor.shape[:2]
    sequences = context.plan.num_sequences
    if sequences != 1 and batch != 1:
        raise OpInputError(
            f"{name}: a plan of {sequences} sequences needs packed input with B = 1, got B = {batch}"
        )
    if batch < 1:
        raise OpInputError(f"{name}: B must be at least 1, got {batch}")
    expected = context.local.num_tokens
    if length != expected:
        raise OpInputError(
            f"{name}: rank {context.rank} has {length} local rows, its plan says {expected}"
        )
    return count_states(tensor, context)


def count_states(tensor: Tensor, context: CPContext) -> int:
    """Return the number of states N of ``[B, T, ...]`` that fits the plan; checks nothing."""
    sequences = context.plan.num_sequences
    return tensor.shape[0] if sequences == 1 else sequences


def state_dtype(tensor: Tensor) -> torch.dtype:
    """Dtype of states and of their composition: float64 for float64 inputs, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def refuse_upstream(op: str, given: Mapping[str, object], reasons: Mapping[str, str]) -> None:
    """Refuse upstream arguments that are not served here; None and False count as not given.

    Raises:
        UnsupportedOptionError: a known upstream argument was given; says why it is not served.
        TypeError: nobody knows the argument.
    """
    for name, value in given.items():
        if name not in reasons:
            raise TypeError(f"{op}() got an unexpected keyword argument {name!r}")
        if value is not None and value is not False:
            raise UnsupportedOptionError(f"{op}: {name} is not served: {reasons[name]}")


def describe_call(
    facts: OpFacts, plan_digest: str, engine: str, composition: str, overlap: bool
) -> str:
    """Everything about a call that must be the same on all ranks, as one line of ``name value; ...``."""
    options: KDAOptions | SSDOptions = facts.options
    items = [
        f"plan {plan_digest}",
        f"B {facts.batch}",
        f"heads {facts.heads}",
        f"value heads {facts.value_heads}",
        f"key dim {facts.key_dim}",
        f"value dim {facts.value_dim}",
        *(f"{name} {dtype}" for name, dtype in sorted(facts.dtypes.items())),
        f"requires_grad {sorted(facts.requires_grad)}",
        f"device {facts.device_type}",
        repr(options),
        f"engine {engine}",
        f"composition {composition}",
        f"overlap {overlap}",
    ]
    return "; ".join(items)
