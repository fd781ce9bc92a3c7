# SPDX-License-Identifier: Apache-2.0
"""Transports that each break one clause of the contract, and the contract test that must notice.

They are the ``threads`` transport with one thing wrong. ``python -m cptransport.testing.faults``
prints the table of ``docs/contract.md``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from cptransport.backend import BackendSpec
from cptransport.base import Generation
from cptransport.errors import CapabilityError, TransportError, TransportTimeoutError
from cptransport.testing.contract_base import clauses_of
from cptransport.transport import TRANSPORT_API_VERSION, Capabilities, Gathered, PartSpec, Slot
from cptransport.transports.threads import ThreadTransport, create_here

__all__ = ["FAULTS", "Fault", "table"]

_HOARD: list[Any] = []  # what LeakOnClose keeps


@dataclass(frozen=True)
class Fault:
    """A broken transport.

    Attributes:
        name: attribute of this module that holds its ``BackendSpec``.
        broken: what it does wrong, one line.
        test: the contract test that must fail on it.
        ranks: world size at which it shows.
        arguments: further arguments of that test.
    """

    name: str
    broken: str
    test: str
    ranks: int = 2
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def backend(self) -> str:
        """How the suite names it."""
        return f"{__name__}:{self.name}"

    @property
    def clauses(self) -> tuple[str, ...]:
        """The clauses that its test cites."""
        from cptransport.testing.contract import TransportContract

        return clauses_of(getattr(TransportContract, self.test))


FAULTS: list[Fault] = []


def _fault(
    test: str, *, ranks: int = 2, **arguments: Any
) -> Callable[[type[ThreadTransport]], type[ThreadTransport]]:
    """Register a class: its docstring says what is wrong, ``test`` must notice."""

    def register(kind: type[ThreadTransport]) -> type[ThreadTransport]:
        name = kind.__name__.upper()

        def create(group: Any, device: Any, timeout_s: float, **options: Any) -> ThreadTransport:
            sound = create_here(timeout_s)
            return kind(sound._hub, sound.rank, sound.world_size, sound.device, timeout_s)

        globals()[name] = BackendSpec(
            name="threads",
            api_version=TRANSPORT_API_VERSION,
            summary=f"broken on purpose: {kind.__doc__}",
            capabilities=Capabilities(),
            probe=lambda group, device: None,
            create=create,
        )
        FAULTS.append(Fault(name, str(kind.__doc__).rstrip("."), test, ranks, arguments))
        return kind

    return register


# What is handed out --------------------------------------------------------------------------------


@_fault("test_delayed_producer")
class NoOrder(ThreadTransport):
    """A fetch returns what is there, without waiting for the publication."""

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        here = self._hub.publications
        ready = [w for w in wanted if (current.slot.name, w[1], current.number) in here]
        received = dict(super()._receive(current, ready))
        for part, source in wanted:
            if (part.name, source) not in received:
                received[part.name, source] = torch.zeros(part.shape, dtype=part.dtype)
        return received


@_fault("test_many_generations_with_jitter")
class PreviousGeneration(ThreadTransport):
    """A fetch sometimes returns the payload of the generation before."""

    _before: dict[tuple[str, str, int], Tensor]

    def _copy(self, part: PartSpec, source: int, publication: Any) -> Tensor:
        self.__dict__.setdefault("_before", {})
        key = (publication.slot.name, part.name, source)
        new = super()._copy(part, source, publication)
        old = self._before.get(key)
        self._before[key] = new.clone()
        return new if old is None or old.shape != new.shape or self._messages % 7 else old


@_fault("test_many_generations_with_jitter")
class SkippedGeneration(ThreadTransport):
    """Every fifth publication is lost, and the one before is delivered again."""

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        super()._publish(current, to)
        publications = self._hub.publications
        before = publications.get((current.slot.name, self.rank, current.number - 1))
        if current.number % 5 == 0 and before is not None and before.slot == current.slot:
            publications[current.slot.name, self.rank, current.number].parts.update(before.parts)


@_fault("test_every_dtype_between_every_pair")
class DtypeOnTheWay(ThreadTransport):
    """Payloads travel as float32 and are converted back."""

    def _copy(self, part: PartSpec, source: int, publication: Any) -> Tensor:
        return super()._copy(part, source, publication).to(torch.float32).to(part.dtype)


@_fault("test_every_size_between_every_pair")
class LostTail(ThreadTransport):
    """The last byte of a message does not arrive."""

    def _copy(self, part: PartSpec, source: int, publication: Any) -> Tensor:
        target = super()._copy(part, source, publication)
        if part.nbytes:
            target.view(-1).view(torch.uint8)[-1:].zero_()
        return target


@_fault("test_large_parts")
class LostChunk(ThreadTransport):
    """Of messages above a megabyte the second half is lost."""

    def _copy(self, part: PartSpec, source: int, publication: Any) -> Tensor:
        target = super()._copy(part, source, publication)
        if part.nbytes > 1 << 20:
            target.view(-1)[part.numel // 2 :].zero_()
        return target


@_fault("test_gather_and_its_address_table")
class SwappedRanks(ThreadTransport):
    """A gather hands out the parts of two ranks in each other's place."""

    def gather(self, slot: Slot, *, parts: Mapping[str, Sequence[int]] | None = None) -> Gathered:
        right = super().gather(slot, parts=parts)
        swapped = {
            part.name: tuple(
                right.tensor(part.name, s) if s in right.sources(part.name) else None
                for s in (1, 0, *range(2, self.world_size))
            )
            for part in slot.parts
            if {0, 1} <= set(right.sources(part.name))
        }
        return Gathered(swapped, self.device, {name: right.sources(name) for name in swapped})


