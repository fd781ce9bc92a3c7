# SPDX-License-Identifier: Apache-2.0
"""Heads in place of tokens: every rank gets the whole stream for its share of a mixer's heads.

Rank r of P has heads ``[r H / P, (r + 1) H / P)`` and the groups that these read. A group that the
heads of several ranks read is sent to each of them, and its gradient is the sum of theirs.

The moves come in pairs, one the other's adjoint::

    TokensToHeads   [B, T of the rank, all columns]  <->  [B, T of all, columns of the rank]
    StatesToHeads   [N, all heads, ...] on owners    <->  [N, heads of the rank, ...]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cptransport.plan import Plan

__all__ = [
    "HeadShare",
    "HeadsToStates",
    "HeadsToTokens",
    "MixerSizes",
    "StatesToHeads",
    "TokensToHeads",
    "head_shares",
]

#: Columns of one rank: slices in the order in which they are laid side by side.
Columns = tuple[slice, ...]


@dataclass(frozen=True)
class MixerSizes:
    """Sizes of a Mamba2 mixer core."""

    nheads: int
    headdim: int
    ngroups: int
    dstate: int

    @property
    def inner(self) -> int:
        """Columns of x, of z and of y."""
        return self.nheads * self.headdim

    @property
    def grouped(self) -> int:
        """Columns of B and of C."""
        return self.ngroups * self.dstate


@dataclass(frozen=True)
class HeadShare:
    """What one rank computes.

    Attributes:
        heads: its heads.
        sizes: of a mixer that has just these heads and the groups that they read.
        columns: of ``zxbcdt``. channels: of the convolution. outputs: of y.
        repeat: for every group of the scan the group, among those of ``sizes``, that it reads; None
            where these are the same. Heads that do not share groups evenly need it.
    """

    heads: slice
    sizes: MixerSizes
    columns: Columns
    channels: Columns
    outputs: Columns
    repeat: tuple[int, ...] | None


@lru_cache(maxsize=64)
def head_shares(sizes: MixerSizes, world_size: int) -> tuple[HeadShare, ...]:
    """Return the share of every rank; nheads must divide by the world size."""
    each, per_group = sizes.nheads // world_size, sizes.nheads // sizes.ngroups
    # Runs of so many heads lie inside one group, on whichever rank.
    run = math.gcd(each, per_group)
    shares = []
    for rank in range(world_size):
        first = rank * each
        read = [(first + start) // per_group for start in range(0, each, run)]
        groups = range(read[0], read[-1] + 1)
        heads = slice(first, first + each)
        inner = slice(first * sizes.headdim, (first + each) * sizes.headdim)
        group = slice(groups.start * sizes.dstate, groups.stop * sizes.dstate)
        channels = (
            inner,
            _shifted(group, sizes.inner),
            _shifted(group, sizes.inner + sizes.grouped),
        )
        columns = (
            inner,
            *(_shifted(piece, sizes.inner) for piece in channels),
            _shifted(heads, 2 * (sizes.inner + sizes.grouped)),
        )
        repeat = None if len(read) == len(groups) else tuple(g - groups.start for g in read)
        held = MixerSizes(each, sizes.headdim, len(groups), sizes.dstate)
        shares.append(HeadShare(heads, held, columns, channels, (inner,), repeat))
    return tuple(shares)


def _shifted(piece: slice, by: int) -> slice:
    return slice(piece.start + by, piece.stop + by)


def _count(columns: Columns) -> int:
    return sum(piece.stop - piece.start for piece in columns)


@dataclass(frozen=True)
class _OfTokens:
    """A ``Move`` of tokens and columns, one way or the other.

    Attributes:
        plan: who has which tokens. rank: seen from which.
        columns: per rank; several ranks may have the same ones.
        width: number of columns in all.
    """

    plan: Plan
    rank: int
    columns: tuple[Columns, ...]
    width: int


class TokensToHeads(_OfTokens):
    """A ``Move`` from tokens of all columns to all tokens of some columns."""

    @property
    def reverse(self) -> HeadsToTokens:
        """The adjoint."""
        return HeadsToTokens(self.plan, self.rank, self.columns, self.width)

    def split(self, x: Tensor) -> list[Tensor]:
        """Return every rank's columns of ``[B, T of the rank, width]``."""
        return [torch.cat([x[..., piece] for piece in pieces], -1) for pieces in self.columns]

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's columns of everybody's tokens."""
        mine = _count(self.columns[self.rank])
        return [
            (x.shape[0], self.plan.for_rank(rank).num_tokens, mine)
            for rank in range(self.plan.world_size)
        ]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's columns of the whole stream."""
        return self.plan.unshard(parts)


