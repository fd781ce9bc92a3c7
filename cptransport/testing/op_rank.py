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

from cptransport import env, ops
from cptransport.context import CPContext
from cptransport.testing.op_cases import INITIAL, OpCase, OpSpec, owned_states
from cptransport.transport import BoundaryTransport, TransportStats
from cptransport.transports import threads

__all__ = ["RankRun", "call", "run_rank", "run_specs", "run_threads", "settings"]

_DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class RankRun:
    """What one rank's half brought, on the CPU.

    Attributes:
        output, final: of this rank.
        grads: by input name, the initial state's among them.
        received: per direction, bytes by part.
        record: what ran; None when the op keeps none.
    """

    output: Tensor
    final: Tensor
    grads: Mapping[str, Tensor]
    received: Mapping[str, Mapping[str, int]]
    record: ops.RunRecord | None


def run_rank(transport: BoundaryTransport, case: OpCase) -> RankRun:
    """Run one rank's half of a call, forward and backward.

    Args:
        transport: of the world size of the plan; its device is the call's device.
        case: the whole call, the same on every rank.

    Collective: yes.
    """
    spec, rank = case.spec, transport.rank
    leaves = {
        name: _leaf(case.plan.shard(x, rank), transport.device, spec.strided)
        for name, x in case.tokens.items()
    }
    leaves.update({n: _leaf(x, transport.device) for n, x in case.parameters.items()})
    if case.initial is not None:
        leaves[INITIAL[spec.op]] = _leaf(case.initial, transport.device)
    grad_output = case.plan.shard(case.grad_output, rank).clone()
    local_padding = torch.isin(case.plan.for_rank(rank).index, case.padding_rows)
    grad_output[:, local_padding] = spec.padding
    # What a rank says about states that it does not own must not count.
    grad_final = torch.full_like(case.grad_final, torch.nan)
    owned = owned_states(case.plan, rank, spec.batch)
    grad_final[owned] = case.grad_final[owned]
    has_loss = spec.loss_ranks is None or rank in spec.loss_ranks
    grad_output = _strided(grad_output) if spec.strided else grad_output
    grads = (
        grad_output.to(transport.device) if "output" in spec.loss else None,
        grad_final.to(transport.device) if "final" in spec.loss else None,
    )
    context = CPContext(case.plan, transport)
    with settings(spec):
        if spec.explicit:
            run = _run_explicit(spec, context, leaves, grads)
        else:
            run = _run_autograd(spec, context, leaves, grads if has_loss else None)
    return run


_Grads = tuple[Tensor | None, Tensor | None]


def _run_autograd(
    spec: OpSpec, context: CPContext, leaves: dict[str, Tensor], grads: _Grads | None
) -> RankRun:
    before = context.transport.stats()
    output, final = call(spec, context, leaves)
    middle = context.transport.stats()
    record = ops.last_run()
    if grads is None:
        constant = torch.zeros((), device=output.device)
        torch.autograd.backward([ops.join_backward(constant, output, final)])
    else:
        pairs = [(x, d) for x, d in zip((output, final), grads, strict=True) if d is not None]
        torch.autograd.backward([x for x, _ in pairs], [d for _, d in pairs])
    after = context.transport.stats()
    found = {name: _gradient(name, leaf) for name, leaf in leaves.items()}
    return _rank_run(output, final, found, (before, middle, after), record)


def _run_explicit(
    spec: OpSpec, context: CPContext, leaves: dict[str, Tensor], grads: _Grads
) -> RankRun:
    before = context.transport.stats()
    given: dict[str, Any] = {name: leaf.detach() for name, leaf in leaves.items()}
    if spec.op == "kda":
        kda = ops.kda_forward(
            **given,
            **spec.options,
            engine=spec.engine,
            cp_context=context,
            output_final_state=True,
        )
        output, final, record = kda.o, kda.final_state, ops.last_run()
        middle = context.transport.stats()
        back: Any = ops.kda_backward(kda.saved, _zeros_if_none(grads[0], output), grads[1])
    elif spec.op == "ssd":
        ssd = ops.ssd_forward(
            **given,
            **spec.options,
            engine=spec.engine,
            cp_context=context,
            return_final_states=True,
        )
        output, final, record = ssd.y, ssd.final_states, ops.last_run()
        middle = context.transport.stats()
        back = ops.ssd_backward(ssd.saved, _zeros_if_none(grads[0], output), grads[1])
    else:
        raise ValueError(f"{spec.op} has no explicit forward and backward")
    assert final is not None
    found = {name: getattr(back, f"d{name}") for name in leaves}
    stats = (before, middle, context.transport.stats())
    return _rank_run(output, final, found, stats, record)


def call(spec: OpSpec, context: CPContext, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Call the op of a spec and return its output and final states."""
    shared: dict[str, Any] = {**spec.options, **inputs, "cp_context": context}
    if spec.op == "conv1d":
        result: Any = ops.causal_conv1d(**shared, output_final_state=True)
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


def _gradient(name: str, leaf: Tensor) -> Tensor:
    assert leaf.grad is not None, f"{name} got no gradient"
    return leaf.grad


def _zeros_if_none(grad: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if grad is None else grad


def _rank_run(
    output: Tensor,
    final: Tensor,
    grads: Mapping[str, Tensor],
    stats: tuple[TransportStats, TransportStats, TransportStats],
    record: ops.RunRecord | None,
) -> RankRun:
    moved = {
        direction: {
            part: counted.bytes_received - _received(stats[i], part)
            for part, counted in stats[i + 1].by_part.items()
        }
        for i, direction in enumerate(_DIRECTIONS)
    }
    on_host = {name: grad.detach().cpu() for name, grad in grads.items()}
    return RankRun(output.detach().cpu(), final.detach().cpu(), on_host, moved, record)


def _received(stats: TransportStats, part: str) -> int:
    return stats.by_part[part].bytes_received if part in stats.by_part else 0


def run_specs(transport: BoundaryTransport, specs: Sequence[Mapping[str, Any]]) -> list[RankRun]:
    """Run several calls on one transport; a case of the rank pool."""
    return [run_rank(transport, OpCase.of(OpSpec(**spec))) for spec in specs]


def run_threads(case: OpCase, timeout_s: float = 30.0) -> list[RankRun]:
    """Run a call on ranks that are threads of this process."""
    world_size = case.plan.world_size
    return threads.run(lambda transport: run_rank(transport, case), world_size, timeout_s)