@_fault("test_gather_and_its_address_table")
class WrongAddresses(ThreadTransport):
    """The address table of a gather is one rank off."""

    def gather(self, slot: Slot, *, parts: Mapping[str, Sequence[int]] | None = None) -> Gathered:
        gathered = super().gather(slot, parts=parts)
        for name, addresses in gathered.addresses.items():
            gathered._addresses[name] = addresses.roll(1)
        return gathered


@_fault("test_delayed_producer_gather", ranks=3)
class AliasedOutput(ThreadTransport):
    """All sources are received into one buffer."""

    def _receive(
        self, current: Generation, wanted: Sequence[tuple[PartSpec, int]]
    ) -> Mapping[tuple[str, int], Tensor]:
        received = dict(super()._receive(current, wanted))
        first: dict[str, Tensor] = {}
        for (name, source), tensor in received.items():
            received[name, source] = first.setdefault(name, tensor).copy_(tensor)
        return received


@_fault("test_random_asymmetric_routes")
class WrongRows(ThreadTransport):
    """Row routes move the first rows, not those they name."""

    def _copy(self, part: PartSpec, source: int, publication: Any) -> Tensor:
        target = super()._copy(part, source, publication)
        rows = part.rows(source, self.rank)
        if rows:
            target[rows[-1]].copy_(publication.parts[part.name][0])
        return target


@_fault("test_parts_may_change_and_grow")
class NeverGrows(ThreadTransport):
    """A slot keeps the parts that it was first staged with."""

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        staged = super()._stage(current, retired)
        if retired is not None and current.slot != retired.slot:
            raise TransportError("parts of a slot must not change")
        return staged


@_fault("test_two_transports_with_the_same_slots")
class SharedSlots(ThreadTransport):
    """Slots of the same name in two transports share their publications."""

    _shared: ClassVar[dict[Any, Any]] = {}

    def __init__(self, hub: Any, *place: Any) -> None:
        super().__init__(hub, *place)
        hub.publications = self._shared.setdefault("all", hub.publications)


# What is moved and counted -------------------------------------------------------------------------


@_fault("test_without_routes_each_destination_takes_once")
class IgnoresTo(ThreadTransport):
    """Without routes, everything goes to everybody, whatever ``to`` says, and is counted so."""

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        super().publish(slot)


@_fault("test_own_part_never_moves")
class CountsOwnPart(ThreadTransport):
    """A rank's own part is counted as sent."""

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        super().publish(slot, to=to)
        for part in slot.parts:
            self._sent[part.name] += part.nbytes


@_fault("test_publishing_what_requires_grad_is_an_error")
class TakesGrad(ThreadTransport):
    """A staged tensor that requires grad is published without a word."""

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        current = self._generations.get(slot.name)
        if current is not None:
            current.handed = {name: tensor.detach() for name, tensor in current.handed.items()}
        super().publish(slot, to=to)


@_fault("test_outside_the_routes_is_an_error_of_the_caller")
class NoRouteCheck(ThreadTransport):
    """What no route brings can be fetched; it is rubbish."""

    def _check_source(self, part: PartSpec, source: int) -> None:
        pass


@_fault("test_what_is_not_looked_at_counts_as_taken")
class MustBeLookedAt(ThreadTransport):
    """A sender waits until every destination has looked at what its routes brought."""

    def _await_release(self, current: Generation) -> None:
        key = (current.slot.name, self.rank, current.number - 2)
        publication = self._hub.publications.get(key)
        if publication is not None and any(p.routes for p in publication.slot.parts):
            looked = {r for (_, r) in publication.taken}
            everybody = set(range(self.world_size)) - {self.rank}
            self._wait(self._holds(lambda: looked >= everybody), "not looked at")
        super()._await_release(current)


# Order and ownership -------------------------------------------------------------------------------


@_fault("test_verbs_out_of_order")
class SecondPublish(ThreadTransport):
    """A second publication in one generation is accepted."""

    def publish(self, slot: Slot, *, to: Sequence[int] | None = None) -> None:
        current = self._generations.get(slot.name)
        if current is not None:
            current.to = None
        super().publish(slot, to=to)


@_fault("test_staged_tensors_are_double_buffered")
class SingleBuffer(ThreadTransport):
    """Every generation is staged in the same memory."""

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        staged = super()._stage(current, retired)
        return retired.staged if retired is not None and retired.slot == current.slot else staged


