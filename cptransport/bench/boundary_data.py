# SPDX-License-Identifier: Apache-2.0
"""What the boundary bench measures, its random summaries, and what their exchange must give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cptransport.plan import Plan, build_plan
from cptransport.summary import advance
from cptransport.transport import PartSpec

__all__ = ["Settings", "Variant", "expected_states", "summaries", "variants"]

#: Tokens of every sequence per rank; summaries do not depend on it.
_TOKENS = 64
#: Steps in the graph of a captured row. Ranks leave the alignment, and graphs start, up to tens of
#: microseconds apart, about what a step takes.
_CAPTURED_STEPS = 10


@dataclass(frozen=True)
class Settings:
    """What is exchanged and how often; JSON values, alike on all ranks.

    Attributes:
        op: ``"kda"`` or ``"ssd"``. heads, key_dim, value_dim: of its states.
        dtype: of the summaries. layout, sequences: of the plan.
        compositions, directions: what is measured.
        baseline: measure ``torch.distributed``'s all-gather with the same fold, too.
        warmup, iterations, repeats, cold: see ``Budget``. seed: of the summaries.
    """

    op: str
    heads: int
    key_dim: int
    value_dim: int
    dtype: str
    layout: str
    sequences: int
    compositions: tuple[str, ...]
    directions: tuple[str, ...]
    baseline: bool
    warmup: int
    iterations: int
    repeats: int
    cold: bool
    seed: int

    def plan(self, world_size: int) -> Plan:
        """Return the plan whose boundaries are exchanged."""
        length = _TOKENS * world_size
        offsets = [length * i for i in range(self.sequences + 1)]
        return build_plan(offsets, world_size=world_size, layout=self.layout)

    def steps(self, timer: str) -> int:
        """Return how many steps a timed part holds; with a cold cache one, later ones would find it warm."""
        return _CAPTURED_STEPS if timer == "graph_replay" and not self.cold else 1

    def parts(self, plan: Plan) -> tuple[PartSpec, PartSpec]:
        """Return the parts of a summary, without routes."""
        n, dtype = plan.max_segments, getattr(torch, self.dtype)
        if self.op == "ssd":
            state = (n, self.heads, self.value_dim, self.key_dim)
            return PartSpec("state", state, dtype), PartSpec("transition", (n, self.heads), dtype)
        square = (n, self.heads, self.key_dim, self.key_dim)
        state = (n, self.heads, self.key_dim, self.value_dim)
        return PartSpec("state", state, dtype), PartSpec("transition", square, dtype)


@dataclass(frozen=True)
class Variant:
    """One thing to measure on a backend; ``barrier`` has neither composition nor direction.

    Attributes:
        mode, timer: of its row.
        composition, direction: of the exchange.
        baseline: not the backend, but ``torch.distributed``'s all-gather and the same fold.
    """

    mode: str
    timer: str
    composition: str = ""
    direction: str = ""
    baseline: bool = False

    @property
    def overwrites(self) -> bool:
        """Whether a step overwrites what was written for it: a handoff finishes states in their place."""
        return self.composition == "handoff"


def variants(settings: Settings, device: str) -> list[Variant]:
    """Return what is measured, in the order in which all ranks do it."""
    eager = ["perf_counter", "cuda_event"] if device == "cuda" else ["perf_counter"]
    chosen = [Variant("barrier", timer) for timer in eager]
    for direction in settings.directions:
        for composition in settings.compositions:
            # In a handoff, waiting and computing alternate along the chain; they do not come apart.
            apart = ["publish_fetch", "fold"] if composition == "gather" else ["fold"]
            chosen += [
                Variant(mode, timer, composition, direction)
                for timer in [*eager, "graph_replay"]
                for mode in ["merge", *apart]
            ]
        chosen += [
            Variant("merge", timer, "gather", direction, baseline=True)
            for timer in [*eager, "graph_replay"]
            if settings.baseline
        ]
    return chosen


def summaries(settings: Settings, plan: Plan, device: torch.device) -> list[dict[str, Tensor]]:
    """Return the summary of every segment, the same on every rank: M has a spectral norm near 1."""
    parts = settings.parts(plan)
    made = []
    for index in range(len(plan.segments)):
        generator = torch.Generator().manual_seed(settings.seed * 65_537 + index)
        state, transition = (
            torch.randn(part.shape[1:], generator=generator, dtype=torch.float64) for part in parts
        )
        scaled = (
            -transition.abs() if settings.op == "ssd" else transition / (2 * settings.key_dim**0.5)
        )
        dtype = parts[0].dtype
        made.append({"state": state.to(device, dtype), "transition": scaled.to(device, dtype)})
    return made


def expected_states(
    settings: Settings, plan: Plan, payload: Sequence[Mapping[str, Tensor]], direction: str
) -> list[Tensor | None]:
    """Return the state that enters every segment, folded in fp64; None where nothing enters."""
    step = advance(settings.op, direction, "k_major")
    expected: list[Tensor | None] = [None] * len(plan.segments)
    for sequence in range(plan.num_sequences):
        chain = plan.chain(sequence)
        first, *others = chain if direction == "forward" else chain[::-1]
        state = payload[first]["state"].double()
        for index in others:
            expected[index] = state
            own = payload[index]
            state = step(own["transition"].double(), state, own["state"].double())
    return expected
