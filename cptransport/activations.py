# SPDX-License-Identifier: Apache-2.0
"""Activations between the ranks of a group: what is too large for slots, and never goes through them.

A *move* says how one tensor is redistributed, seen from one rank: ``split`` gives a piece per rank,
``join`` makes the result of the pieces that come. Bytes travel by ``carrier.move``; a carrier is a
transport (its deadlines and its peers' abort records end the wait; ``TransportBase.move``), or a
bare ``torch.distributed`` group (``GroupCarrier``; torch's own rules end it).

A rank's own piece never travels. Two methods move the same bytes:

* ``p2p``: a message per pair of ranks that has something to say;
* ``a2a``: one collective of all ranks, whoever has nothing to say included.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cptransport.errors import CapabilityError, PeerFailedError, TransportTimeoutError

__all__ = ["METHODS", "Carrier", "GroupCarrier", "Move", "as_line", "carry", "over_group"]

METHODS = ("p2p", "a2a")

_connected: set[str] = set()


class Carrier(Protocol):
    """What brings every rank's pieces to every rank."""

    rank: int
    world_size: int

    def move(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], method: str) -> None:
        """Send ``outgoing[r]`` to rank r and fill ``incoming[r]`` with what r sends here.

        Args:
            outgoing, incoming: one contiguous tensor per rank; this rank's own are not looked at.
            method: one of ``METHODS``.

        Collective: over the ranks.
        """
        ...


class Move(Protocol):
    """How one tensor is redistributed, seen from one rank; pure."""

    def split(self, x: Tensor) -> list[Tensor]:
        """Return what goes to each rank, contiguous."""
        ...

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shape of what comes from each rank, knowing one's own tensor."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the result of what came, by source rank."""
        ...

    @property
    def reverse(self) -> Move:
        """The adjoint: it moves gradients of the result to gradients of the input."""
        ...


class GroupCarrier:
    """The ranks of a ``torch.distributed`` group that this process is in.

    Args:
        group: the process group.
        timeout_s: limit of waits on the host. On NCCL nothing waits there; the group's own watchdog
            ends what hangs.
    """

    def __init__(self, group: Any, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._group = group
        self._timeout_s = timeout_s

    def move(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], method: str) -> None:
        """See ``Carrier.move``."""
        lines = [as_line(x) for x in outgoing], [as_line(x) for x in incoming]
        over_group(self._group, *lines, method, self._timeout_s)


def carry(carrier: Carrier, move: Move, x: Tensor, method: str) -> Tensor:
    """Redistribute a tensor; no autograd.

    Collective: over the carrier's ranks.
    """
    outgoing = move.split(x)
    with torch.inference_mode(False):  # carriers write outside the caller's inference mode
        incoming = [torch.empty(shape, dtype=x.dtype, device=x.device) for shape in move.shapes(x)]
    incoming[carrier.rank] = outgoing[carrier.rank]
    if carrier.world_size > 1:
        carrier.move(outgoing, incoming, method)
    return move.join(incoming)


def as_line(x: Tensor) -> Tensor:
    """View a contiguous tensor as a line of bytes, so that every dtype travels."""
    return x.detach().reshape(-1).view(torch.uint8)


def over_group(
    group: Any,
    outgoing: Sequence[Tensor],
    incoming: Sequence[Tensor],
    method: str,
    timeout_s: float,
) -> None:
    """Carry lines of bytes over a ``torch.distributed`` group; see ``Carrier.move``.

    Gloo carries CUDA tensors through host memory, and blocks the host.

    Raises:
        CapabilityError: the group has no backend for the tensors' device.
        TransportTimeoutError, PeerFailedError: gloo gave up.

    Collective: over the group.
    Stream: NCCL's work is ordered on the current stream.
    """
    me, device = dist.get_rank(group), incoming[0].device
    backend = _backend(group, device)
    on_host = backend == "gloo" and device.type != "cpu"
    sends = [x[:0] if r == me else x for r, x in enumerate(outgoing)]
    receives = [x[:0] if r == me else x for r, x in enumerate(incoming)]
    targets = receives
    if on_host:
        sends = [x.cpu() for x in sends]
        receives = [torch.empty_like(x, device="cpu") for x in receives]
    try:
        if method == "p2p":
            _pairs(group, backend, sends, receives, timeout_s)
        else:
            _collective(group, backend, sends, receives, timeout_s)
    except RuntimeError as error:
        if backend != "gloo":
            raise
        if "timed out" in str(error).lower():
            raise TransportTimeoutError(
                f"rank {me}: activations did not come within {timeout_s:g} s: {error}",
                waited_s=timeout_s,
            ) from error
        raise PeerFailedError(f"rank {me}: lost a peer while activations moved: {error}") from error
    if on_host:
        for target, received in zip(targets, receives, strict=True):
            target.copy_(received)


def _backend(group: Any, device: torch.device) -> str:
    try:
        return str(group._get_backend(device).name())
    except RuntimeError as error:
        raise CapabilityError(f"the group has no backend for tensors on {device}") from error


def _pairs(
    group: Any, backend: str, sends: Sequence[Tensor], receives: Sequence[Tensor], timeout_s: float
) -> None:
    if backend == "nccl":
        _connect(group, receives[0].device)
    peers = [dist.get_global_rank(group, r) for r in range(len(sends))]
    ops = [
        dist.P2POp(verb, line, peer, group)
        for lines, verb in ((sends, dist.isend), (receives, dist.irecv))
        for line, peer in zip(lines, peers, strict=True)
        if line.numel()
    ]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        _finish(work, backend, timeout_s)


def _connect(group: Any, device: torch.device) -> None:
    """Let all ranks make the group's communicator; pairs alone would leave out who has nothing to say."""
    name = group.group_name
    if name not in _connected:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        _connected.add(name)


def _collective(
    group: Any, backend: str, sends: Sequence[Tensor], receives: Sequence[Tensor], timeout_s: float
) -> None:
    if backend != "gloo":
        work = dist.all_to_all(list(receives), list(sends), group=group, async_op=True)
        _finish(work, backend, timeout_s)
        return
    # Gloo has it for one tensor only.
    sizes = [x.numel() for x in receives]
    received = torch.empty(sum(sizes), dtype=torch.uint8)
    work = dist.all_to_all_single(
        received, torch.cat(list(sends)), sizes, [x.numel() for x in sends], group, async_op=True
    )
    _finish(work, backend, timeout_s)
    for target, piece in zip(receives, received.split(sizes), strict=True):
        target.copy_(piece)


def _finish(work: Any, backend: str, timeout_s: float) -> None:
    if backend == "gloo":
        work.wait(timedelta(seconds=timeout_s))
    else:
        work.wait()