class HeadsToTokens(_OfTokens):
    """The adjoint of ``TokensToHeads``: what several ranks have of one column is added in rank order."""

    @property
    def reverse(self) -> TokensToHeads:
        """The adjoint."""
        return TokensToHeads(self.plan, self.rank, self.columns, self.width)

    def split(self, x: Tensor) -> list[Tensor]:
        """Return everybody's tokens of this rank's columns ``[B, T, n]``."""
        return [self.plan.shard(x, rank).contiguous() for rank in range(self.plan.world_size)]

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's tokens of everybody's columns."""
        tokens = self.plan.for_rank(self.rank).num_tokens
        return [(x.shape[0], tokens, _count(pieces)) for pieces in self.columns]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[B, T of the rank, width]``."""
        dtype = parts[0].dtype
        disjoint = sum(map(_count, self.columns)) == self.width
        exact = dtype if disjoint or dtype.itemsize > 2 else torch.float32
        total = parts[0].new_zeros((*parts[0].shape[:-1], self.width), dtype=exact)
        for part, pieces in zip(parts, self.columns, strict=True):
            lengths = [piece.stop - piece.start for piece in pieces]
            for piece, values in zip(pieces, part.split(lengths, -1), strict=True):
                total[..., piece] += values
        return total.to(dtype)


@dataclass(frozen=True)
class _OfStates:
    """A ``Move`` of states ``[N, heads, ...]``, one way or the other.

    Attributes:
        plan: who owns which sequence. rank: seen from which.
        batch: B; a sequence has B rows.
        end: a sequence is owned by the rank of its ``"first"`` or ``"last"`` segment.
        heads: number of them in all; every rank has as many.
    """

    plan: Plan
    rank: int
    batch: int
    end: str
    heads: int

    @property
    def owned(self) -> tuple[tuple[int, ...], ...]:
        """Rows of the states by owner."""
        return _owned(self.plan, self.batch, self.end)

    def rows(self, rank: int, device: torch.device) -> Tensor:
        """Rows of the states that a rank owns, on a device."""
        return _rows_on(self.plan, self.batch, self.end, rank, device)


class StatesToHeads(_OfStates):
    """A ``Move`` of ``[N, heads, ...]`` from the owner of a sequence, all heads, to all, some heads."""

    @property
    def reverse(self) -> HeadsToStates:
        """The adjoint."""
        return HeadsToStates(self.plan, self.rank, self.batch, self.end, self.heads)

    def split(self, x: Tensor) -> list[Tensor]:
        """Return every rank's heads of the sequences that this rank owns."""
        owned = x[self.rows(self.rank, x.device)]
        return [piece.contiguous() for piece in owned.chunk(self.plan.world_size, 1)]

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shapes of this rank's heads of the sequences that the others own."""
        rest = (self.heads // self.plan.world_size, *x.shape[2:])
        return [(len(rows), *rest) for rows in self.owned]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return this rank's heads of all sequences; every one has an owner."""
        result = parts[0].new_empty((sum(map(len, parts)), *parts[0].shape[1:]))
        for rank, part in enumerate(parts):
            result[self.rows(rank, part.device)] = part
        return result


class HeadsToStates(_OfStates):
    """The adjoint of ``StatesToHeads``: owners get all heads, and zeros for what they do not own."""

    @property
    def reverse(self) -> StatesToHeads:
        """The adjoint."""
        return StatesToHeads(self.plan, self.rank, self.batch, self.end, self.heads)

    def split(self, x: Tensor) -> list[Tensor]:
        """Return this rank's heads of the sequences that each rank owns."""
        return [x[self.rows(rank, x.device)] for rank in range(self.plan.world_size)]

    def shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        """Return the shapes of everybody's heads of the sequences that this rank owns."""
        owned = len(self.owned[self.rank])
        return [(owned, *x.shape[1:])] * self.plan.world_size

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return ``[N, heads, ...]``."""
        states = self.plan.num_sequences * self.batch
        result = parts[0].new_zeros((states, self.heads, *parts[0].shape[2:]))
        result[self.rows(self.rank, result.device)] = torch.cat(list(parts), 1)
        return result


@lru_cache(maxsize=64)
def _owned(plan: Plan, batch: int, end: str) -> tuple[tuple[int, ...], ...]:
    """Rows of ``[N, ...]`` states by owner."""
    rows: list[list[int]] = [[] for _ in range(plan.world_size)]
    for sequence in range(plan.num_sequences):
        segment = plan.segments[plan.chain(sequence)[0 if end == "first" else -1]]
        rows[segment.rank] += range(sequence * batch, (sequence + 1) * batch)
    return tuple(map(tuple, rows))


@lru_cache(maxsize=256)
def _rows_on(plan: Plan, batch: int, end: str, rank: int, device: torch.device) -> Tensor:
    rows = torch.tensor(_owned(plan, batch, end)[rank], dtype=torch.int64)
    return rows.to(device, non_blocking=True)
