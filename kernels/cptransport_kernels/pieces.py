# SPDX-License-Identifier: Apache-2.0
"""Device tables of what a rank computes: segments, pieces that long ones are cut into, chunks.

A chunk never crosses a segment. A segment of no token has one piece without chunks. Tables are
uploaded once and cached, so that a call after the first neither copies nor waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cptransport_kernels.fold import FoldSteps

#: (source, state row, transition row, prefix row), see ``fold``.
Step = tuple[int, int, int, int]

__all__ = ["Pieces", "SegmentSpec", "build_pieces"]


@dataclass(frozen=True)
class SegmentSpec:
    """One segment as the kernels see it.

    Attributes:
        start, stop: local rows.
        seeded: whether the state that enters is known at the start of the forward.
        state, transition: whether the forward summary holds its E, its M.
        grad_state, grad_transition: whether the backward summary holds its dE, its M.
        outgoing: whether the state that leaves is read, and may get a gradient.
    """

    start: int
    stop: int
    seeded: bool
    state: bool = False
    transition: bool = False
    grad_state: bool = False
    grad_transition: bool = False
    outgoing: bool = False


@dataclass(frozen=True, eq=False)
class Pieces:
    """Tables of one rank's segments.

    Attributes:
        forward, backward: int32 ``[NP, 8]``: start, stop, seeded, segment, summary row of E (dE)
            or -1, of M or -1, first chunk, whether the segment starts here. A row is given only
            where one piece is a whole segment; the others go through ``fold``.
        chunks: int32 ``[NC, 4]``: start, stop, piece, 0.
        num_pieces, num_chunks, num_segments: their numbers.
        cut: whether any segment has more than one piece.
        unseeded: whether any piece starts from zero.
        gaps: whether local rows exist that belong to no segment.
        outgoing: whether the state that leaves any segment is read.
        keeps_state, keeps_transition: whether E, M of every piece are kept, beside those that the
            summary holds.
        enter: steps from each segment's entering state to that of its last piece; prefix rows are
            pieces.
        enter_leave: the same, on to the leaving state.
        leave: steps from the gradient of each segment's leaving state towards that of the entering
            one; prefix rows are pieces.
        compose, compose_transition: steps that give E and M of the cut segments that publish them;
            None without such.
        grad_compose: steps that give dE of the segments that publish one, from the gradient of the
            final state.
        grad_transition: as ``compose_transition``, for the backward.
    """

    forward: Tensor
    backward: Tensor
    chunks: Tensor
    num_pieces: int
    num_chunks: int
    num_segments: int
    cut: bool
    unseeded: bool
    gaps: bool
    outgoing: bool
    keeps_state: bool
    keeps_transition: bool
    enter: FoldSteps
    enter_leave: FoldSteps
    leave: FoldSteps
    compose: FoldSteps | None
    compose_transition: FoldSteps | None
    grad_compose: FoldSteps
    grad_transition: FoldSteps | None


def _cut(segment: SegmentSpec, tokens: int) -> list[tuple[int, int]]:
    """Return the row ranges of a segment's pieces: at most ``tokens`` rows each, one at least."""
    starts = range(segment.start, segment.stop, tokens) or [segment.start]
    return [(start, min(start + tokens, segment.stop)) for start in starts]


