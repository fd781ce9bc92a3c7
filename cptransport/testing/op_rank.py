# SPDX-License-Identifier: Apache-2.0
"""One rank's half of the distributed oracle: an op call, forward and backward, on any transport."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cptransport import env, ops
from cptransport.context import CPContext
from cptransport.testing.op_cases import INITIAL, OpCase, OpSpec, owned_states
from cptransport.transport import BoundaryTransport
from cptransport.transports import threads

__all__ = ["RankCall", "RankRun", "call", "run_rank", "run_specs", "run_threads", "settings"]


@dataclass(frozen=True)
class RankRun:
    """What one rank's half brought, on the CPU.

    Attributes:
        output, final: of this rank.
        grads: by input name, the initial state's among them.
        received: per direction, bytes by part; parts that did not move are left out.
        record: what ran; None when the op keeps none.
    """

    output: Tensor
    final: Tensor
    grads: Mapping[str, Tensor]
    received: Mapping[str, Mapping[str, int]]
    record: ops.RunRecord | None


class RankCall:
    """One rank's half of a call, in two steps, so that several can be in flight.

    Args:
        transport: of the world size of the plan; its device is the call's device.
        case: the whole call, the same on every rank.
    """

    def __init__(self, transport: BoundaryTransport, case: OpCase) -> None:
        spec, rank, device = case.spec, transport.rank, transport.device
        self.case = case
        self.context = CPContext(case.plan, transport)
        self.leaves = {
            name: _leaf(case.plan.shard(x, rank), device, spec.strided)
            for name, x in case.tokens.items()
        }
        self.leaves.update({name: _leaf(x, device) for name, x in case.parameters.items()})
        if case.initial is not None:
            self.leaves[INITIAL[spec.op]] = _leaf(case.initial, device)
        self.output = self.final = torch.empty(0)
        self._record: ops.RunRecord | None = None
        self._received: dict[str, dict[str, int]] = {}
        self._saved: Any = None

    def forward(self) -> RankCall:
        """Run the forward; collective."""
        spec = self.case.spec
        with self._counting("forward"):
            if spec.explicit:
                run = _explicit_forward(spec, self.context, self.leaves)
                self.output, self.final, self._saved = run
            else:
                self.output, self.final = call(spec, self.context, self.leaves)
        self._record = ops.last_run()
        return self

    def checkpointed(self, use_reentrant: bool) -> RankCall:
        """Run the forward under activation checkpointing; the backward runs it again."""
        names = list(self.leaves)

        def layer(*values: Tensor) -> tuple[Tensor, Tensor]:
            own = [2 * value for value in values]  # something of the layer's own to recompute
            inputs = {name: x / 2 for name, x in zip(names, own, strict=True)}
            return call(self.case.spec, self.context, inputs)

        with self._counting("forward"):
            self.output, self.final = checkpoint(
                layer, *self.leaves.values(), use_reentrant=use_reentrant
            )
        self._record = ops.last_run()
        return self

    def backward(self) -> RankRun:
        """Run the backward and return all that this rank has; collective."""
        spec = self.case.spec
        grads = self._entering()
        with self._counting("backward"):
            if spec.explicit:
                found = _explicit_backward(spec, self._saved, self.leaves, self.output, grads)
            else:
                self._autograd(grads)
                found = self.gradients()
        return RankRun(
            self.output.detach().cpu(),
            self.final.detach().cpu(),
            {name: grad.detach().cpu() for name, grad in found.items()},
            self._received,
            self._record,
        )

    def gradients(self) -> dict[str, Tensor]:
        """Return what autograd left in the leaves."""
        return {name: leaf.grad for name, leaf in self.leaves.items() if leaf.grad is not None}

    def _autograd(self, grads: _Grads) -> None:
        ranks = self.case.spec.loss_ranks
        if ranks is not None and self.context.rank not in ranks:
            constant = torch.zeros((), device=self.output.device)
            torch.autograd.backward([ops.join_backward(constant, self.output, self.final)])
            return
        pairs = zip((self.output, self.final), grads, strict=True)
        ends = [(x, grad) for x, grad in pairs if grad is not None]
        torch.autograd.backward([x for x, _ in ends], [grad for _, grad in ends])

    def _entering(self) -> _Grads:
        """Return the gradients of output and final states; None where the loss is not."""
        case, spec, rank = self.case, self.case.spec, self.context.rank
        device = self.context.transport.device
        output = case.plan.shard(case.grad_output, rank).clone()
        output[:, torch.isin(case.plan.for_rank(rank).index, case.padding_rows)] = spec.padding
        # What a rank says about states that it does not own must not count.
        final = torch.full_like(case.grad_final, torch.nan)
        owned = owned_states(case.plan, rank, spec.batch)
        final[owned] = case.grad_final[owned]
        output = _strided(output) if spec.strided else output
        return (
            output.to(device) if "output" in spec.loss else None,
            final.to(device) if "final" in spec.loss else None,
        )

    @contextmanager
    def _counting(self, direction: str) -> Iterator[None]:
        before = self.context.transport.stats().by_part
        with settings(self.case.spec):
            yield
        after = self.context.transport.stats().by_part
        moved = {
            part: counted.bytes_received - (before[part].bytes_received if part in before else 0)
            for part, counted in after.items()
        }
        self._received[direction] = {part: count for part, count in moved.items() if count}


def run_rank(transport: BoundaryTransport, case: OpCase) -> RankRun:
    """Run one rank's half of a call, forward and backward; collective."""
    return RankCall(transport, case).forward().backward()


