# SPDX-License-Identifier: Apache-2.0
"""A Mamba2 mixer as Megatron runs it: balanced shards ``[s, b, h]``, norm and projections outside.

On a laptop, ranks are threads of this process::

    python examples/mamba_mixer_megatron.py --small --ranks 4 --use-mamba-state-passing-cp

Ranks as processes, with the backend that CULA_CP_COMM_BACKEND names::

    cptransport launch --nproc 4 examples/mamba_mixer_megatron.py --small

Without ``--small`` the mixer has the dimensions of Nemotron 3 Nano. Every run compares outputs and
gradients with the unsharded mixer.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cptransport import CPContext, create_transport, threads
from cptransport.integrations import megatron
from cptransport.ops import mamba_split_conv1d_scan_combined
from cptransport.transport import BoundaryTransport

#: Ranks that are threads share the generator that weights are drawn from.
_drawing = threading.Lock()

#: Largest error over largest reference value in fp32.
LIMIT = 2e-5


@dataclass(frozen=True)
class MixerConfig:
    """Sizes of the mixer; the defaults are Nemotron 3 Nano's."""

    hidden_size: int = 2688
    nheads: int = 64
    headdim: int = 64
    ngroups: int = 8
    dstate: int = 128
    d_conv: int = 4
    chunk_size: int = 128


SMALL = MixerConfig(hidden_size=48, nheads=8, headdim=8, ngroups=2, dstate=16, chunk_size=16)


class GroupRMSNorm(nn.Module):
    """Root-mean-square norm inside each group of channels. The gate is on its input already."""

    def __init__(self, channels: int, groups: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.groups, self.eps = groups, eps

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.unflatten(-1, (self.groups, -1)).float()
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
        return (grouped * scale).flatten(-2).to(x.dtype) * self.weight


class MambaMixer(nn.Module):
    """``in_proj``, the core of our op, norm, ``out_proj``."""

    def __init__(self, config: MixerConfig) -> None:
        super().__init__()
        self.config = config
        inner, grouped = config.nheads * config.headdim, config.ngroups * config.dstate
        channels = inner + 2 * grouped
        self.in_proj = nn.Linear(config.hidden_size, inner + channels + config.nheads, bias=False)
        self.conv1d_weight = nn.Parameter(torch.empty(channels, config.d_conv).uniform_(-0.5, 0.5))
        self.conv1d_bias = nn.Parameter(torch.zeros(channels))
        self.A_log = nn.Parameter(torch.empty(config.nheads).uniform_(1, 16).log())
        step = torch.empty(config.nheads).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(step.expm1().log())  # softplus of it is the step
        self.D = nn.Parameter(torch.ones(config.nheads))
        self.norm = GroupRMSNorm(inner, config.ngroups)
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cp_context: CPContext, load_balancing: str) -> Tensor:
        """Mix this rank's tokens, ``[s, b, hidden_size]``."""
        zxbcdt = self.in_proj(hidden).transpose(0, 1)
        y = mamba_split_conv1d_scan_combined(
            zxbcdt,
            self.conv1d_weight,
            self.conv1d_bias,
            self.dt_bias,
            -self.A_log.exp(),
            self.D,
            self.config.chunk_size,
            cp_context=cp_context,
            headdim=self.config.headdim,
            ngroups=self.config.ngroups,
            load_balancing=load_balancing,
        )
        assert isinstance(y, Tensor)
        return self.out_proj(self.norm(y)).transpose(0, 1)


@dataclass(frozen=True)
class Step:
    """One rank's part of a step: its outputs, the gradient of its inputs and of the weights."""

    output: Tensor
    d_hidden: Tensor
    d_weights: dict[str, Tensor]


class Task:
    """The same weights, inputs and loss on any number of ranks."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.config = SMALL if args.small else MixerConfig()
        self.load_balancing = megatron.load_balancing(args, layout="zigzag_per_sequence")
        self.documents = [0, args.sequence_length * 2 // 5, args.sequence_length]
        if args.batch > 1:
            self.documents = [0, args.sequence_length]
        self.batch = args.batch

    def run(self, transport: BoundaryTransport) -> Step:
        """Forward and backward of this rank."""
        generator = torch.Generator().manual_seed(1)
        length, size = self.documents[-1], self.config.hidden_size
        whole = torch.randn(length, self.batch, size, generator=generator)
        target = torch.randn(length, self.batch, size, generator=generator)
        plan = megatron.balanced_plan(self.documents, transport.world_size)
        with _drawing:
            torch.manual_seed(2)
            mixer = MambaMixer(self.config).to(transport.device)
        local, wanted = (
            plan.shard(x, transport.rank, dim=0).to(transport.device) for x in (whole, target)
        )
        hidden = local.clone().requires_grad_()
        context = CPContext(plan, transport)
        output = mixer(hidden, context, self.load_balancing)
        # A sum, not a mean: the sum over ranks of gradients is then that of the whole.
        (output * wanted).sum().backward()
        assert hidden.grad is not None
        grads = {name: w.grad for name, w in mixer.named_parameters() if w.grad is not None}
        return Step(output.detach(), hidden.grad, grads)

    def unsharded(self) -> Step:
        """The same on one rank."""
        return threads.run(self.run, 1)[0]

    def report(self, steps: dict[int, Step], weights: dict[str, Tensor], world_size: int) -> bool:
        """Print how ranks' steps compare with the unsharded one; whether all is within the limit."""
        right = self.unsharded()
        plan = megatron.balanced_plan(self.documents, world_size)
        errors = {}
        for rank, step in steps.items():
            errors[f"output, rank {rank}"] = _error(step.output, plan.shard(right.output, rank, 0))
            errors[f"d hidden, rank {rank}"] = _error(
                step.d_hidden, plan.shard(right.d_hidden, rank, 0)
            )
        for name, grad in weights.items():
            errors[f"d {name}, all ranks"] = _error(grad, right.d_weights[name])
        print(f"{world_size} ranks, load balancing {self.load_balancing}, {self.config}")
        for name, error in errors.items():
            print(f"  {name:32}{error:10.2e}{'' if error <= LIMIT else '  WRONG'}")
        return max(errors.values()) <= LIMIT


def _error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double().cpu()
    if not expected.numel():
        return 0.0
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def on_threads(task: Task, ranks: int) -> bool:
    """Ranks are threads of this process."""
    steps = dict(enumerate(threads.run(task.run, ranks)))
    names = steps[0].d_weights
    sums = {name: torch.stack([s.d_weights[name] for s in steps.values()]).sum(0) for name in names}
    return task.report(steps, sums, ranks)


def on_processes(task: Task) -> bool:
    """Ranks are processes; every one compares its own tokens."""
    dist.init_process_group()
    with create_transport() as transport:  # type: ignore[attr-defined]
        step = task.run(transport)
    for grad in step.d_weights.values():
        dist.all_reduce(grad)
    right = task.report({transport.rank: step}, step.d_weights, transport.world_size)
    dist.destroy_process_group()
    return right


def main(arguments: list[str] | None = None) -> int:
    """Run the example; 1 when something differs from the unsharded mixer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="sizes for a laptop")
    parser.add_argument("--ranks", type=int, default=2, help="threads, when no launcher started us")
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1, help="above 1: one document")
    megatron.add_arguments(parser)
    args = parser.parse_args(arguments)
    try:
        task = Task(args)
    except ValueError as error:
        parser.error(str(error))
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    return 0 if (on_processes(task) if launched else on_threads(task, args.ranks)) else 1


if __name__ == "__main__":
    sys.exit(main())
