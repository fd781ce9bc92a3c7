# SPDX-License-Identifier: Apache-2.0
"""cuDNN's KDA as this machine has it: found or not and why, its registered ops, what it says of itself.

Written for the frontend's release 1.32.0. Nothing compares versions: a function is there with the
arguments that are needed, or the error says which version was found and what is missing.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from cptransport.errors import BackendUnavailableError, EnvVarError
from cptransport_cudnn_summary import BACKEND
from cptransport_cudnn_summary.concat import Binding, find_binding

__all__ = ["Library", "describe", "find", "setting", "why_not_required"]

_DISTRIBUTION = "nvidia-cudnn-frontend"
_NEEDED = f"needs {_DISTRIBUTION} >= 1.32.0: pip install 'cptransport-cudnn-summary[cu13]'"

#: Arguments of the registered ops that the engine gives.
_FORWARD = ("q", "k", "v", "g", "beta", "cu_seqlens", "scale", "initial_state")
_BACKWARD = ("dO", *_FORWARD, "d_final_state")


@dataclass(frozen=True, eq=False)
class Library:
    """The registered ops.

    Attributes:
        version: of the frontend.
        forward, backward: KDA's; overloads, so that no call looks for one.
        summary, summary_backward: of segments; None where this version has none.
        binding: how the concatenated-summary API is called; None: absent, ``absent`` says why.
        device_types: whose tensors the ops take.
    """

    version: str
    forward: Any
    backward: Any
    summary: Any = None
    summary_backward: Any = None
    binding: Binding | None = None
    absent: str = ""
    device_types: tuple[str, ...] = ("cuda",)


def library_of(module: Any, ops: Any, found: str, device_types: tuple[str, ...]) -> Library:
    """Collect the ops.

    Args:
        module: ``cudnn.linear_attention``.
        ops: the namespace of the registered ops.
        found: version of the frontend.
        device_types: whose tensors they take.

    Raises:
        BackendUnavailableError: KDA is not among them.
    """
    public = getattr(module, "kimi_delta_attention", None)  # importing it registers the ops
    forward = _registered(ops, "kimi_delta_attention_fwd", _FORWARD, found)
    backward = _registered(ops, "kimi_delta_attention_bwd", _BACKWARD, found)
    summary, summary_backward = (
        getattr(getattr(ops, f"kimi_delta_attention_{name}", None), "default", None)
        for name in ("summary", "summary_bwd")
    )
    binding, absent = find_binding(public, forward, backward)
    if absent:
        absent = f"{absent} in {_DISTRIBUTION} {found}"
    return Library(
        found, forward, backward, summary, summary_backward, binding, absent, device_types
    )


def _registered(ops: Any, name: str, arguments: tuple[str, ...], found: str) -> Any:
    op = getattr(getattr(ops, name, None), "default", None)
    if op is None:
        raise BackendUnavailableError(
            f"{_DISTRIBUTION} {found} registers no op {name!r}; cudnn {_NEEDED}"
        )
    known = {argument.name for argument in op._schema.arguments}
    missing = [argument for argument in arguments if argument not in known]
    if missing:
        raise BackendUnavailableError(
            f"{_DISTRIBUTION} {found}: op {name!r} does not take {', '.join(missing)}; cudnn {_NEEDED}"
        )
    return op


def find() -> Library:
    """Return this machine's ops; looks once.

    Raises:
        BackendUnavailableError: absent, broken or too old; says the version found and what is
            needed.
    """
    found = _find()
    if isinstance(found, BackendUnavailableError):
        raise BackendUnavailableError(str(found)) from found.__cause__
    return found


@lru_cache(maxsize=1)
def _find() -> Library | BackendUnavailableError:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a library's own, and no sign that it is broken
            module = _import()
        return library_of(module, torch.ops.cudnn, _version(), ("cuda",))
    except BackendUnavailableError as error:
        return error


def _import() -> Any:
    try:
        importlib.import_module("cudnn")
    except ModuleNotFoundError as error:
        if error.name == "cudnn":
            raise BackendUnavailableError(
                f"{_DISTRIBUTION} is not installed; cudnn {_NEEDED}"
            ) from error
        raise _broken(error) from error
    except Exception as error:
        raise _broken(error) from error
    try:
        module = importlib.import_module("cudnn.linear_attention")
        module.kimi_delta_attention  # noqa: B018  # imported when first looked up
    except (AttributeError, ModuleNotFoundError) as error:
        missing = getattr(error, "name", None) or ""
        if isinstance(error, ModuleNotFoundError) and not missing.startswith("cudnn."):
            raise _broken(error) from error
        raise BackendUnavailableError(
            f"{_DISTRIBUTION} {_version()} has no cudnn.linear_attention.kimi_delta_attention; "
            f"cudnn {_NEEDED}"
        ) from error
    except Exception as error:
        raise _broken(error) from error
    return module


def _broken(error: Exception) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"{_DISTRIBUTION} {_version()} is broken: {type(error).__name__}: {error}; cudnn {_NEEDED}"
    )


def _version() -> str:
    try:
        return version(_DISTRIBUTION)
    except PackageNotFoundError:
        return str(getattr(sys.modules.get("cudnn"), "__version__", "of unknown version"))


def setting(name: str) -> str:
    """Return one of this backend's own variables.

    Raises:
        EnvVarError: none of its values.
    """
    variable = next(each for each in BACKEND.variables if each.name == name)
    value = os.environ.get(name, "").strip() or variable.default
    if value not in variable.values:
        raise EnvVarError(
            f"{name}={value} is not valid; choose one of {', '.join(variable.values)}"
        )
    return value


def why_not_required() -> str | None:
    """Say why the concatenated-summary API, which the user requires, cannot be had; None: it can, or need not."""
    if setting("CULA_CP_CUDNN_CONCAT") != "require":
        return None
    try:
        found = find()
    except BackendUnavailableError as error:
        return str(error)
    if found.binding is None:
        return f"CULA_CP_CUDNN_CONCAT=require, but {found.absent}"
    return None


def describe(device: torch.device) -> list[str]:
    """Say for ``doctor`` what of cuDNN's KDA is here; ``device`` is not asked."""
    try:
        found = find()
        asked = setting("CULA_CP_CUDNN_CONCAT")
    except (BackendUnavailableError, EnvVarError) as error:
        return [f"engine cudnn: {error}"]
    summaries = "summary ops registered" if found.summary is not None else "no summary ops"
    concat = found.absent
    if found.binding is not None:
        concat = f"present ({found.binding}); checked against the fp32 composition before use"
    return [
        f"engine cudnn: {_DISTRIBUTION} {found.version}, {summaries}",
        f"concatenated summaries (CULA_CP_CUDNN_CONCAT={asked}): {concat}",
    ]