_Grads = tuple[Tensor | None, Tensor | None]


def _explicit_forward(
    spec: OpSpec, context: CPContext, leaves: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, Any]:
    shared: dict[str, Any] = {name: leaf.detach() for name, leaf in leaves.items()}
    shared.update(spec.options, engine=spec.engine, cp_context=context)
    if spec.op == "kda":
        kda = ops.kda_forward(**shared, output_final_state=True)
        output, final, saved = kda.o, kda.final_state, kda.saved
    elif spec.op == "ssd":
        ssd = ops.ssd_forward(**shared, return_final_states=True)
        output, final, saved = ssd.y, ssd.final_states, ssd.saved
    else:
        raise ValueError(f"{spec.op} has no explicit forward and backward")
    assert final is not None
    return output, final, saved


def _explicit_backward(
    spec: OpSpec, saved: Any, leaves: Mapping[str, Tensor], output: Tensor, grads: _Grads
) -> dict[str, Tensor]:
    entering = torch.zeros_like(output) if grads[0] is None else grads[0]
    run: Any = ops.kda_backward if spec.op == "kda" else ops.ssd_backward
    found = run(saved, entering, grads[1])
    return {name: getattr(found, f"d{name}") for name in leaves}


def call(spec: OpSpec, context: CPContext, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Call the op of a spec and return its output and final states."""
    shared: dict[str, Any] = {**spec.options, **inputs, "cp_context": context}
    if spec.op == "conv1d":
        result: Any = ops.causal_conv1d(**shared, engine=spec.engine, output_final_state=True)
    elif spec.op == "kda":
        result = ops.chunk_kda(**shared, engine=spec.engine, output_final_state=True)
    elif spec.op == "ssd":
        shared.update(engine=spec.engine, return_final_states=True)
        result = ops.mamba_chunk_scan_combined(**shared)
    else:
        shared.update(engine=spec.engine, headdim=spec.value_dim, ngroups=spec.heads)
        shared.setdefault("conv1d_bias", None)
        result = ops.mamba_split_conv1d_scan_combined(**shared, return_final_states=True)
    output, final = result
    return output, final


_lock = threading.Lock()
_users = 0
_before: dict[str, str | None] = {}


@contextmanager
def settings(spec: OpSpec) -> Iterator[None]:
    """Set what ops read from the environment; ranks that are threads share it."""
    global _users
    wanted = {env.COMPOSITION.name: spec.composition, env.OVERLAP.name: str(int(spec.overlap))}
    with _lock:
        if _users == 0:
            _before.update({name: os.environ.get(name) for name in wanted})
        _users += 1
        os.environ.update(wanted)
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if _users == 0:
                for name, value in _before.items():
                    os.environ.pop(name) if value is None else os.environ.update({name: value})


def _leaf(x: Tensor, device: torch.device, strided: bool = False) -> Tensor:
    x = x.detach().clone().to(device)
    return (_strided(x) if strided else x).requires_grad_()


def _strided(x: Tensor) -> Tensor:
    """Return the same values as a view with gaps, its first two axes swapped in memory."""
    wide = x.new_full((x.shape[1], x.shape[0], *x.shape[2:-1], x.shape[-1] + 3), torch.nan)
    view = wide.transpose(0, 1)[..., 1:-2]
    return view.copy_(x)


def run_specs(transport: BoundaryTransport, specs: Sequence[Mapping[str, Any]]) -> list[RankRun]:
    """Run several calls on one transport; a case of the rank pool."""
    return [run_rank(transport, OpCase.of(OpSpec(**spec))) for spec in specs]


def run_threads(case: OpCase, timeout_s: float = 30.0) -> list[RankRun]:
    """Run a call on ranks that are threads of this process."""
    world_size = case.plan.world_size
    return threads.run(lambda transport: run_rank(transport, case), world_size, timeout_s)
