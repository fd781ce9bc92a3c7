# SPDX-License-Identifier: Apache-2.0
"""Plugins by name: what installed distributions register, imported only when asked for."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from cptransport.errors import (
    BackendContractError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
)

__all__ = [
    "CORE",
    "Origin",
    "import_attribute",
    "installed_version",
    "registered",
    "same_distribution",
]

CORE = "cptransport"


@dataclass(frozen=True)
class Origin:
    """Where a name comes from.

    Attributes:
        name: of the backend or the engine's entry point.
        value: ``module:ATTR``.
        distribution: that registers it; empty for a ``module:ATTR`` given as a name.
        install: how to install it; empty when unknown.
    """

    name: str
    value: str
    distribution: str
    install: str = ""

    @property
    def version(self) -> str:
        """Version of the distribution."""
        return installed_version(self.distribution)

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.value.partition(":")[0]

    def __str__(self) -> str:
        if not self.distribution:
            return self.value
        return f"{self.name!r} of {self.distribution} {self.version} ({self.value})"


def installed_version(distribution: str) -> str:
    """Return a distribution's version, ``"0+unknown"`` when it is only on the path."""
    try:
        return version(distribution) if distribution else "0+unknown"
    except PackageNotFoundError:
        return "0+unknown"


def registered(group: str) -> Iterator[Origin]:
    """Yield what installed distributions register in an entry-point group, ordered by name; imports nothing."""
    points = entry_points(group=group)
    for point in sorted(points, key=lambda p: (p.name, p.dist.name if p.dist else "")):
        value = point.value.partition("[")[0].strip()  # extras of an entry point are history
        yield Origin(
            point.name, value, point.dist.name if point.dist else "an unnamed distribution"
        )


def import_attribute(origin: Origin) -> Any:
    """Import the object that an origin names.

    Raises:
        BackendNotFoundError: the user gave a ``module:ATTR`` that does not exist.
        BackendUnavailableError: its own module is absent.
        BackendLoadError: anything else went wrong; ``__cause__`` is the original error.
        BackendContractError: making its descriptor failed with one.
    """
    attribute = origin.value.partition(":")[2]
    try:
        module = importlib.import_module(origin.module)
        return functools.reduce(getattr, attribute.split("."), module)
    except BackendContractError as error:
        raise BackendContractError(f"{origin}: {error}") from error
    except (Exception, SystemExit) as error:  # a plugin may not end the process
        absent = isinstance(error, ModuleNotFoundError) and _is_within(origin.module, error.name)
        if not origin.distribution and (absent or isinstance(error, AttributeError)):
            raise BackendNotFoundError(f"{origin}: {error}") from error
        if absent:
            how = origin.install or f"pip install --force-reinstall {origin.distribution}"
            raise BackendUnavailableError(f"not installed: {how}") from error
        raise BackendLoadError(
            f"{origin} failed to import: {type(error).__name__}: {error}"
        ) from error


def _is_within(module: str, missing: str | None) -> bool:
    """Whether the missing module is the given one or a package around it."""
    return missing is not None and f"{module}.".startswith(f"{missing}.")


def same_distribution(a: str, b: str) -> bool:
    """Whether two spellings name one distribution."""
    return _normal(a) == _normal(b)


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
