# SPDX-License-Identifier: Apache-2.0
"""What a whole-op bench runs on: inputs, the recorded interior rank, and what each provider must give."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from cptransport.bench.baselines import Call, NotHereError, load_baseline
from cptransport.context import CPContext
from cptransport.ops import last_run
from cptransport.plan import build_plan
from cptransport.testing.numerics import TOLERANCES, relative_error
from cptransport.testing.recorded import RecordedTransport, Recording, record
from cptransport.transport import BoundaryTransport, PartSpec, Slot
from cptransport.transports.loopback import LoopbackTransport

__all__ = ["LayerOp", "Provider", "Stage", "Tensors", "check"]

Tensors = dict[str, Tensor]

#: Sharded against our own unsharded op, largest error over largest value.
SHARDED = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


@dataclass(frozen=True)
class LayerOp:
    """An op as these benches see it.

    Attributes:
        case, op: names in the rows.
        inputs: makes the op's inputs for a number of tokens, by name, in fp64 on CPU.
        narrow: names of inputs that have the dtype under test; the others are fp32 (or fp64 with it).
        sharded: names of inputs that are cut along the tokens.
        output_like: name of the input whose shape and dtype the output has.
        call: runs the op under autograd: ``(inputs, context, engine) -> output``.
        explicit: runs it without: ``(inputs, context, engine, grad_output) -> output "o" and gradients``
            by name.
        shape, options: of the rows.
        distribution: of the inputs, in words.
    """

    case: str
    op: str
    inputs: Callable[[int, torch.Generator], Tensors]
    narrow: frozenset[str]
    sharded: frozenset[str]
    output_like: str
    call: Callable[[Mapping[str, Any], CPContext, str | None], Tensor]
    explicit: Callable[[Mapping[str, Any], CPContext, str | None, Tensor], Tensors]
    shape: Mapping[str, int | None]
    options: Mapping[str, Any]
    distribution: str


@dataclass
class Provider:
    """One implementation: how its output is computed, and what it must give.

    Attributes:
        name, world_size, baseline, options: of its rows.
        call: inputs by name to output.
        expected: output ``"o"`` and gradients by input name.
        limit: of the largest error over the largest value.
        transport: whose counters must show ``volume[mode]`` bytes.
        absent: why it cannot run here.
        failed: why there is nothing to check it against.
    """

    name: str
    call: Call | None
    expected: Tensors
    limit: float
    world_size: int = 1
    baseline: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    transport: BoundaryTransport | None = None
    volume: Mapping[str, int] = field(default_factory=dict)
    absent: str | None = None
    failed: str | None = None


class Stage:
    """Tensors of one run.

    Args:
        layer: the op.
        args: options of ``add_layer_arguments`` and the common ones.
        device: where everything is.
    """

    def __init__(self, layer: LayerOp, args: argparse.Namespace, device: torch.device) -> None:
        self.layer, self.args, self.device = layer, args, device
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.rank = args.world_size // 2
        self.plan = build_plan([0, args.tokens * args.world_size], world_size=args.world_size)
        generator = torch.Generator().manual_seed(args.seed)
        inputs = layer.inputs(self.plan.total_rows, generator)
        wide = self.dtype if self.dtype == torch.float64 else torch.float32
        self.inputs = {
            name: x.to(device, self.dtype if name in layer.narrow else wide)
            for name, x in inputs.items()
        }
        like = self.inputs[layer.output_like]
        self.grad = torch.randn(like.shape, generator=generator).to(device, like.dtype)

    def local(self, rank: int) -> Tensors:
        """Return a rank's inputs."""
        return {
            name: self.plan.shard(x, rank).contiguous() if name in self.layer.sharded else x
            for name, x in self.inputs.items()
        }

    def local_grad(self, rank: int) -> Tensor:
        """Return the gradient of a rank's output."""
        return self.plan.shard(self.grad, rank).contiguous()

    def single(self, tokens: int) -> CPContext:
        """Return a context of one rank that owns everything."""
        transport = LoopbackTransport(self.device, self.args.timeout_s)
        return CPContext(build_plan([0, tokens], world_size=1), transport)

    def own(self) -> list[Provider]:
        """Return the interior rank with its boundary, and the same op without CP on its tokens."""
        return [self._sharded(), self._unsharded()]

    def peers(self, unsharded: Provider) -> list[Provider]:
        """Return the baselines that were asked for, absent ones with the reason.

        Args:
            unsharded: from ``own``; peers must give what it must give.
        """
        found = []
        for name in dict.fromkeys(self.args.baseline or []):
            peer = replace(unsharded, name=name, call=None, options={})
            try:
                peer.call = load_baseline(self.layer.op, name, self.device, self.layer.options)
            except NotHereError as reason:
                peer.absent = str(reason)
            found.append(peer)
        return found

    def _sharded(self) -> Provider:
        provider = Provider(
            "cptransport-cp",
            None,
            {},
            SHARDED[self.dtype],
            world_size=self.args.world_size,
            options={"rank": self.rank, "peers": "recorded"},
        )
        try:
            provider.expected, recording = self._recorded()
        except Exception as error:
            provider.failed = f"the ranks together: {type(error).__name__}: {error}"
            return provider
        transport = RecordedTransport(recording, self.device)
        cp = CPContext(self.plan, transport)
        provider.call = lambda inputs: self.layer.call(inputs, cp, self.args.engine)
        provider.transport, provider.volume = transport, self._volume(recording)
        return provider

    def _unsharded(self) -> Provider:
        single = self.single(self.args.tokens)
        provider = Provider(
            "cptransport",
            lambda inputs: self.layer.call(inputs, single, self.args.engine),
            {},
            TOLERANCES[self.dtype],
            baseline=True,
            options={"cp": False},
        )
        try:
            provider.expected = self._reference()
        except Exception as error:
            provider.failed = f"the reference in fp64: {type(error).__name__}: {error}"
        return provider

    def _reference(self) -> Tensors:
        """Return what the op gives on the interior rank's tokens alone, in fp64."""
        inputs = {name: x.double() for name, x in self.local(self.rank).items()}
        grad = self.local_grad(self.rank).double()
        return self.layer.explicit(inputs, self.single(self.args.tokens), "torch", grad)

    def _recorded(self) -> tuple[Tensors, Recording]:
        """Run all ranks, check them against the unsharded op, and return the interior rank's part."""
        engine, explicit = self.args.engine, self.layer.explicit

        def step(transport: BoundaryTransport) -> Tensors:
            cp, rank = CPContext(self.plan, transport), transport.rank
            return explicit(self.local(rank), cp, engine, self.local_grad(rank))

        results, recordings = record(step, self.args.world_size, device=str(self.device))
        whole = explicit(self.inputs, self.single(self.plan.total_rows), engine, self.grad)
        limit = SHARDED[self.dtype]
        for name, expected in whole.items():
            if name == "o" or name in self.layer.sharded:
                for rank, result in enumerate(results):
                    part = self.plan.shard(expected, rank)
                    check(f"{name} of rank {rank}, sharded,", result[name], part, limit)
            else:
                total = sum_of([result[name] for result in results])
                check(f"{name}, summed over ranks,", total, expected, limit)
        return results[self.rank], recordings[self.rank]

    def _volume(self, recording: Recording) -> dict[str, int]:
        """Return the bytes that the plan says for the interior rank, by mode."""
        run = last_run()
        assert run is not None
        parts: dict[str, PartSpec] = {}
        for many in recording.generations.values():
            for slot, _ in many:
                parts.update({part.name: part for part in slot.parts})
        volume = self.plan.volume(Slot("bench", tuple(parts.values())), run.composition)
        forward = volume.forward[self.rank]
        return {"fwd": forward, "fwd_bwd": forward + volume.backward[self.rank]}


def check(what: str, actual: Tensor, expected: Tensor, limit: float) -> float:
    """Return the largest absolute error.

    Raises:
        AssertionError: the largest error over the largest value is above the limit.
    """
    error = relative_error(actual, expected)
    if not error <= limit:
        raise AssertionError(f"{what} is off by {error:.1e} relative, above {limit:.0e}")
    return float((actual.detach().double() - expected.double()).abs().max())


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in fp64."""
    return torch.stack([tensor.double() for tensor in tensors]).sum(0)
