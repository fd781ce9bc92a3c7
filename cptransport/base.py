# SPDX-License-Identifier: Apache-2.0
"""``TransportBase``: the bookkeeping that every transport shares, so that a transport is only how bytes move.

It checks the order of verbs, routes and single takes, keeps the counters, turns the first failure
into a broken transport (``Lifecycle``), and leaves five hooks to the subclass::

    _stage(current, retired)   wait until g-2 is released everywhere, return the buffers of g
    _publish(current, to)      release the staged parts
    _receive(current, wanted)  wait for and return parts of other ranks
    _barrier()                 wait for all ranks
    _close(broken)             free everything

Hooks that wait on the host do it through ``self._wait``; it ends at the deadline or when a peer
failed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cptransport.activations import as_line, over_group
from cptransport.control import ControlPlane
from cptransport.errors import CapabilityError, GenerationError, RouteError, TransportError
from cptransport.generation import Generation
from cptransport.lifecycle import Lifecycle
from cptransport.transport import (
    Capabilities,
    Gathered,
    PartSpec,
    PartStats,
    Selection,
    Slot,
    TransportStats,
)

__all__ = ["Generation", "TransportBase"]


class TransportBase(Lifecycle):
    """Base class of transports; see the module docstring for the hooks.

    Args:
        name: the backend's name.
        device: where staged and fetched tensors live.
        control: the control plane; gives rank and world size.
        timeout_s: limit of every wait.
        capabilities: what this transport can do.
    """

    def __init__(
        self,
        name: str,
        *,
        device: torch.device,
        control: ControlPlane,
        timeout_s: float,
        capabilities: Capabilities,
    ) -> None:
        super().__init__(name, device=device, control=control, timeout_s=timeout_s)
        self.capabilities = capabilities
        self.selection = Selection(name, "argument", name)
        self.strict = False
        self.group: Any = None
        self.activation_bytes_sent = 0
        self.activation_bytes_received = 0
        self._generations: dict[str, Generation] = {}
        self._sent: defaultdict[str, int] = defaultdict(int)
        self._arrived: defaultdict[str, int] = defaultdict(int)
        self._messages = 0
        self._everybody = tuple(range(self.world_size))

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        raise NotImplementedError

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        raise NotImplementedError

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        raise NotImplementedError

    def _barrier(self) -> None:
        raise NotImplementedError

    def _move(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], method: str) -> None:
        """Carry activations, as lines of bytes; over the group that the transport was made for."""
        over_group(self.group, outgoing, incoming, method, self.timeout_s)

    def _follow(self) -> None:
        if not self.capabilities.cuda_graph and torch.cuda.is_current_stream_capturing():
            raise CapabilityError(f"transport {self.name!r} cannot be captured in a CUDA graph")
        super()._follow()

    def stage(self, slot: Slot) -> Mapping[str, Tensor]:
        """See ``BoundaryTransport.stage``."""
        with self._verb():
            self._check_routes(slot)
            self.control.settle()
            self.control.staged = True
            previous = self._generations.get(slot.name)
            current = Generation(slot, previous.number + 1 if previous else 1, self.control.step)
            if previous is not None:
                self._count_received(previous)
            current.staged = dict(self._stage(current, previous))
            # Handing out fresh views keeps the autograd history of what users copy in off the
            # buffers.
            current.handed = {name: buffer.detach() for name, buffer in current.staged.items()}
            self._generations[slot.name] = current
            return dict(current.handed)

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        """See ``BoundaryTransport.publish``."""
        with self._verb():
            current = self._current(slot, "publish")
            if current.to is not None:
                raise GenerationError(self._where(current) + " was already published")
            for name, tensor in current.handed.items():
                if tensor.requires_grad:
                    raise TransportError(
                        self._where(current)
                        + f": staged part {name!r} requires grad; write into it under no_grad"
                    )
            destinations = self._everybody if to is None else self._distinct(to)
            current.to = destinations
            for part in slot.parts:
                if part.routes is None:
                    others = len(destinations) - (self.rank in destinations)
                    messages, count = others, others * part.nbytes
                else:
                    messages, count = part.sends(self.rank)
                if messages:
                    self._sent[part.name] += count
                    self._messages += messages
            self._publish(current, destinations)

    def fetch(self, slot: Slot, part: str, *, source: int) -> Tensor:
        """See ``BoundaryTransport.fetch``."""
        with self._verb():
            current = self._current(slot, "fetch")
            spec = slot.part(part)
            self._check_source(spec, source)
            self._check_pairwise(current)
            own, absent = self._claim(current, [(spec, source)])
            if own:
                return own[part, source]
            self._obtain(current, absent)
            return current.received[part, source]

    def gather(self, slot: Slot, *, parts: Mapping[str, Sequence[int]] | None = None) -> Gathered:
        """See ``BoundaryTransport.gather``."""
        with self._verb():
            current = self._current(slot, "gather")
            wanted: list[tuple[PartSpec, int]] = []
            if parts is None:
                wanted = [
                    (part, source)
                    for part in slot.parts
                    for source in (
                        self._everybody if part.routes is None else part.sources(self.rank)
                    )
                ]
                names = [part.name for part in slot.parts]
            else:
                for name, sources in parts.items():
                    for source in sources:
                        self._check_source(slot.part(name), source)
                    wanted += [(slot.part(name), source) for source in sources]
                names = list(parts)
            self._check_pairwise(current)
            _, absent = self._claim(current, wanted)
            return self._gather(current, names, absent)

    def _gather(
        self, current: Generation, names: Sequence[str], absent: Sequence[tuple[PartSpec, int]]
    ) -> Gathered:
        """Make the result of ``gather``: parts of other ranks, and this rank's own, which are always at hand."""
        self._obtain(current, absent)
        present = {name: [self.rank] for name in names}
        parts: dict[str, list[Tensor | None]] = {name: [None] * self.world_size for name in names}
        for name in names:
            parts[name][self.rank] = current.staged[name]
        for part, source in absent:
            present[part.name].append(source)
            parts[part.name][source] = current.received[part.name, source]
        return Gathered(
            {name: tuple(tensors) for name, tensors in parts.items()}, self.device, present
        )

    def barrier(self) -> None:
        """See ``BoundaryTransport.barrier``."""
        with self._verb():
            if self.world_size > 1:
                self._barrier()

    def move(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor], method: str) -> None:
        """Carry activations between the ranks: ``activations.Carrier.move``.

        No verb of the protocol: nothing of it is in ``stats``. ``activation_bytes_sent`` and
        ``activation_bytes_received`` count its payload.

        Raises:
            CapabilityError: the transport does it over its group, and nobody said which that is.
            TransportTimeoutError, PeerFailedError: as the verbs.

        Collective: over the ranks.
        """
        with self._verb():
            if self.group is None and type(self)._move is TransportBase._move:
                raise CapabilityError(
                    f"transport {self.name!r} was not made by create_transport, so the group that "
                    "activations would move over is unknown"
                )
            self.control.settle()
            self.control.staged = True
            sends, receives = [as_line(x) for x in outgoing], [as_line(x) for x in incoming]
            self._move(sends, receives, method)
            self.activation_bytes_sent += sum(map(len, sends)) - len(sends[self.rank])
            self.activation_bytes_received += sum(map(len, receives)) - len(receives[self.rank])

    def stats(self) -> TransportStats:
        """See ``BoundaryTransport.stats``."""
        names = sorted({*self._sent, *self._arrived})
        return TransportStats(
            bytes_sent=sum(self._sent.values()),
            bytes_received=sum(self._arrived.values()),
            by_part={name: PartStats(self._sent[name], self._arrived[name]) for name in names},
            messages=self._messages,
            waited_s=self._waited_s,
        )

    def close(self) -> None:
        """See ``BoundaryTransport.close``."""
        try:
            super().close()
        finally:
            self._generations.clear()

    def _moves(self, part: PartSpec, source: int, destination: int, to: Sequence[int]) -> bool:
        """Whether a part goes from one rank to another, different one."""
        if source == destination:
            return False
        return destination in to if part.routes is None else part.rows(source, destination) != ()

    def _where(self, current: Generation) -> str:
        return f"slot {current.slot.name!r}, generation {current.number}"

    def _check_routes(self, slot: Slot) -> None:
        for part in slot.parts:
            if part.highest_rank >= self.world_size:
                route = next(r for r in part.routes or () if max(r[:2]) >= self.world_size)
                raise RouteError(
                    f"slot {slot.name!r}, part {part.name!r}: route {route} is outside world size {self.world_size}"
                )

    def _distinct(self, to: Sequence[int]) -> tuple[int, ...]:
        destinations = tuple(to)
        if len(set(destinations)) != len(destinations) or any(
            not 0 <= rank < self.world_size for rank in destinations
        ):
            raise RouteError(
                f"publish to {list(destinations)}: ranks must be distinct and below {self.world_size}"
            )
        return destinations

    def _check_source(self, part: PartSpec, source: int) -> None:
        if not 0 <= source < self.world_size:
            raise RouteError(f"source {source} is outside world size {self.world_size}")
        if part.routes is not None and part.rows(source, self.rank) == ():
            raise RouteError(f"part {part.name!r}: no route from rank {source} to rank {self.rank}")

    def _check_pairwise(self, current: Generation) -> None:
        if current.to is None and not self.capabilities.pairwise:
            raise CapabilityError(
                f"transport {self.name!r} is not pairwise: publish {current.slot.name!r} before taking from it"
            )

    def _current(self, slot: Slot, verb: str) -> Generation:
        current = self._generations.get(slot.name)
        if current is None:
            raise GenerationError(f"{verb} of slot {slot.name!r} before its first stage")
        if current.slot is not slot and current.slot != slot:
            raise GenerationError(
                f"{verb} of slot {slot.name!r} with other parts than generation {current.number} was staged with"
            )
        return current

    def _claim(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> tuple[dict[tuple[str, int], Tensor], list[tuple[PartSpec, int]]]:
        """Check that parts may be taken now and count them; return this rank's own and what others send."""
        own: dict[tuple[str, int], Tensor] = {}
        absent: list[tuple[PartSpec, int]] = []
        keys = [(part.name, source) for part, source in wanted]
        for key, (part, source) in zip(keys, wanted, strict=True):
            if part.routes is None and key in current.taken:
                raise GenerationError(
                    self._where(current)
                    + f": part {part.name!r} of rank {source} was already taken"
                )
            if source != self.rank:
                absent.append((part, source))
                continue
            if current.to is None or (part.routes is None and self.rank not in current.to):
                raise GenerationError(
                    self._where(current)
                    + ": this rank did not publish to itself, taking would wait for ever"
                )
            own[key] = current.staged[part.name]
        current.taken.update(keys)
        if absent:
            self._count_received(current)
        for part, _ in absent:
            if part.routes is None:
                self._arrived[part.name] += part.nbytes
                self._messages += 1
        return own, absent

    def _obtain(self, current: Generation, absent: Sequence[tuple[PartSpec, int]]) -> None:
        """Receive parts of other ranks into ``current.received``, each once per generation."""
        new = [
            (part, source) for part, source in absent if (part.name, source) not in current.received
        ]
        if new:
            current.received.update(self._receive(current, new))

    def _count_received(self, current: Generation) -> None:
        """Count what the routes bring to this rank in a generation, once; all of it moves, looked at or not."""
        if current.counted:
            return
        current.counted = True
        for part in current.slot.parts:
            messages, count = part.receives(self.rank)
            if messages:
                self._arrived[part.name] += count
                self._messages += messages
