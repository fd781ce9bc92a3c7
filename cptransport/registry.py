# SPDX-License-Identifier: Apache-2.0
"""Which backends and engines exist, and what their names stand for.

Three sources, read when asked and never at import: the table of this repository (built-ins, and the
five packages beside it, known even when absent), installed entry points, and
``package.module:ATTR`` given as a name. Only what is asked for is imported, so one broken plugin
does not affect the others.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace

from cptransport import env
from cptransport.backend import BackendSpec
from cptransport.descriptor import fault_of
from cptransport.engine_registry import ENGINES_GROUP, broken_engines, engine_names, load_engine
from cptransport.errors import (
    BackendConflictError,
    BackendContractError,
    BackendError,
    BackendNotFoundError,
    EnvVarError,
)
from cptransport.plugins import (
    CORE,
    Origin,
    import_attribute,
    installed_version,
    registered,
    same_distribution,
)

__all__ = [
    "AUTO",
    "BACKENDS_GROUP",
    "CORE",
    "ENGINES_GROUP",
    "NVSHMEM",
    "LoadedBackend",
    "Origin",
    "backend_names",
    "broken_engines",
    "check_environment",
    "check_values",
    "declared_variables",
    "engine_names",
    "find_backend",
    "installed_version",
    "known_origins",
    "load_backend",
    "load_engine",
]

BACKENDS_GROUP = "cptransport.backends"
#: Names that stand for a choice among backends; nobody may register them.
AUTO, NVSHMEM = "auto", "nvshmem"


@dataclass(frozen=True)
class LoadedBackend:
    """A descriptor that keeps the contract, and where it comes from."""

    spec: BackendSpec
    origin: Origin


def _own(name: str) -> Origin:
    return Origin(name, f"cptransport.transports.{name}:BACKEND", CORE)


def _package(name: str, install: str) -> Origin:
    return Origin(
        name, f"cptransport_{name}:BACKEND", f"cptransport-{name.replace('_', '-')}", install
    )


#: Known in every installation; their names belong to these distributions.
_KNOWN = {
    origin.name: origin
    for origin in (
        _own("loopback"),
        _own("threads"),
        _own("gloo"),
        _package("nccl", "pip install cptransport-nccl"),
        _package("nvshmem_signal", "pip install 'cptransport-nvshmem-signal[cu13]'"),
        _package("nvshmem_barrier", "pip install 'cptransport-nvshmem-barrier[cu13]'"),
        _package("cudnn_summary", "pip install 'cptransport-cudnn-summary[cu13]'"),
        _package("cupy_ipc", "pip install 'cptransport-cupy-ipc[cu13]'"),
    )
}


def known_origins() -> dict[str, Origin]:
    """Return the backends of this repository by name, installed or not."""
    return dict(_KNOWN)


def backend_names() -> tuple[str, ...]:
    """Return every known backend name: this repository's first, then plugins'."""
    return tuple(dict.fromkeys([*_KNOWN, *(origin.name for origin in registered(BACKENDS_GROUP))]))


def find_backend(name: str) -> Origin:
    """Return where a backend comes from; imports nothing.

    Args:
        name: a registered name or ``package.module:ATTR``.

    Raises:
        BackendNotFoundError: nobody registers it; the message lists the names and the closest one.
        BackendConflictError: several distributions claim the name; the message names them.
    """
    if ":" in name:
        if not re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", name):
            raise BackendNotFoundError(f"{name!r} is not of the form package.module:ATTR")
        return Origin(name, name, "")
    claims = [origin for origin in registered(BACKENDS_GROUP) if origin.name == name]
    owner = Origin(name, "", CORE) if name in (AUTO, NVSHMEM) else _KNOWN.get(name)
    if owner is not None:
        ours = [
            claim for claim in claims if same_distribution(claim.distribution, owner.distribution)
        ]
        others = [claim for claim in claims if claim not in ours]
        claims = [*(replace(claim, install=owner.install) for claim in ours or [owner]), *others]
    if not claims:
        names = (AUTO, *backend_names(), NVSHMEM)
        raise BackendNotFoundError(
            f"no backend is named {name!r}{env.suggestion(name.lower(), names)}; known are "
            f"{', '.join(names)}, or package.module:ATTR"
        )
    if len(claims) > 1:
        raise BackendConflictError(
            f"the backend name {name!r} is claimed by {' and by '.join(c.distribution for c in claims)}; "
            "uninstall all but one"
        )
    return claims[0]


def load_backend(name: str) -> LoadedBackend:
    """Import a backend's descriptor and check that it keeps the contract.

    Args:
        name: as in ``find_backend``.

    Raises:
        BackendNotFoundError, BackendConflictError: as ``find_backend``; a ``module:ATTR`` that does
            not exist.
        BackendUnavailableError: known, but not installed; the message says what to install.
        BackendLoadError: importing it failed; ``__cause__`` is the original error.
        BackendContractError: what it registers is no descriptor of this API version.
    """
    origin = find_backend(name)
    spec = import_attribute(origin)
    fault = fault_of(spec)
    if fault is None and origin.distribution and spec.name != origin.name:
        fault = f"its descriptor is named {spec.name!r}"
    if fault is not None:
        raise BackendContractError(f"backend {origin}: {fault}")
    return LoadedBackend(spec, origin)


def declared_variables() -> tuple[str, ...]:
    """Return the names of the variables that backends declare; broken ones declare none."""
    names: list[str] = []
    for name in backend_names():
        try:
            names += [variable.name for variable in load_backend(name).spec.variables]
        except BackendError:
            continue  # reported by whoever asks for that backend
    return tuple(names)


def check_environment(*, strict: bool) -> None:
    """Complain about ``CULA_CP_*`` names in the environment that nobody declares.

    Raises:
        EnvVarError: strict, and a name is unknown.
    """
    if env.unknown_names():  # only then, since it imports every backend's descriptor
        env.check_names(strict=strict, declared=declared_variables())


def check_values(spec: BackendSpec) -> None:
    """Check the environment's values of a backend's own variables.

    Raises:
        EnvVarError: one is none of the declared values; the message lists them.
    """
    for variable in spec.variables:
        value = os.environ.get(variable.name, "").strip()
        if value and variable.values and value not in variable.values:
            raise EnvVarError(
                f"{variable.name}={value} is not valid; choose one of {', '.join(variable.values)}"
                + env.suggestion(value, variable.values)
            )
