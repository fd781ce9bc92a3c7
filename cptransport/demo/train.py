# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo: a training step as a user would write it, and beside it the step unsharded.

Every rank holds all weights and its part of the tokens. The sum over ranks of local gradients is
the gradient of the whole; the optimizer steps with that sum, so the weights stay alike. Rank 0 also
computes loss and gradients of the whole stream by itself, at the same weights, and compares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cptransport import env
from cptransport.context import CPContext
from cptransport.demo.model import HybridModel
from cptransport.demo.text import Batch, load_documents, pack
from cptransport.ops import RunRecord, last_run
from cptransport.plan import build_plan
from cptransport.testing.numerics import relative_error
from cptransport.transport import BoundaryTransport, Selection
from cptransport.transports.loopback import BACKEND as LOOPBACK

__all__ = ["LIMIT", "Outcome", "RankResult", "Settings", "Step", "train_rank"]

#: Largest relative difference of a loss or gradient in fp32: max error over max reference of a tensor.
LIMIT = 1e-5


@dataclass(frozen=True)
class Settings:
    """What is trained, and on what.

    Attributes:
        ranks: number of ranks.
        steps: optimizer steps.
        backend: as ``create_transport`` takes it; ``"threads"``: ranks are threads of this process.
        layout: a layout of ``build_plan`` that needs no boundaries.
        device: ``"cpu"`` or ``"cuda"`` (rank r on device r modulo their number).
        tokens: length of each step's packed stream.
        learning_rate: of AdamW.
        seed: of weights and data.
    """

    ranks: int = 4
    steps: int = 80
    backend: str | None = None
    layout: str = "zigzag"
    device: str = "cpu"
    tokens: int = 1021
    learning_rate: float = 4e-3
    seed: int = 0


@dataclass(frozen=True)
class Step:
    """One optimizer step.

    Attributes:
        number: from 1.
        documents: in its stream.
        sharded, unsharded: the loss both ways, nats per byte.
        differences: relative difference of ``loss`` and of every parameter's gradient, by name;
            absolute where the unsharded one is zero.
    """

    number: int
    documents: int
    sharded: float
    unsharded: float
    differences: Mapping[str, float]

    @property
    def worst(self) -> float:
        """Largest of the differences."""
        return max(self.differences.values())


@dataclass(frozen=True)
class RankResult:
    """What ran on one rank.

    Attributes:
        selection: of its transport.
        run: of its last op.
        received: payload bytes that its transport received, by part.
        shapes: of the parameters, by name.
    """

    selection: Selection
    run: RunRecord | None
    received: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Outcome:
    """A whole run: its steps, and what ran on every rank."""

    settings: Settings
    steps: tuple[Step, ...]
    ranks: tuple[RankResult, ...]

    def largest(self) -> dict[str, float]:
        """Return the largest difference over all steps, of the loss and of every gradient."""
        return {
            name: max(step.differences[name] for step in self.steps)
            for name in self.steps[0].differences
        }

    @property
    def equal(self) -> bool:
        """Whether no difference is above the limit."""
        return all(difference <= LIMIT for difference in self.largest().values())


def train_rank(
    transport: BoundaryTransport,
    settings: Settings,
    add_up: Callable[[Tensor], Tensor],
    on_step: Callable[[Step], None],
) -> RankResult:
    """Train on one rank.

    Args:
        transport: of all ranks.
        settings: alike on all ranks.
        add_up: returns the sum over ranks of a tensor, the same bits on each; collective.
        on_step: called on rank 0 after every comparison.

    Collective: yes.
    """
    device = transport.device
    model = HybridModel(settings.seed).to(device)
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)
    alone = LOOPBACK.create(None, device, env.timeout_s())
    documents, generator = load_documents(), torch.Generator().manual_seed(settings.seed)
    run: RunRecord | None = None
    for number in range(1, settings.steps + 1):
        batch = pack(documents, settings.tokens, generator)
        loss, gradients = _add_up(add_up, *_gradients(model, batch, settings.layout, transport))
        run = last_run()  # before the reference runs here too
        if transport.rank == 0:
            whole, expected = _gradients(model, batch, "contiguous", alone)
            differences = {"loss": _difference(loss, whole)}
            for name, gradient, reference in zip(parameters, gradients, expected, strict=True):
                differences[name] = _difference(gradient, reference)
            documents_here = len(batch.cu_seqlens) - 1
            on_step(Step(number, documents_here, loss.item(), whole.item(), differences))
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return RankResult(
        transport.selection,
        run,
        {name: part.bytes_received for name, part in transport.stats().by_part.items()},
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
    )


def _gradients(
    model: HybridModel, batch: Batch, layout: str, transport: BoundaryTransport
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return this rank's share of the mean loss, and its contribution to every gradient."""
    plan = build_plan(batch.cu_seqlens, world_size=transport.world_size, layout=layout)
    tokens, targets = (
        plan.shard(rows, transport.rank, dim=0).to(transport.device)
        for rows in (batch.tokens, batch.targets)
    )
    loss = model(tokens, targets, CPContext(plan, transport)) / plan.total_rows
    return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))


def _difference(actual: Tensor, expected: Tensor) -> float:
    """Return the relative difference, the absolute one to a reference of zeros; infinite to one not finite.

    A stream of one token has such zeros: no state decays, so gates have no gradient.
    """
    if not expected.isfinite().all():
        return math.inf
    if expected.any():
        return relative_error(actual, expected)
    largest = actual.abs().max().item()
    return math.inf if math.isnan(largest) else largest


def _add_up(
    add_up: Callable[[Tensor], Tensor], loss: Tensor, gradients: tuple[Tensor, ...]
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Sum loss and gradients over ranks, in one message."""
    everything = add_up(torch.cat([loss.reshape(1), *(each.reshape(-1) for each in gradients)]))
    total, *sums = torch.split(everything, [1, *(each.numel() for each in gradients)])
    return total[0], tuple(
        each.reshape(like.shape) for each, like in zip(sums, gradients, strict=True)
    )
