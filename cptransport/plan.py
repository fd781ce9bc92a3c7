# SPDX-License-Identifier: Apache-2.0
"""Plans: who owns which tokens, and what must move.

Pure CPU, no process group. A plan is a function of its arguments alone, so every rank that passes
the same ones holds the same plan, or raises the same ``PlanError``, before anything is
communicated.

The *stream* is the global packed sequence dimension. With ``padded_cu_seqlens`` it is the padded
buffer: layouts cut it, ``index``, ``shard`` and segments speak of its rows, and rows of no sequence
belong to a rank but to no segment.

A *global* segment index is a position in ``plan.segments`` (by sequence, then start), a *local* one
a position among the segments of one rank, in the same order. Slots have one row per local segment.

Source: docs/algebra.md, "Layouts are lists of segments".
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from cptransport.describe import describe
from cptransport.errors import OpInputError, PlanError
from cptransport.layouts import (
    Boundaries,
    Run,
    as_boundaries,
    as_integer,
    as_offsets,
    assign_rows,
    check_layout,
)
from cptransport.transport import Slot
from cptransport.volume import Volume, volume

__all__ = ["Plan", "RankPlan", "Segment", "Volume", "build_plan"]


@dataclass(frozen=True)
class Segment:
    """A run of tokens of one sequence on one rank; empty only for an empty sequence.

    Attributes:
        sequence: index of the sequence.
        start, stop: rows of the global (padded) stream, ``start <= stop``.
        rank: who owns it.
        local_start: where it starts among the rank's local rows.
    """

    sequence: int
    start: int
    stop: int
    rank: int
    local_start: int

    @property
    def length(self) -> int:
        """Number of tokens."""
        return self.stop - self.start


@dataclass(frozen=True, eq=False)
class RankPlan:
    """One rank's view of a plan.

    Attributes:
        num_tokens: local rows, padding included.
        segments: its segments, in the order of their local indices.
        runs: its rows of the stream, ascending.
        cu_seqlens (int64, [len(segments) + 1], cpu): offsets of the segments in the local rows;
            None when the plan has padding.
    """

    num_tokens: int
    segments: tuple[Segment, ...]
    runs: tuple[Run, ...]
    cu_seqlens: Tensor | None

    @cached_property
    def index(self) -> Tensor:
        """Global row of every local row, ascending (int64, [num_tokens], cpu)."""
        with torch.inference_mode(False):
            pieces = [torch.arange(run.start, run.stop, device="cpu") for run in self.runs]
            return torch.cat([torch.arange(0, device="cpu"), *pieces])


@dataclass(frozen=True)
class Plan:
    """Who owns which tokens. Made by ``build_plan``; equal content means equal plans.

    Attributes:
        cu_seqlens: N+1 offsets of the sequences, without padding.
        world_size: number of ranks.
        layout: its name.
        padded_cu_seqlens: N+1 rows where sequences start in the padded stream; None without
            padding.
        runs: who owns which rows, in stream order; touching runs of one rank are merged, none is
            empty.
    """

    cu_seqlens: tuple[int, ...]
    world_size: int
    layout: str
    padded_cu_seqlens: tuple[int, ...] | None
    runs: tuple[Run, ...]

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Plan], tuple[object, ...]]:
        return Plan, self._content  # without the cached hash, which another process makes anew

    @cached_property
    def _hash(self) -> int:
        # Ops look schedules up by plan at every call; hashing all offsets each time would show.
        return hash(self._content)

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(["plan/1", *self._content]).encode()).hexdigest()

    @property
    def _content(self) -> tuple[object, ...]:
        return self.cu_seqlens, self.world_size, self.layout, self.padded_cu_seqlens, self.runs

    @property
    def num_sequences(self) -> int:
        """Number of sequences N, empty ones included."""
        return len(self.cu_seqlens) - 1

    @property
    def sequence_starts(self) -> tuple[int, ...]:
        """N+1 rows of the stream where sequences start; the last is the number of rows."""
        return self.cu_seqlens if self.padded_cu_seqlens is None else self.padded_cu_seqlens

    @property
    def total_rows(self) -> int:
        """Rows of the stream T, padding included."""
        return self.sequence_starts[-1]

    @property
    def has_padding(self) -> bool:
        """Whether some row belongs to no sequence."""
        return self.padded_cu_seqlens is not None

    @property
    def max_tokens(self) -> int:
        """Largest number of local rows of a rank, padding included."""
        return max(self._num_tokens)

    @property
    def max_segments(self) -> int:
        """Largest number of segments of a rank (n), at least 1: rows of a slot per batch row."""
        return max(map(len, self._owned))

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """All segments, by sequence, then start: the global segment index is the position."""
        run_starts = [run.start for run in self.runs]
        run_local_starts, filled = [], [0] * self.world_size
        for run in self.runs:
            run_local_starts.append(filled[run.rank])
            filled[run.rank] += run.stop - run.start
        segments = []
        for sequence, start in enumerate(self.sequence_starts[:-1]):
            stop = start + self.cu_seqlens[sequence + 1] - self.cu_seqlens[sequence]
            if start == self.total_rows:  # empty, and there is no row where it would start
                segments.append(Segment(sequence, start, stop, 0, filled[0]))
                continue
            i = bisect_right(run_starts, start) - 1  # the run that holds row `start`
            while True:
                run = self.runs[i]
                begin, end = max(run.start, start), min(run.stop, stop)
                local_start = run_local_starts[i] + begin - run.start
                segments.append(Segment(sequence, begin, end, run.rank, local_start))
                if run.stop >= stop:
                    break
                i += 1
        return tuple(segments)

    def chain(self, sequence: int) -> tuple[int, ...]:
        """Return the global indices of a sequence's segments in causal order; at least one.

        Raises:
            PlanError: no such sequence.
        """
        self._check("sequence", sequence, self.num_sequences)
        return tuple(range(self._chain_starts[sequence], self._chain_starts[sequence + 1]))

    def owner(self, sequence: int) -> int:
        """Return the rank of a sequence's last segment.

        Raises:
            PlanError: no such sequence.
        """
        return self.segments[self.chain(sequence)[-1]].rank

    def local_index(self, segment: int) -> int:
        """Return the position of a global segment among the segments of its rank.

        Raises:
            PlanError: no such segment.
        """
        self._check("segment", segment, len(self.segments))
        return self._local_indices[segment]

    def owned(self, rank: int) -> tuple[int, ...]:
        """Return the global indices of a rank's segments; a local index is a position in it.

        Raises:
            PlanError: no such rank.
        """
        self._check("rank", rank, self.world_size)
        return self._owned[rank]

    def for_rank(self, rank: int) -> RankPlan:
        """Return one rank's view; the same object every time.

        Raises:
            PlanError: no such rank.
        """
        self._check("rank", rank, self.world_size)
        return self._rank_plans[rank]

    def shard(self, x: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Return a rank's rows of a global tensor; differentiable, a view when they are one run.

        Args:
            x: any tensor with ``total_rows`` rows in ``dim``, on any device.
            rank: whose rows.
            dim: the dimension of the stream.

        Raises:
            PlanError: no such rank.
            OpInputError: wrong size.
        """
        view = self.for_rank(rank)
        _check_rows(x, dim, self.total_rows, "x")
        if len(view.runs) <= 1:
            return x.narrow(dim, view.runs[0].start if view.runs else 0, view.num_tokens)
        # The backward of split is one cat; slices would each fill a gradient as large as x.
        pieces = x.split_with_sizes([run.stop - run.start for run in self.runs], dim)
        owners = (run.rank for run in self.runs)
        return torch.cat([p for p, owner in zip(pieces, owners, strict=True) if owner == rank], dim)

    def unshard(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Return the global tensor of all ranks' local ones; differentiable, inverse of ``shard``.

        Raises:
            OpInputError: not one tensor per rank, or a wrong size.
        """
        if len(parts) != self.world_size:
            raise OpInputError(
                f"unshard needs {self.world_size} parts, one per rank, got {len(parts)}"
            )
        unused = []
        for rank, part in enumerate(parts):
            view = self.for_rank(rank)
            _check_rows(part, dim, view.num_tokens, f"part {rank}")
            lengths = [run.stop - run.start for run in view.runs]
            # A part without rows is concatenated too, so that it stays in the graph.
            unused.append(iter(part.split_with_sizes(lengths, dim) if lengths else ()))
        empty = [part for part in parts if part.size(dim) == 0]
        return torch.cat([*(next(unused[run.rank]) for run in self.runs), *empty], dim)

    def digest(self) -> str:
        """Return a sha256 (hex) of the content, the same on every machine and in every run."""
        return self._digest

    def volume(self, slot: Slot, composition: str) -> Volume:
        """Return the payload bytes that every rank receives in one exchange: ``volume.volume``."""
        return volume(self, slot, composition)

    def describe(self) -> str:
        """Return a text for people: who owns what, the chains, and what moves."""
        return describe(self)

    @cached_property
    def _num_tokens(self) -> tuple[int, ...]:
        rows = [0] * self.world_size
        for run in self.runs:
            rows[run.rank] += run.stop - run.start
        return tuple(rows)

    @cached_property
    def _owned(self) -> tuple[tuple[int, ...], ...]:
        owned: list[list[int]] = [[] for _ in range(self.world_size)]
        for i, segment in enumerate(self.segments):
            owned[segment.rank].append(i)
        return tuple(map(tuple, owned))

    @cached_property
    def _local_indices(self) -> tuple[int, ...]:
        indices = [0] * len(self.segments)
        for owned in self._owned:
            for local, segment in enumerate(owned):
                indices[segment] = local
        return tuple(indices)

    @cached_property
    def _chain_starts(self) -> tuple[int, ...]:
        starts = [
            i
            for i, s in enumerate(self.segments)
            if i == 0 or s.sequence != self.segments[i - 1].sequence
        ]
        return (*starts, len(self.segments))

    @cached_property
    def _rank_plans(self) -> tuple[RankPlan, ...]:
        return tuple(self._view(rank) for rank in range(self.world_size))

    def _view(self, rank: int) -> RankPlan:
        segments = tuple(self.segments[i] for i in self._owned[rank])
        num_tokens = self._num_tokens[rank]
        runs = tuple(run for run in self.runs if run.rank == rank)
        if self.has_padding:
            return RankPlan(num_tokens, segments, runs, None)
        offsets = [segment.local_start for segment in segments] + [num_tokens]
        with torch.inference_mode(False):
            cu_seqlens = torch.tensor(offsets, dtype=torch.int64, device="cpu")
        return RankPlan(num_tokens, segments, runs, cu_seqlens)

    @staticmethod
    def _check(what: str, index: int, count: int) -> None:
        if not 0 <= index < count:
            raise PlanError(f"no {what} {index}; the plan has {count}")


def build_plan(
    cu_seqlens: Sequence[int] | Tensor,
    *,
    world_size: int,
    layout: str = "contiguous",
    boundaries: Sequence[int] | Sequence[tuple[int, int, int]] | Tensor | None = None,
    padded_cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Plan:
    """Return the plan of a packed stream over ranks; cached, so often the same object.

    Args:
        cu_seqlens (int32 or int64 if a tensor, [N+1]): offsets of the sequences in the global
            stream, from 0, non-decreasing.
        world_size: number of ranks.
        layout: one of ``layouts.LAYOUTS``.
        boundaries: ``[0, b1, ..., T]`` for ``contiguous``, ``[(rank, start, stop), ...]`` in any
            order for ``custom``.
        padded_cu_seqlens ([N+1]): rows where sequences start in the padded buffer; the last is its
            length.

    Raises:
        PlanError: malformed arguments; the words are a function of the arguments alone.

    Collective: no. Tensors on a device are read on the host.
    """
    ranks = as_integer(world_size, "world_size")
    if ranks < 1:
        raise PlanError(f"world_size must be at least 1, got {ranks}")
    name = check_layout(layout)
    offsets = as_offsets(cu_seqlens, "cu_seqlens")
    padded = None
    if padded_cu_seqlens is not None:
        padded = as_offsets(padded_cu_seqlens, "padded_cu_seqlens")
        _check_padding(offsets, padded)
    if padded == offsets:
        padded = None
    return _build(offsets, ranks, name, as_boundaries(name, boundaries), padded)


@lru_cache(maxsize=128)
def _build(
    cu_seqlens: tuple[int, ...],
    world_size: int,
    layout: str,
    boundaries: Boundaries | None,
    padded_cu_seqlens: tuple[int, ...] | None,
) -> Plan:
    starts = cu_seqlens if padded_cu_seqlens is None else padded_cu_seqlens
    runs = assign_rows(layout, starts, world_size, boundaries)
    return Plan(cu_seqlens, world_size, layout, padded_cu_seqlens, runs)


def _check_padding(offsets: Sequence[int], padded: Sequence[int]) -> None:
    if len(padded) != len(offsets):
        raise PlanError(
            f"padded_cu_seqlens must have {len(offsets)} offsets like cu_seqlens, got {len(padded)}"
        )
    for i in range(len(offsets) - 1):
        length, extent = offsets[i + 1] - offsets[i], padded[i + 1] - padded[i]
        if length > extent:
            raise PlanError(
                f"sequence {i} has {length} tokens and does not fit in its {extent} padded rows"
            )


def _check_rows(x: Tensor, dim: int, rows: int, what: str) -> None:
    if not -x.dim() <= dim < x.dim() or x.size(dim) != rows:
        raise OpInputError(
            f"{what} must have {rows} rows in dimension {dim}, got shape {list(x.shape)}"
        )
