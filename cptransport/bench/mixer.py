# SPDX-License-Identifier: Apache-2.0
"""The Mamba2 mixer core among real ranks: every load-balancing mode on one zigzag plan, in turn."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cptransport import env
from cptransport.bench.cases import Measured, Progress, one_by_one, positive
from cptransport.bench.launch import placement
from cptransport.bench.layer_options import shapes
from cptransport.bench.layer_stage import SHARDED, Tensors, asking, check
from cptransport.bench.memory import describe
from cptransport.bench.rank_runs import MODES, Candidate, Key, measure_backends, run_candidates
from cptransport.bench.rows import Outcome, Subject, row
from cptransport.bench.timing import Budget
from cptransport.context import CPContext
from cptransport.errors import BackendUnavailableError
from cptransport.ops import last_run, mamba_split_conv1d_scan_combined
from cptransport.plan import build_plan
from cptransport.testing.ranks import Ranks
from cptransport.transport import BoundaryTransport
from cptransport.transports.loopback import LoopbackTransport

__all__ = ["MixerShape", "add_mixer_arguments", "measure_mixer", "mixer_rank"]

_BASELINE = "all_to_all"
_DISTRIBUTION = (
    "zxbcdt and the gradient of y N(0, 1); convolution N(0, 1) / sqrt(W); A uniform in [-16, -1]; D "
    "N(0, 1); dt_bias for steps between 1e-3 and 1e-1"
)


@dataclass(frozen=True)
class MixerShape:
    """A configuration; JSON values.

    Attributes:
        tokens: of each rank and batch row. batch: B. width: of the convolution.
        heads, groups, headdim, dstate, chunk_size: of the core.
        dtype: of the stream. seed: of the inputs.
    """

    tokens: int
    batch: int
    heads: int
    groups: int
    headdim: int
    dstate: int
    width: int
    chunk_size: int
    dtype: str
    seed: int

    @property
    def inner(self) -> int:
        """Channels of x."""
        return self.heads * self.headdim

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return self.inner + 2 * self.groups * self.dstate

    def inputs(self, tokens: int, device: torch.device) -> tuple[Tensors, Tensor]:
        """Return the op's inputs for so many tokens, and the gradient of y."""
        generator = torch.Generator(device).manual_seed(self.seed)
        made: dict[str, Any] = {"generator": generator, "device": device}

        def normal(*sizes: int) -> Tensor:
            return torch.randn(*sizes, **made)

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(self.heads, **made)

        stream = getattr(torch, self.dtype)
        columns = self.inner + self.channels + self.heads
        inputs = {
            "zxbcdt": normal(self.batch, tokens, columns).to(stream),
            "conv1d_weight": (normal(self.channels, self.width) / self.width**0.5).to(stream),
            "conv1d_bias": normal(self.channels).to(stream),
            "dt_bias": uniform(-6.9, -2.3).exp().expm1().log(),
            "A": -uniform(1, 16),
            "D": normal(self.heads),
        }
        return inputs, normal(self.batch, tokens, self.inner).to(stream)


