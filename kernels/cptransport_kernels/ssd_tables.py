# SPDX-License-Identifier: Apache-2.0
"""Device tables of what SSD computes on a rank: segments, pieces that long ones are cut into, chunks.

A chunk never crosses a piece, a piece never a segment; a segment of no token has one piece without
chunks. Everything is said in *travel order*: forward from the first token to the last, ``reverse``
the other way, as gradients of states go. Tables are uploaded once and cached, so that a call after
the first neither copies nor waits.

Unlike KDA's (``pieces``), transitions are numbers: what joins the pieces is one scan over their
states, so there are no steps of a fold to list.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["SSDSegment", "SSDTables", "build_ssd_tables"]


@dataclass(frozen=True)
class SSDSegment:
    """One segment in one travel direction.

    Attributes:
        start, stop: local rows.
        at_rest: whether the state that enters is known to be zero.
        state, transition: whether the summary holds its E (dE), its log decay.
    """

    start: int
    stop: int
    at_rest: bool
    state: bool = False
    transition: bool = False


@dataclass(frozen=True, eq=False)
class SSDTables:
    """Tables of one rank's segments.

    Attributes:
        pieces: int32 ``[NP, 8]``: start, stop, segment, first chunk, row of the entering state (-1:
            it is zero), whether its own state update is asked for, whether it is the last of its
            segment in travel order, what its segment publishes (1: state, 2: transition, 3: both).
        segments: int32 ``[NS, 4]``: first piece, pieces, whether its state, its transition is
            published.
        chunks: int32 ``[NC, 2]``: start, stop.
        num_pieces, num_segments, num_chunks, num_rows: their numbers; rows of entering states.
        cut: whether any segment has more than one piece.
        walked: whether any piece's state update is asked for.
        entered: whether any state that enters may be other than zero.
        gaps: whether local rows exist that belong to no segment.
    """

    pieces: Tensor
    segments: Tensor
    chunks: Tensor
    num_pieces: int
    num_segments: int
    num_chunks: int
    num_rows: int
    cut: bool
    walked: bool
    entered: bool
    gaps: bool


@lru_cache(maxsize=256)
def build_ssd_tables(
    segments: tuple[SSDSegment, ...],
    num_tokens: int,
    chunk: int,
    piece_tokens: int,
    device: torch.device,
    reverse: bool,
) -> SSDTables:
    """Build the tables of ``segments`` on ``device``.

    Args:
        segments: in causal order, row ranges ascending and disjoint.
        num_tokens: T, the rank's rows.
        chunk: tokens per chunk.
        piece_tokens: tokens of a piece at most; a multiple of ``chunk``.
        device: where the tables live.
        reverse: travel order.
    """
    cuts = [list(range(s.start, s.stop, piece_tokens)) or [s.start] for s in segments]
    cut = any(len(starts) > 1 for starts in cuts)
    pieces: list[list[int]] = []
    heads: list[list[int]] = []
    chunks: list[list[int]] = []
    rows = 0
    for index, (segment, starts) in enumerate(zip(segments, cuts, strict=True)):
        heads.append([len(pieces), len(starts), int(segment.state), int(segment.transition)])
        last = starts[0] if reverse else starts[-1]
        published = segment.state or segment.transition
        # A row holds what a piece adds, until the scan over pieces makes it what enters.
        row_needed = not segment.at_rest or len(starts) > 1 or (cut and segment.state)
        for start in starts:
            stop = min(start + piece_tokens, segment.stop)
            row = rows if row_needed else -1
            rows += row_needed
            pieces.append(
                [start, stop, index, len(chunks), row, int(published or start != last)]
                + [int(start == last), segment.state + 2 * segment.transition]
            )
            chunks += [[t, min(t + chunk, stop)] for t in range(start, stop, chunk)]

    def upload(table: list[list[int]], width: int) -> Tensor:
        return torch.tensor(table, dtype=torch.int32).reshape(-1, width).to(device)

    return SSDTables(
        pieces=upload(pieces, 8),
        segments=upload(heads, 4),
        chunks=upload(chunks, 2),
        num_pieces=len(pieces),
        num_segments=len(segments),
        num_chunks=len(chunks),
        num_rows=rows,
        cut=cut,
        walked=any(piece[5] for piece in pieces),
        entered=not all(segment.at_rest for segment in segments),
        gaps=sum(s.stop - s.start for s in segments) != num_tokens,
    )