@lru_cache(maxsize=256)
def build_pieces(
    segments: tuple[SegmentSpec, ...],
    num_tokens: int,
    chunk: int,
    piece_tokens: int,
    device: torch.device,
) -> Pieces:
    """Build the tables of ``segments`` on ``device``.

    Args:
        segments: in causal order, row ranges ascending and disjoint.
        num_tokens: T, the rank's rows.
        chunk: tokens per chunk.
        piece_tokens: tokens of a piece at most; a multiple of ``chunk``.
        device: where the tables live.
    """
    forward: list[list[int]] = []
    backward: list[list[int]] = []
    chunks: list[list[int]] = []
    ranges: list[range] = []
    for index, segment in enumerate(segments):
        first = len(forward)
        parts = _cut(segment, piece_tokens)
        whole = len(parts) == 1
        for part, (start, stop) in enumerate(parts):
            head = [start, stop, int(segment.seeded and part == 0), index]
            tail = [len(chunks), int(part == 0)]
            row = index if whole else -1
            forward.append(
                [*head, row if segment.state else -1, row if segment.transition else -1, *tail]
            )
            backward.append(
                [
                    *head,
                    row if segment.grad_state else -1,
                    row if segment.grad_transition else -1,
                    *tail,
                ]
            )
            chunks += [
                [t, min(t + chunk, stop), len(forward) - 1, 0] for t in range(start, stop, chunk)
            ]
        ranges.append(range(first, len(forward)))

    def upload(rows: Sequence[Sequence[int]], width: int) -> Tensor:
        return torch.tensor(rows, dtype=torch.int32).reshape(-1, width).to(device)

    def seeded(piece: int) -> bool:
        return forward[piece][2] != 0

    def steps(
        flag: str, of_segment: Callable[[range], list[Step]], *, cut_only: bool = True
    ) -> FoldSteps | None:
        wanted = [
            i
            for i, s in enumerate(segments)
            if getattr(s, flag) and (len(ranges[i]) > 1 or not cut_only)
        ]
        if cut_only and not wanted:
            return None
        # A row per segment, wanted or not: a fold's start has a row per segment too.
        rows = [of_segment(r) if i in wanted else [] for i, r in enumerate(ranges)]
        results = [i if i in wanted else -1 for i in range(len(segments))]
        return FoldSteps(rows, device, results=results)

    def update(pieces: range) -> list[Step]:
        # From a zero start: the entering state is not known yet.
        return [(0, p, -1 if p == pieces[0] else p, -1) for p in pieces]

    def transition(pieces: range) -> list[Step]:
        # A product of transitions: the "state" is the first one, and nothing is added to it later.
        return [(0, p, -1, -1) if p == pieces[0] else (0, -1, p, -1) for p in pieces]

    def grad(pieces: range) -> list[Step]:
        return [(0, p, p, -1) for p in reversed(pieces)]

    def enter(pieces: range) -> list[Step]:
        return [(0, p, -1 if seeded(p) else p, p) for p in pieces]

    def leave(pieces: range) -> list[Step]:
        # Ends with the first piece's leaving gradient: its own walk takes over there.
        return [(0, -1, -1, p) if p == pieces[0] else (0, p, p, p) for p in reversed(pieces)]

    grad_compose = steps("grad_state", grad, cut_only=False)
    assert grad_compose is not None
    cut = any(len(pieces) > 1 for pieces in ranges)
    outgoing = any(s.outgoing for s in segments)
    unseeded = any(piece[2] == 0 for piece in forward)
    # A transition serves its segment's summary, in both directions, and whoever knows the gradient
    # of the state that leaves; one that nobody reads is not written.
    wanted = cut or any(s.transition or (s.outgoing and not s.seeded) for s in segments)
    return Pieces(
        forward=upload(forward, 8),
        backward=upload(backward, 8),
        chunks=upload(chunks, 4),
        num_pieces=len(forward),
        num_chunks=len(chunks),
        num_segments=len(segments),
        cut=cut,
        unseeded=unseeded,
        gaps=sum(segment.stop - segment.start for segment in segments) != num_tokens,
        outgoing=outgoing,
        keeps_state=cut or outgoing,
        keeps_transition=unseeded and wanted,
        enter=FoldSteps(
            [enter(pieces)[:-1] + [(0, -1, -1, pieces[-1])] for pieces in ranges],
            device,
            [-1] * len(segments),
        ),
        enter_leave=FoldSteps([enter(pieces) for pieces in ranges], device),
        leave=FoldSteps([leave(pieces) for pieces in ranges], device, results=[-1] * len(segments)),
        compose=steps("state", update),
        compose_transition=steps("transition", transition),
        grad_compose=grad_compose,
        grad_transition=steps("grad_transition", transition),
    )