@_fault("test_slow_readers_keep_their_data")
class AcknowledgesBeforeReading(ThreadTransport):
    """Readers get the sender's memory, and the sender does not wait until they are done with it."""

    def _await_release(self, current: Generation) -> None:
        pass

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        super()._publish(current, to)
        key = (current.slot.name, self.rank, current.number)
        self._hub.publications[key].parts = dict(current.staged)

    def _stage(self, current: Generation, retired: Generation | None) -> Mapping[str, Tensor]:
        older = self._hub.publications.get((current.slot.name, self.rank, current.number - 2))
        staged = super()._stage(current, None)
        return older.parts if older is not None and older.slot == current.slot else staged

    def _copy(self, part: PartSpec, source: int, publication: Any) -> Tensor:
        shared: Tensor = publication.parts[part.name]
        return shared


@_fault("test_barrier_waits_for_a_late_rank")
class EarlyBarrier(ThreadTransport):
    """A barrier returns at once."""

    def _barrier(self) -> None:
        pass


@_fault("test_many_barriers_with_jitter", ranks=3)
class LeakyBarrier(ThreadTransport):
    """A barrier lets a rank go when one peer has arrived."""

    def _barrier(self) -> None:
        hub = self._hub
        with hub.lock:
            hub.arrivals[self.rank] += 1
            mine = hub.arrivals[self.rank]
            hub.notify()
        self._wait(self._holds(lambda: sum(n >= mine for n in hub.arrivals) > 1), "barrier")


@_fault("test_handoff_along_a_chain")
class NoHandoff(ThreadTransport):
    """It claims ``pairwise`` and refuses a fetch before the own publication."""

    def _check_pairwise(self, current: Generation) -> None:
        if current.to is None:
            raise CapabilityError("publish first")


@_fault("test_fetch_before_publish_without_pairwise")
class HiddenHandoff(ThreadTransport):
    """It does not claim ``pairwise`` and serves a fetch before the own publication."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.capabilities = Capabilities(pairwise=False)

    def _check_pairwise(self, current: Generation) -> None:
        pass


@_fault("test_publish_does_not_wait_for_its_destinations")
class PublishWaits(ThreadTransport):
    """A publication returns when every peer has published too."""

    def _publish(self, current: Generation, to: Sequence[int]) -> None:
        super()._publish(current, to)
        here = self._hub.publications
        keys = [(current.slot.name, rank, current.number) for rank in range(self.world_size)]
        self._wait(self._holds(lambda: all(key in here for key in keys)), "peers", current=current)


# Waits and lifetime --------------------------------------------------------------------------------


@_fault("test_a_silent_peer_is_named", verb="fetch")
class IgnoresTimeout(ThreadTransport):
    """Waits last five times their limit."""

    def __init__(self, hub: Any, rank: int, world_size: int, device: Any, limit_s: float) -> None:
        super().__init__(hub, rank, world_size, device, 5 * limit_s)


@_fault("test_a_silent_peer_is_named", verb="fetch")
class AnonymousTimeout(ThreadTransport):
    """A timeout does not say who was missing."""

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._wait(*args, **kwargs)
        except TransportTimeoutError as error:
            raise TransportTimeoutError("timed out", waited_s=error.waited_s) from None


@_fault("test_a_slow_peer_is_no_error")
class Impatient(ThreadTransport):
    """Waits end at a fifth of their limit."""

    def __init__(self, hub: Any, rank: int, world_size: int, device: Any, limit_s: float) -> None:
        super().__init__(hub, rank, world_size, device, limit_s / 5)


@_fault("test_an_error_of_one_rank_reaches_the_others", where="barrier")
class KeepsErrorsToItself(ThreadTransport):
    """A rank that raises leaves no record."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.close()


@_fault("test_a_message_that_is_never_taken")
class ForgetsMessages(ThreadTransport):
    """A message that is never taken is dropped without a word."""

    def _await_release(self, current: Generation) -> None:
        self._hub.publications.pop((current.slot.name, self.rank, current.number - 2), None)


@_fault("test_close_in_every_state")
class OpenAfterClose(ThreadTransport):
    """Verbs go on after close."""

    def close(self) -> None:
        super().close()
        self._closed = False


@_fault("test_create_and_close_leave_nothing_behind")
class LeakOnClose(ThreadTransport):
    """What was staged and a file descriptor survive close."""

    def _close(self, broken: bool) -> None:
        _HOARD.append(open("/dev/null"))  # noqa: SIM115
        _HOARD.append([g.staged for g in self._generations.values()])
        super()._close(broken)


@_fault("test_garbage_collection_does_not_communicate")
class GarbageTalks(ThreadTransport):
    """An unreferenced transport closes itself, together with its peers."""

    def __del__(self) -> None:
        if not self._closed:
            with contextlib.suppress(TransportError):
                self._barrier()


def table() -> str:
    """Return the Markdown table of all faults."""
    rows = ["| fault | what it does wrong | caught by | clauses |", "|---|---|---|---|"]
    for fault in FAULTS:
        arguments = "".join(f"[{value}]" for value in fault.arguments.values())
        clauses = ", ".join(fault.clauses)
        rows.append(f"| `{fault.name}` | {fault.broken} | `{fault.test}{arguments}` | {clauses} |")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table() + "\n")
