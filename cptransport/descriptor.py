# SPDX-License-Identifier: Apache-2.0
"""The contract of a backend's descriptor, checked when it is loaded."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from cptransport import env
from cptransport.backend import BackendSpec, Variable
from cptransport.transport import TRANSPORT_API_VERSION, Capabilities

__all__ = ["fault_of"]


def fault_of(spec: Any) -> str | None:
    """Say which clause of the descriptor's contract is broken, if any."""
    if not isinstance(spec, BackendSpec):
        return f"registers {type(spec).__name__}, not a BackendSpec"
    if spec.api_version != TRANSPORT_API_VERSION:
        return f"was written for transport API {spec.api_version}, this cptransport has {TRANSPORT_API_VERSION}"
    for name in ("name", "summary", "install"):
        if not isinstance(getattr(spec, name), str):
            return f"{name} must be text, got {getattr(spec, name)!r}"
    if not isinstance(spec.preferred_engine, str | None):
        return f"preferred_engine must be text or None, got {spec.preferred_engine!r}"
    return (
        _fault_of_capabilities(spec.capabilities)
        or _fault_of_variables(spec.variables)
        or _fault_of_signature("probe", spec.probe, ("group", "device"))
        or _fault_of_signature("create", spec.create, ("group", "device", "timeout_s"))
        or (spec.advice and _fault_of_signature("advice", spec.advice, ("device",)))
        or (spec.details and _fault_of_signature("details", spec.details, ("device",)))
    )


def _fault_of_capabilities(capabilities: Any) -> str | None:
    if not isinstance(capabilities, Capabilities):
        return f"capabilities must be a Capabilities, got {type(capabilities).__name__}"
    types = capabilities.device_types
    if not isinstance(types, tuple) or not types or not all(isinstance(t, str) for t in types):
        return f"capabilities.device_types must be a non-empty tuple of text, got {types!r}"
    for flag in fields(capabilities):
        value = getattr(capabilities, flag.name)
        if flag.name != "device_types" and not isinstance(value, bool):
            return f"capabilities.{flag.name} must be a bool, got {value!r}"
    return None


def _fault_of_variables(variables: Any) -> str | None:
    if not isinstance(variables, tuple) or not all(isinstance(v, Variable) for v in variables):
        return f"variables must be a tuple of Variable, got {variables!r}"
    taken = [variable.name for variable in env.VARIABLES]
    for variable in variables:
        if variable.name in taken:
            return f"declares the variable {variable.name}, which has an owner already"
        taken.append(variable.name)
    return None


def _fault_of_signature(what: str, function: Any, expected: Sequence[str]) -> str | None:
    wanted = f"{what}({', '.join(expected)})"
    if not callable(function):
        return f"{wanted} must be callable, got {type(function).__name__}"
    signature = inspect.signature(function)
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = [p.name for p in signature.parameters.values() if p.kind in positional]
    try:
        signature.bind(*expected)
    except TypeError:
        found = []
    if tuple(found[: len(expected)]) != tuple(expected):
        return f"{what}{signature} does not take what {wanted} is called with"
    return None
