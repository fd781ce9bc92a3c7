# SPDX-License-Identifier: Apache-2.0
"""Rounds in which the ranks of a group report to each other, and raise together what one of them met."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from cptransport import env, errors
from cptransport.control import ControlPlane, group_store, require_group_member
from cptransport.errors import CPTransportError, PeerFailedError, TransportTimeoutError
from cptransport.transports import threads

__all__ = ["Ranks", "agree", "by_rank", "group_world_size"]


@dataclass
class Ranks:
    """The ranks that choose together, seen from one of them.

    Attributes:
        group: their ``torch.distributed`` group, or None: one process alone, or the ranks of ``threads.run``.
        world: the world of ``threads.run`` when they are its ranks.
        rank, world_size: this one's place.
        control: what they talk over; None for one rank.
    """

    group: Any
    world: threads.World | None
    rank: int
    world_size: int
    control: ControlPlane | None

    @classmethod
    def of(cls, group: Any) -> Ranks:
        """Return the ranks of a group; see ``create_transport`` for ``group=None``.

        Collective: over the group, no communication; every rank must call it equally often.
        """
        if group is None and (world := threads.current_world()) is not None:
            store, rank = threads.selection_store()
            control = ControlPlane(store, rank, world.world_size, float(env.TIMEOUT_S.default))
            return cls(None, world, rank, world.world_size, control)
        if group is None and not (dist.is_available() and dist.is_initialized()):
            return cls(None, None, 0, 1, None)
        group = dist.group.WORLD if group is None else group
        rank = dist.get_rank(group)
        require_group_member(rank)
        size = dist.get_world_size(group)
        if size == 1:
            return cls(group, None, 0, 1, None)
        control = ControlPlane(
            group_store(group, "select"), rank, size, float(env.TIMEOUT_S.default)
        )
        return cls(group, None, rank, size, control)

    def limit(self, timeout_s: float) -> None:
        """Set the deadline of the following exchanges."""
        if self.control is not None:
            self.control.timeout_s = timeout_s

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank will not come any more."""
        if self.control is not None:
            self.control.leave(error)

    def exchange(self, text: str, what: str) -> list[str]:
        """Give every rank every rank's text, in rank order; see ``ControlPlane.exchange``."""
        if self.control is None:
            return [text]
        self.control.begin_step()
        try:
            return self.control.exchange(text, what)
        except TransportTimeoutError as error:
            # Ranks of this round wait out their own deadline; one that comes late learns it in the next.
            self.control.begin_step()
            self.control.report(error, fatal=True)
            raise


def group_world_size(group: Any = None) -> int:
    """Return how many ranks ``create_transport(group)`` would serve.

    Args:
        group: a ``torch.distributed`` group; None: the ranks of ``threads.run`` inside it, else
            WORLD, else this process alone.

    Raises:
        TransportError: this process is not in the group.
    """
    if group is None and (world := threads.current_world()) is not None:
        return world.world_size
    if group is None and not (dist.is_available() and dist.is_initialized()):
        return 1
    require_group_member(dist.get_rank(group))
    return dist.get_world_size(group)


def agree(
    ranks: Ranks, what: str, value: Any, said: str, error: CPTransportError | None = None
) -> list[Any]:
    """Exchange what every rank found, or raise on all ranks what any of them met.

    Args:
        ranks: who takes part.
        what: names the round in errors.
        value: JSON-able; returned to all.
        said: what to say of this rank when another one met an error.
        error: what this rank met, if anything.

    Returns:
        The values in rank order.

    Raises:
        CPTransportError: some rank met an error; the same class and text on all ranks. On a rank
            that met one itself ``__cause__`` leads to it.
        PeerFailedError, TransportTimeoutError: a rank left, or did not arrive in time.

    Collective: over the ranks.
    """
    met = None if error is None else _class_name(error)
    said = said if error is None else str(error)
    reports = [
        json.loads(report) for report in ranks.exchange(json.dumps([value, met, said]), what)
    ]
    names = [name for _, name, _ in reports if name is not None]
    if not names:
        return [report[0] for report in reports]
    # Ranks that only noticed that another one did not come do not hide what that one met.
    followers = {_class_name(PeerFailedError("")), _class_name(TransportTimeoutError(""))}
    name = next((name for name in names if name not in followers), names[0])
    text = by_rank({rank: said for rank, (_, _, said) in enumerate(reports)}, len(reports))
    if error is not None and name == met and text == str(error):
        raise error
    raise getattr(errors, name)(text) from (error and (error.__cause__ or error))


def by_rank(texts: Mapping[int, str], world_size: int) -> str:
    """Say who says what; plainly when all ranks say the same."""
    sayers: dict[str, list[int]] = {}
    for rank in sorted(texts):
        sayers.setdefault(texts[rank], []).append(rank)
    if [len(ranks) for ranks in sayers.values()] == [world_size]:
        return next(iter(sayers))
    return "; ".join(f"{_ranks(ranks)}: {text}" for text, ranks in sayers.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _class_name(error: BaseException) -> str:
    """Return the name of the nearest class that every rank has."""
    return next(c.__name__ for c in type(error).__mro__ if c.__name__ in (*errors.__all__,))
