# SPDX-License-Identifier: Apache-2.0
"""FLA's own context-parallel ops over any of our transports; FLA's kernels stay as they are.

All communication of FLA's context parallelism (recurrent states, convolution tails and their
gradients) goes through one function, ``fla.ops.cp.comm.all_gather_into_tensor``, which calls
``torch.distributed`` under the name ``dist`` of its module. While a transport is installed for a
group, that name is bound to a stand-in: calls for the group go through the transport, everything
else goes where it went. One name is replaced, so whoever imported FLA's functions before is routed
as well, and ``uninstall`` leaves nothing behind. A transport moves bytes, so results equal those
over NCCL in every bit.

Source: flash-linear-attention 0.6.0, ``fla/ops/cp/comm.py``.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.errors import CPTransportError, OpInputError
from cptransport.transport import BoundaryTransport, PartSpec, Slot

__all__ = ["FLASeamError", "Routing", "install", "routed", "uninstall"]

_TESTED = "0.6.0"
_GATHER = "all_gather_into_tensor"
_PARAMETERS = ("inp", "out", "group", "async_op")
#: Where FLA's recurrences take the function from; a seam that they bypass is none.
_USER = "fla.ops.cp.chunk_delta_h"


class FLASeamError(CPTransportError):
    """FLA is not installed, or this version communicates in another way than the one we know."""


class Routing:
    """Calls of one group, through one transport.

    Attributes:
        transport: that they go through.
        calls: how many have so far.
    """

    def __init__(self, transport: BoundaryTransport) -> None:
        self.transport = transport
        self.calls = 0
        ranks = range(transport.world_size)
        self._routes = frozenset((s, d) for s in ranks for d in ranks if s != d)

    def all_gather(self, out: Tensor, inp: Tensor) -> None:
        """Gather ``inp`` of every rank into ``out``, rank-major.

        Args:
            out: ``world_size`` times as many elements as ``inp``, contiguous; overwritten.
            inp: the same shape and dtype on all ranks.

        Collective: over the transport's ranks.
        Stream: on the current stream; ``out`` is valid after it.
        """
        transport = self.transport
        part = PartSpec("gathered", tuple(inp.shape), inp.dtype, self._routes)
        slot = Slot("fla", (part,))
        with torch.no_grad():
            transport.stage(slot)[part.name].copy_(inp)
            transport.publish(slot)
            gathered = transport.gather(slot)
            rows = out.view(transport.world_size, *inp.shape)
            for rank in range(transport.world_size):
                rows[rank].copy_(gathered.tensor(part.name, rank))
        self.calls += 1


class _Done:
    """What ``async_op=True`` returns: the work is ordered on the current stream already."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class _Distributed(ModuleType):
    """Stands in for ``torch.distributed`` in FLA's module."""

    def __init__(self, routings: dict[Any, Routing]) -> None:
        super().__init__(dist.__name__)
        self._routings = routings

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_gather_into_tensor(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        routing = self._routings.get(_key(group))
        if routing is None:
            return dist.all_gather_into_tensor(
                output_tensor, input_tensor, group=group, async_op=async_op
            )
        routing.all_gather(output_tensor, input_tensor)
        return _Done() if async_op else None


_routings: dict[Any, Routing] = {}
_stand_in = _Distributed(_routings)


def install(transport: BoundaryTransport, group: Any = None) -> Routing:
    """Route FLA's communication of a group through a transport.

    Args:
        transport: over the same ranks; its owner closes it, after ``uninstall``.
        group: the ``torch.distributed`` group that FLA's context has; None: WORLD.

    Returns:
        What counts the calls.

    Raises:
        FLASeamError: FLA is absent or communicates in another way; the message says what is
            different.
        OpInputError: the transport does not fit the group, or another one is installed for it.

    Collective: no, but all ranks must do it between the same two calls of FLA.
    """
    place = (dist.get_rank(group), dist.get_world_size(group))
    if (transport.rank, transport.world_size) != place:
        raise OpInputError(
            f"the transport is rank {transport.rank} of {transport.world_size}, "
            f"the group rank {place[0]} of {place[1]}"
        )
    if _key(group) in _routings:
        raise OpInputError("a transport is installed for this group already; uninstall it first")
    module = _seam()
    routing = _routings[_key(group)] = Routing(transport)
    module.dist = _stand_in  # type: ignore[attr-defined]
    return routing


def uninstall(group: Any = None) -> None:
    """Undo ``install`` for a group; without one for the group nothing happens."""
    _routings.pop(_key(group), None)
    if not _routings:
        module = _seam_module()
        if module.__dict__.get("dist") is _stand_in:
            module.dist = dist  # type: ignore[attr-defined]


@contextmanager
def routed(transport: BoundaryTransport, group: Any = None) -> Iterator[Routing]:
    """Install a transport for the block; see ``install``.

    Example::

        with cptransport.create_transport(group) as transport, fla.routed(transport, group):
            o, _ = chunk_kda(q, k, v, g, beta, cp_context=context)
            o.backward(do)
    """
    routing = install(transport, group)
    try:
        yield routing
    finally:
        uninstall(group)


def _key(group: Any) -> Any:
    return dist.group.WORLD if group is None else group


def _seam_module() -> ModuleType:
    return _import("fla.ops.cp.comm")


def _seam() -> ModuleType:
    """Return FLA's module after a look at everything that the routing relies on."""
    module = _seam_module()
    gather: Callable[..., Any] | None = getattr(module, _GATHER, None)
    if gather is None:
        raise _moved(f"{module.__name__} has no {_GATHER}")
    found = tuple(inspect.signature(gather).parameters)
    if found != _PARAMETERS:
        raise _moved(f"{_GATHER} takes {found}, not {_PARAMETERS}")
    if getattr(module, "dist", None) is not _stand_in and not _passes(module, gather):
        raise _moved(f"{_GATHER} does not call torch.distributed as dist.{_GATHER}")
    if getattr(_import(_USER), _GATHER, None) is not gather:
        raise _moved(f"{_USER} does not communicate by {module.__name__}.{_GATHER}")
    return module


def _passes(module: ModuleType, gather: Callable[..., Any]) -> bool:
    """Whether a call goes through the module's name ``dist``; tried out, nothing is communicated."""
    if getattr(module, "dist", None) is not dist:
        return False
    seen: list[Any] = []

    class Probe:
        @staticmethod
        def get_world_size(group: Any = None) -> int:
            return 1

        @staticmethod
        def all_gather_into_tensor(
            output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
        ) -> None:
            seen.append((input_tensor, group))

    x, group = torch.zeros(1), object()
    module.dist = Probe  # type: ignore[attr-defined]
    try:
        gather(x, group=group)
    except Exception:  # it took some other way, with a group that only we understand
        return False
    finally:
        module.dist = dist  # type: ignore[attr-defined]
    return len(seen) == 1 and seen[0][0] is x and seen[0][1] is group


def _import(name: str) -> ModuleType:
    try:
        importlib.import_module("fla")
    except ModuleNotFoundError as error:
        if error.name == "fla":
            raise FLASeamError(f"FLA is not installed: pip install fla-core=={_TESTED}") from error
        raise
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and name.startswith(error.name):
            raise _moved(f"there is no module {error.name}") from error
        raise


def _moved(what: str) -> FLASeamError:
    return FLASeamError(
        f"FLA {_version()} communicates in another way than {_TESTED}, which this was written for: "
        f"{what}"
    )


def _version() -> str:
    for name in ("fla-core", "flash-linear-attention"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return str(getattr(importlib.import_module("fla"), "__version__", "of unknown version"))
