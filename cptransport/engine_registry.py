# SPDX-License-Identifier: Apache-2.0
"""Which engines exist, by op and name: this repository's, and those that plugins register.

The name of a plugin's entry point is free, the engine itself says which op and name it serves. So
the engines of this repository are found without importing any plugin, and all plugins are imported
once any other name is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

from cptransport import env
from cptransport.errors import (
    BackendConflictError,
    BackendContractError,
    BackendError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
)
from cptransport.plugins import CORE, Origin, import_attribute, registered

if TYPE_CHECKING:
    from cptransport.engines import Engine

__all__ = ["ENGINES_GROUP", "broken_engines", "engine_names", "engine_variables", "load_engine"]

ENGINES_GROUP = "cptransport.engines"

_OWN = {
    ("kda", "torch"): "cptransport.engines.torch:KDA_ENGINE",
    ("ssd", "torch"): "cptransport.engines.torch:SSD_ENGINE",
    ("kda", "triton"): "cptransport.engines.triton:KDA_ENGINE",
    ("ssd", "triton"): "cptransport.engines.triton:SSD_ENGINE",
}
#: Those of packages beside this one, found by name where they are only on the path; an entry point
#: comes first.
_PACKAGED = {("kda", "cudnn"): "cptransport_cudnn_summary.engine:KDA_ENGINE"}
#: Names that are known on every machine, and how to get what serves them.
_INSTALL = {
    "torch": f"pip install {CORE}",
    "triton": "pip install triton",
    "cudnn": "pip install 'cptransport-cudnn-summary[cu13]'",
}
_METHODS = (
    "eligible",
    "slot_parts",
    "forward_local",
    "forward_finish",
    "backward_local",
    "backward_finish",
)


#: Names of environment variables that engines which were loaded have of their own.
_variables: dict[str, None] = {}


@dataclass
class _Plugins:
    """What the entry points brought: engines with all who claim them, and what failed to load."""

    claims: dict[tuple[str, str], list[tuple[Origin, Engine]]] = field(default_factory=dict)
    broken: list[tuple[Origin, BackendError]] = field(default_factory=list)


def engine_names(op: str) -> tuple[str, ...]:
    """Return the names of the engines for an op: this repository's first, then plugins'.

    Imports every plugin; those that do not load are left out.
    """
    own = [
        name
        for (each, name), value in (*_OWN.items(), *_PACKAGED.items())
        if each == op and _is_there(value.partition(":")[0])
    ]
    return tuple(dict.fromkeys([*own, *(name for each, name in _plugins().claims if each == op)]))


def _is_there(module: str) -> bool:
    package = module.partition(".")[0]
    return find_spec(package) is not None and find_spec(module) is not None


def broken_engines() -> tuple[str, ...]:
    """Return what is wrong with each plugin that does not load."""
    return tuple(str(error) for _, error in _plugins().broken)


def engine_variables() -> tuple[str, ...]:
    """Return the names of the environment variables that the engines loaded so far depend on."""
    return tuple(_variables)


def load_engine(op: str, name: str) -> Engine:
    """Return the engine of that name for an op.

    Args:
        op: ``"kda"`` or ``"ssd"``.
        name: as in ``CULA_CP_ENGINE``, but not ``auto``.

    Raises:
        BackendNotFoundError: no engine has that name for any op; the message lists the names and
            the closest one.
        BackendUnavailableError: the name is known, but what serves it is not installed, or does not
            serve this op.
        BackendConflictError: several distributions claim it; the message names them.
        BackendLoadError, BackendContractError: its plugin is broken; ``__cause__`` is the original
            error.
    """
    own = _OWN.get((op, name))
    if own is not None:
        return _load_own(Origin(name, own, CORE, _INSTALL[name]), op)
    plugins = _plugins()
    claims = plugins.claims.get((op, name), [])
    if len(claims) > 1:
        raise _conflict(op, name, [origin.distribution for origin, _ in claims])
    if claims:
        return claims[0][1]
    packaged = _PACKAGED.get((op, name))
    if packaged is not None:
        package = packaged.partition(".")[0].replace("_", "-")
        return _load_own(Origin(name, packaged, package, _INSTALL[name]), op)
    for origin, error in plugins.broken:
        if name in origin.name:  # entry points are named freely; this one is most likely meant
            raise type(error)(str(error)) from error.__cause__
    known = (*_OWN, *_PACKAGED, *plugins.claims)
    served = sorted({each for each, other in known if other == name})
    if served:
        raise BackendUnavailableError(f"engine {name!r} serves {' and '.join(served)}, not {op}")
    names = dict.fromkeys(["auto", *engine_names(op), *(n for each, n in known if each == op)])
    broken = "".join(f"; {origin} is broken" for origin, _ in plugins.broken)
    raise BackendNotFoundError(
        f"no engine is named {name!r}{env.suggestion(name.lower(), names)}; "
        f"known for {op} are {', '.join(names)}{broken}"
    )


def _load_own(origin: Origin, op: str) -> Engine:
    try:
        return _checked(origin, op)
    except BackendLoadError as error:
        # Engines of this repository say by what they import what they need.
        if isinstance(error.__cause__, ModuleNotFoundError):
            raise BackendUnavailableError(
                f"engine {origin.name!r} needs {error.__cause__.name}: {origin.install}"
            ) from error.__cause__
        raise


def _plugins() -> _Plugins:
    return _load_plugins(tuple(sys.path))


@lru_cache(maxsize=4)
def _load_plugins(path: tuple[str, ...]) -> _Plugins:
    """Import every engine that distributions on the path register, once."""
    found = _Plugins()
    for origin in registered(ENGINES_GROUP):
        try:
            engine = _checked(origin)
        except BackendError as error:
            found.broken.append((origin, error))
            continue
        if (engine.op, engine.name) in _OWN:  # never runs, and never hides what does
            found.broken.append(
                (origin, _conflict(engine.op, engine.name, [CORE, origin.distribution]))
            )
            continue
        found.claims.setdefault((engine.op, engine.name), []).append((origin, engine))
    return found


def _conflict(op: str, name: str, owners: Sequence[str]) -> BackendConflictError:
    return BackendConflictError(
        f"the engine {name!r} for {op} is claimed by {' and by '.join(owners)}; uninstall all but one"
    )


def _checked(origin: Origin, op: str | None = None) -> Engine:
    """Import an engine and check what it has."""
    engine = import_attribute(origin)
    lacking = [
        *(name for name in ("op", "name") if not isinstance(getattr(engine, name, None), str)),
        *(name for name in _METHODS if not callable(getattr(engine, name, None))),
    ]
    if lacking:
        raise BackendContractError(f"engine {origin} lacks {', '.join(lacking)}")
    if op is not None and (engine.op, engine.name) != (op, origin.name):
        raise BackendContractError(f"engine {origin} calls itself {engine.name!r} for {engine.op}")
    _variables.update(dict.fromkeys(getattr(engine, "variables", ())))
    return cast("Engine", engine)
