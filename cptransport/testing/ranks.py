# SPDX-License-Identifier: Apache-2.0
"""What one rank of a test sees: who it is, how to make transports, another way to its peers."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
import torch.distributed as dist

from cptransport.errors import CPTransportError, TransportClosedError
from cptransport.select import create_transport
from cptransport.transport import BoundaryTransport

__all__ = ["Answer", "Order", "Ranks", "case_path", "load_case", "run_case"]


@dataclass(frozen=True)
class Order:
    """A case to run, from the pool to a rank."""

    number: int
    case: str
    kwargs: dict[str, Any]
    backend: str
    transport: bool
    timeout_s: float


@dataclass(frozen=True)
class Answer:
    """How a case went on one rank: its result, or the traceback."""

    result: Any = None
    failure: str | None = None


@dataclass
class Ranks:
    """One rank's view of a case.

    Attributes:
        rank, world_size: position of this rank, and how many there are.
        backend: the name of the backend under test, or ``module:ATTR``.
        device: where its transports' tensors live.
        timeout_s: limit of waits of transports made here, unless another is given.
        processes: whether ranks are processes (else threads of one process).
        store: a ``torch.distributed`` store that the ranks of this case share.
    """

    rank: int
    world_size: int
    backend: str
    device: torch.device
    timeout_s: float
    processes: bool
    store: Any
    _made: list[BoundaryTransport] = field(default_factory=list)
    _syncs: int = 0

    def create(self, group: Any = None, *, timeout_s: float | None = None) -> BoundaryTransport:
        """Make a transport of the backend under test; ``Ranks`` closes it after the case.

        Args:
            group: a ``torch.distributed`` group that this rank is in; None: all ranks.
            timeout_s: limit of its waits.

        Collective: over the group.
        """
        seconds = self.timeout_s if timeout_s is None else timeout_s
        if self.processes:
            made = create_transport(
                group, backend=self.backend, device=self.device, strict=True, timeout_s=seconds
            )
        else:
            made = _thread_backend(self.backend).create(None, self.device, seconds)
        self._made.append(made)
        return made

    def subgroup(self, *groups: Sequence[int]) -> Any:
        """Make process groups, all ranks together, and return the one this rank is in, or None."""
        mine = None
        for ranks in groups:
            made = dist.new_group(list(ranks), backend=dist.get_backend())
            if self.rank in ranks:
                mine = made
        return mine

    def sync(self) -> None:
        """Wait for all ranks of the case, without any transport."""
        self._syncs += 1
        prefix = f"sync/{self._syncs}"
        self.store.set(f"{prefix}/{self.rank}", "")
        self._await([f"{prefix}/{rank}" for rank in range(self.world_size)])

    def tell(self, key: str, value: str) -> None:
        """Give a text to the other ranks of the case."""
        self.store.set(f"tell/{key}", value)

    def ask(self, key: str, limit_s: float = 60.0) -> str:
        """Return what some rank told under that key; waits for it."""
        self._await([f"tell/{key}"], limit_s)
        return str(self.store.get(f"tell/{key}").decode())

    def _await(self, keys: list[str], limit_s: float = 60.0) -> None:
        deadline = time.monotonic() + limit_s
        while not self.store.check(keys):
            if self.store.check(["failed"]):
                raise AssertionError(f"rank {self.rank}: stopped, another rank failed")
            if time.monotonic() > deadline:
                raise AssertionError(f"rank {self.rank}: no rank gave {keys} in {limit_s:g} s")
            time.sleep(0.001)

    def forget(self, transport: BoundaryTransport) -> None:
        """Leave a transport's closing to the case."""
        self._made = [made for made in self._made if made is not transport]

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Close the transports made meanwhile, as ``with transport:`` does."""
        with contextlib.ExitStack() as stack:
            stack.push(self._close)
            yield

    def _close(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        for made in reversed(self._made):
            leave = getattr(made, "__exit__", None)
            if leave is not None:
                leave(kind, error, trace)
            else:
                made.close()
        left_open = [made.name for made in self._made if error is None and not _is_closed(made)]
        self._made.clear()
        if left_open:
            raise AssertionError(f"transports {left_open} serve verbs after close()")


def _is_closed(transport: BoundaryTransport) -> bool:
    try:
        transport.check()
    except TransportClosedError:
        return True
    except CPTransportError:
        return False
    return False


def _thread_backend(name: str) -> Any:
    """Find a backend that serves threads of one process; selection is for processes."""
    if name == "threads":
        from cptransport.transports.threads import BACKEND

        return BACKEND
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def case_path(case: str | Callable[..., Any]) -> str:
    """Return ``module:name``, or ``file.py:name`` for functions of files that are no module."""
    if isinstance(case, str):
        return case
    if not isinstance(case, FunctionType) or "<locals>" in case.__qualname__:
        raise TypeError(f"a case is a function at the top of a module, got {case!r}")
    module = case.__module__
    if "." in module and module.partition(".")[0] == "cptransport":
        return f"{module}:{case.__qualname__}"
    return f"{inspect.getsourcefile(case)}:{case.__qualname__}"


def load_case(path: str) -> Callable[..., Any]:
    """Return the function that ``module:name`` or ``file.py:name`` names."""
    where, _, name = path.rpartition(":")
    module = _load_file(Path(where)) if where.endswith(".py") else importlib.import_module(where)
    found: Any = module
    for attribute in name.split("."):
        found = getattr(found, attribute)
    return found  # type: ignore[no-any-return]


def _load_file(path: Path) -> ModuleType:
    name = "cptransport_case_" + "".join(c if c.isalnum() else "_" for c in str(path.resolve()))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"no Python module at {path}")
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def run_case(
    ranks: Ranks, fn: Callable[..., Any], kwargs: dict[str, Any], *, transport: bool
) -> Any:
    """Run a case on this rank.

    Args:
        ranks: this rank.
        fn: the case.
        kwargs: its arguments.
        transport: True: ``fn(transport, **kwargs)``, else ``fn(ranks, **kwargs)``.

    Returns:
        What the case returned.
    """
    try:
        ranks.sync()  # imports may take one rank longer than another; waits of the case may be short
        with ranks.closing():
            return fn(ranks.create() if transport else ranks, **kwargs)
    except BaseException:
        ranks.store.set("failed", "")
        raise