def add_mixer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what concerns the mixer core only."""
    parser.add_argument(
        "--load-balancing",
        action="append",
        choices=env.MAMBA_LOAD_BALANCING.values,
        help="mode of the mixer core among real ranks; several times: those (default: all)",
    )
    parser.add_argument("--batch", type=positive, default=1, help="of the mixer core (default 1)")
    parser.add_argument(
        "--d-conv", type=positive, default=4, help="width of its convolution (default 4)"
    )


def measure_mixer(args: argparse.Namespace, progress: Progress) -> Measured:
    """Measure all modes in every configuration on all ranks of every backend."""
    args.backend = args.backend or ["nccl" if args.device == "cuda" else "gloo"]
    if "threads" in args.backend:
        raise ValueError(
            "threads share one autograd and one environment; name a backend of processes"
        )
    where = placement(args, 4)
    if where.world_size < 2:
        raise ValueError("load balancing needs at least 2 ranks")
    modes = list(dict.fromkeys(args.load_balancing or env.MAMBA_LOAD_BALANCING.values))
    if _BASELINE in (args.baseline or []) and _BASELINE not in modes:
        modes.append(_BASELINE)
    sizes = (args.groups, args.headdim, args.dstate, args.d_conv, args.chunk_size)
    made = [
        MixerShape(tokens, args.batch, heads, *sizes, args.dtype, args.seed)
        for tokens, heads in shapes(args)
    ]

    def one(shape: MixerShape, step: Progress) -> list[dict[str, Any]]:
        found = measure_backends(
            mixer_rank,
            args,
            where,
            step,
            shape=asdict(shape),
            modes=modes,
            engines=list(dict.fromkeys(args.engine or [None])),
            overlaps=[False, True] if args.overlap else [False],
            waits_s=args.timeout_s,
            warmup=args.warmup,
            iterations=args.iterations,
            repeats=args.repeats,
            cold=args.l2 == "cold",
        )
        return [
            _row(shape, where.world_size, backend, key, outcomes)
            for backend, of_backend in found.items()
            for key, outcomes in of_backend.items()
        ]

    rows, interrupted = one_by_one("mixer", made, one, progress)
    return Measured(
        rows,
        world_size=where.world_size,
        gpus_used=where.gpus_used,
        interleaving="modes and timers of a backend by iteration, on the host's clock each after an untimed "
        "call of its own; backends one after the other" + interrupted,
        input_distribution=_DISTRIBUTION,
        verification="every rank's y and gradient of zxbcdt against the own unsharded core: largest error "
        "over largest value; captured calls by their replay",
        peak_memory=describe(torch.device(args.device)),
    )


def _row(
    shape: MixerShape, world_size: int, backend: str, key: Key, outcomes: Sequence[Outcome]
) -> dict[str, Any]:
    tokens = {"T_global": shape.tokens * world_size, "T_local": shape.tokens, "N": 1}
    subject = Subject(
        case="mamba2",
        op="mixer",
        mode=key.mode,
        provider=key.provider,
        timer=key.timer,
        world_size=world_size,
        dtype=shape.dtype,
        shape={
            **tokens,
            "B": shape.batch,
            "H": shape.groups,
            "HV": shape.heads,
            "K": shape.dstate,
            "V": shape.headdim,
            "chunk_size": shape.chunk_size,
        },
        baseline=key.baseline,
        options={"backend": backend, "d_conv": shape.width, **dict(key.options)},
    )
    whole = shape.tokens * world_size * shape.batch
    return row(subject, outcomes, tokens=whole, moves=False)


def mixer_rank(
    ranks: Ranks,
    shape: Mapping[str, Any],
    modes: Sequence[str],
    engines: Sequence[str | None],
    overlaps: Sequence[bool],
    waits_s: float,
    warmup: int,
    iterations: int,
    repeats: int,
    cold: bool,
) -> list[tuple[Key, Outcome]]:
    """Measure on this rank; a case of ``on_ranks``."""
    try:
        transport = ranks.create()
    except BackendUnavailableError as error:
        skipped = Outcome(skipped=str(error))
        return [(Key(mode, part, "perf_counter"), skipped) for mode in modes for part in MODES]
    core = _Core(MixerShape(**shape), transport, waits_s)
    candidates = [
        core.candidate(mode, engine, overlap)
        for engine in engines
        for mode in modes
        for overlap in overlaps
    ]
    return run_candidates(candidates, transport, Budget(warmup, iterations, cold, repeats))


class _Core:
    """The mixer core of one rank, and what it must give."""

    def __init__(self, shape: MixerShape, transport: BoundaryTransport, waits_s: float) -> None:
        self.shape, self.transport, self.waits_s = shape, transport, waits_s
        whole = shape.tokens * transport.world_size
        self.inputs, self.grad = shape.inputs(whole, transport.device)
        self._wholes: dict[str | None, tuple[Tensor, Tensor]] = {}

    def candidate(self, mode: str, engine: str | None, overlap: bool) -> Candidate:
        """Return a mode; attention's layout is zigzag, only ``none`` needs a contiguous one."""
        layout = "contiguous" if mode == "none" else "zigzag"
        rank, size = self.transport.rank, self.transport.world_size
        plan = build_plan([0, self.shape.tokens * size], world_size=size, layout=layout)
        cp = CPContext(plan, self.transport)
        y, dzxbcdt = (plan.shard(x, rank) for x in self._whole(engine))
        local = {**self.inputs, "zxbcdt": plan.shard(self.inputs["zxbcdt"], rank)}
        leaves = {name: x.detach().clone().requires_grad_() for name, x in local.items()}
        grad = plan.shard(self.grad, rank).contiguous()
        heads = self.shape.heads
        options: dict[str, Any] = {"overlap": overlap, "layout": layout}
        if mode == "all_to_all" and heads % size:
            skipped = f"{heads} heads do not divide by {size} ranks"
            options["engine"] = engine or "auto"
            return Candidate(mode, lambda _: [], lambda _: 0.0, True, options, skipped=skipped)

        within = partial(asking, overlap=overlap)

        def call() -> Tensor:
            return self._call(leaves, cp, engine, mode)

        def run(part: str) -> list[Tensor]:
            output = call()
            if part == "fwd":
                return [output.detach()]
            return [output.detach(), *torch.autograd.grad(output, list(leaves.values()), grad)]

        def judge(results: Sequence[Tensor]) -> float:
            limit = SHARDED[getattr(torch, self.shape.dtype)]
            worst = check(f"y of {mode}", results[0], y, limit)
            if len(results) > 1:
                worst = max(worst, check(f"dzxbcdt of {mode}", results[1], dzxbcdt, limit))
            return worst

        with within():
            call()  # compiles, and tells what runs
        ran = last_run()
        assert ran is not None
        options["engine"] = engine or ran.engine
        skipped_engine = None
        if engine not in (None, ran.engine):
            skipped_engine = f"engine {engine} cannot serve"
        return Candidate(
            mode,
            run,
            judge,
            baseline=mode == _BASELINE,
            options=options,
            # Converted activations travel over the group, whose collectives are not ours to capture.
            capture=mode in ("none", "virtual"),
            skipped=skipped_engine,
            received=self._received,
            within=within,
        )

    def _received(self) -> int:
        """Bytes that came to this rank: summaries, and activations where a mode moves them."""
        activations: int = getattr(self.transport, "activation_bytes_received", 0)
        return self.transport.stats().bytes_received + activations

    def _whole(self, engine: str | None) -> tuple[Tensor, Tensor]:
        """Return y and the gradient of zxbcdt of the unsharded core."""
        if engine not in self._wholes:
            alone = LoopbackTransport(self.transport.device, self.waits_s)
            tokens = self.inputs["zxbcdt"].shape[1]
            cp = CPContext(build_plan([0, tokens], world_size=1), alone)
            leaves = {
                name: x.detach().clone().requires_grad_(name == "zxbcdt")
                for name, x in self.inputs.items()
            }
            y = self._call(leaves, cp, engine, "virtual")
            (grad,) = torch.autograd.grad(y, [leaves["zxbcdt"]], self.grad)
            self._wholes[engine] = y.detach(), grad
        return self._wholes[engine]

    def _call(self, x: Mapping[str, Any], cp: CPContext, engine: str | None, mode: str) -> Tensor:
        y = mamba_split_conv1d_scan_combined(
            **x,
            chunk_size=self.shape.chunk_size,
            cp_context=cp,
            headdim=self.shape.headdim,
            ngroups=self.shape.groups,
            load_balancing=mode,
            engine=engine,
        )
        assert isinstance(y, Tensor)
        return y
