# SPDX-License-Identifier: Apache-2.0
"""Device tables of a causal convolution: whose rows are whose, in which order programs take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cptransport_kernels.configs import ConvConfig

__all__ = ["NONE", "OWN", "STATE", "ConvSegment", "ConvTables", "RowTable", "build_tables"]

#: Where a row comes from, besides the ranks >= 0; see ``conv1d``.
OWN, STATE, NONE = -1, -2, -3


@dataclass(frozen=True)
class ConvSegment:
    """Rows ``start <= t < stop`` of one sequence; ``state`` is its row of the final states if the
    sequence ends here, else -1."""

    start: int
    stop: int
    state: int = -1


@dataclass(frozen=True, eq=False)
class RowTable:
    """Rows to be written, each the sum of up to S rows.

    Attributes:
        targets (int32, [R]): see ``conv1d.move_rows``.
        sources (int32, [R, S, 2]): kind and row, in the order in which they are added.
    """

    targets: Tensor
    sources: Tensor

    @property
    def count(self) -> int:
        """R."""
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class ConvTables:
    """Tables of one rank's segments.

    Attributes:
        tokens (int32, [T, 2]): start and index of each row's segment; index -1: of none.
        blocks (int32, [NB]): blocks of tokens; the first ``inner`` of them need no halo.
        inner, num_blocks: how many.
        spans (int32, [NS, 6]): start, stop, start and stop of the segment, its index, its state.
        programs (int32, [NP + 1]): the spans of the backward's programs, p has those from
            ``programs[p]`` on.
        num_programs: NP.
        sources (int32, [segments * h, 2]): kind and row of every row of the halos.
        num_segments: of the rank, empty ones too.
        gaps: whether any row is of no segment.
    """

    tokens: Tensor
    blocks: Tensor
    inner: int
    num_blocks: int
    spans: Tensor
    programs: Tensor
    num_programs: int
    sources: Tensor
    num_segments: int
    gaps: bool


def build_tables(
    segments: Sequence[ConvSegment],
    num_tokens: int,
    width: int,
    config: ConvConfig,
    sources: Tensor,
) -> ConvTables:
    """Build the tables of ``segments`` on the device of ``sources``; copies and may wait.

    Args:
        segments: row ranges ascending and disjoint, empty ones too.
        num_tokens: T.
        width: W.
        config: of the kernels.
        sources: see ``ConvTables``.
    """
    device = sources.device
    tokens = torch.tensor([0, -1], dtype=torch.int32).repeat(num_tokens, 1)
    for index, segment in enumerate(segments):
        tokens[segment.start : segment.stop] = torch.tensor([segment.start, index])
    size = config.forward.tokens
    padded = -(-num_tokens // size) * size
    near = torch.zeros(padded, dtype=torch.bool)
    near[:num_tokens] = (tokens[:, 1] >= 0) & (torch.arange(num_tokens) - tokens[:, 0] < width - 1)
    # Stable: which blocks run first does not change what they compute.
    edge, blocks = near.view(-1, size).any(1).sort(stable=True)
    spans, programs = _spans(segments, width, config.span)
    return ConvTables(
        tokens=tokens.to(device),
        blocks=blocks.to(torch.int32).to(device),
        inner=int((~edge).sum()),
        num_blocks=len(blocks),
        spans=torch.tensor(spans, dtype=torch.int32).reshape(-1, 6).to(device),
        programs=torch.tensor(programs, dtype=torch.int32).to(device),
        num_programs=len(programs) - 1,
        sources=sources,
        num_segments=len(segments),
        gaps=bool((tokens[:, 1] < 0).any()),
    )


def _spans(
    segments: Sequence[ConvSegment], width: int, size: int
) -> tuple[list[list[int]], list[int]]:
    """Cut segments, and share the spans out so that programs have about the same to do."""
    spans: list[list[int]] = []
    programs = [0]
    steps = 0
    for index, segment in enumerate(segments):
        for start in range(segment.start, segment.stop, size) or [segment.start]:
            stop = min(start + size, segment.stop)
            cost = stop - start + width - 1
            if steps and steps + cost > size + width - 1:
                programs.append(len(spans))
                steps = 0
            spans.append([start, stop, segment.start, segment.stop, index, segment.state])
            steps += cost
    return spans, [*programs, len(spans)] if spans else [0]
