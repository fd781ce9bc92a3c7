# SPDX-License-Identifier: Apache-2.0
"""What a whole-op bench runs on: inputs, the recorded interior rank, and what each provider must give."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from cptransport import env
from cptransport.bench.baselines import Call, Place, load_peers
from cptransport.context import CPContext
from cptransport.cost import choose
from cptransport.ops import last_run
from cptransport.plan import build_plan
from cptransport.testing.numerics import (
    TOLERANCES,
    relative_error,
    relative_rms,
    rms_tolerance,
)
from cptransport.testing.recorded import RecordedTransport, Recording, record
from cptransport.transport import BoundaryTransport, PartSpec, Slot
from cptransport.transports.loopback import LoopbackTransport

__all__ = [
    "PEERS",
    "SHARDED",
    "LayerOp",
    "Provider",
    "Setup",
    "Stage",
    "Tensors",
    "asking",
    "check",
]

Tensors = dict[str, Tensor]


class Rms(float):
    """A limit of the root mean square of errors over that of the values."""


#: Sharded against our own unsharded op: largest error over largest value; for 16-bit types root mean
#: squares, since one unit in the last place of the largest value alone can be 2**-7 of it.
SHARDED = {
    torch.float64: 1e-9,
    torch.float32: 1e-5,
    torch.bfloat16: Rms(5e-3),
    torch.float16: Rms(5e-3),
}

#: Engines whose arithmetic is another library's.
FOREIGN = frozenset({"cudnn"})

#: A peer against ours, largest error over largest value. How it rounds is its own affair (tf32 in
#: fp32, 16-bit operands at other places than ours); that it computes the same thing shows far above.
PEERS = {torch.float64: 1e-9, torch.float32: 5e-3, torch.bfloat16: 6e-2, torch.float16: 2e-2}


@dataclass(frozen=True)
class Setup:
    """What all configurations of a run share; JSON values.

    Attributes:
        world_size: ranks. dtype: under test. seed: of the inputs. timeout_s: of waits.
    """

    world_size: int
    dtype: str
    seed: int
    timeout_s: float


@dataclass(frozen=True)
class LayerOp:
    """An op in one configuration, as these benches see it.

    Attributes:
        case, op: names in the rows.
        tokens: of each rank.
        inputs: makes the op's inputs for a number of tokens, by name, in fp64 on the generator's
            device.
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
    tokens: int
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
        name, world_size, baseline, options: of its rows; they tell it from all others of its
            configuration from the start, whatever fails later.
        call: inputs by name to output.
        within: makes the context in which it is called.
        expected: output ``"o"`` and gradients by input name.
        limit: of the largest error over the largest value.
        engine: that must run; None: any.
        transport: whose counters must show ``volume[mode]`` bytes.
        absent: why it cannot run here.
        failed: why there is nothing to check it against.
    """

    name: str
    call: Call | None
    expected: Tensors
    limit: float
    within: Callable[[], AbstractContextManager[object]] = nullcontext
    world_size: int = 1
    baseline: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    engine: str | None = None
    transport: BoundaryTransport | None = None
    volume: Mapping[str, int] = field(default_factory=dict)
    absent: str | None = None
    failed: str | None = None


class Stage:
    """Tensors of one configuration.

    Args:
        layer: the op.
        setup: of the run.
        device: where everything is.
    """

    def __init__(self, layer: LayerOp, setup: Setup, device: torch.device) -> None:
        self.layer, self.setup, self.device = layer, setup, device
        self.dtype: torch.dtype = getattr(torch, setup.dtype)
        self.rank = setup.world_size // 2
        whole = layer.tokens * setup.world_size
        self.plan = build_plan([0, whole], world_size=setup.world_size)
        generator = torch.Generator(device).manual_seed(setup.seed)
        wide = self.dtype if self.dtype == torch.float64 else torch.float32
        self.inputs = {
            name: x.to(self.dtype if name in layer.narrow else wide)
            for name, x in layer.inputs(whole, generator).items()
        }
        like = self.inputs[layer.output_like]
        grad = torch.randn(like.shape, generator=generator, device=device)
        self.grad = grad.to(like.dtype)
        self._alone: tuple[Tensors, str | None] | None = None

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
        transport = LoopbackTransport(self.device, self.setup.timeout_s)
        return CPContext(build_plan([0, tokens], world_size=1), transport)

    def composition(self) -> str | None:
        """Return how the ranks compose, None: as they choose.

        Recorded ranks have no costs of their own, and by those of a host CUDA tensors would compose
        otherwise than on any backend that carries them; NCCL's are taken.
        """
        if self.device.type != "cuda" or env.choice(env.COMPOSITION) != "auto":
            return None
        shape = self.layer.shape
        heads, keys, values = (shape[size] or 0 for size in ("HV", "K", "V"))
        transition = (1, heads, keys, keys) if self.layer.op == "kda" else (1, heads)
        parts = (
            PartSpec("state", (1, heads, keys, values), torch.float32),
            PartSpec("transition", transition, torch.float32),
        )
        return choose(self.plan, parts, "nccl", pairwise=True).composition

    def own(
        self,
        engine: str | None,
        overlaps: Sequence[bool],
        setting: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Provider]:
        """Return the interior rank with its boundary, and the same op without CP on its tokens.

        Args:
            engine: of both.
            overlaps: settings of ``CULA_CP_OVERLAP`` to run the first with.
            setting: further variables; then the first is all that is returned.
        """
        expected: Tensors = {}
        recording: Recording | None = None
        failed = None
        try:
            expected, recording, composition = self._recorded(engine, setting)
        except Exception as error:
            failed = f"the ranks together: {type(error).__name__}: {error}"
        made = []
        for overlap in overlaps:
            provider = Provider(
                "cptransport-cp",
                None,
                expected,
                SHARDED[self.dtype],
                world_size=self.setup.world_size,
                options={
                    "rank": self.rank,
                    "peers": "recorded",
                    "overlap": overlap,
                    "engine": engine or "auto",
                    **setting,
                },
                within=partial(
                    asking, overlap=overlap, composition=self.composition(), setting=setting
                ),
                engine=engine,
                failed=failed,
            )
            if recording is not None:
                transport = RecordedTransport(recording, self.device)
                provider.call = self._sharded_call(transport, engine)
                provider.transport = transport
                provider.volume = self._volume(recording, composition)
            made.append(provider)
        return made if setting else [*made, self._unsharded(engine)]

    def peers(self, name: str, sharded: Provider, limit_s: float) -> list[Provider]:
        """Return a baseline's providers, absent ones with the reason.

        Args:
            name: of the baseline.
            sharded: our interior rank; a peer with context parallelism must give what it must give.
            limit_s: for preparing the peer.
        """
        place = Place(
            self.layer.op,
            self.device,
            self.dtype,
            self.rank,
            self.setup.world_size,
            self.local,
            self.local_grad,
            self.layer.options,
            limit_s,
        )
        found = []
        for peer in load_peers(name, place):
            alone, failed = self._reference()
            provider = Provider(
                peer.name,
                peer.call,
                sharded.expected if peer.cp else alone,
                PEERS[self.dtype],
                world_size=self.setup.world_size if peer.cp else 1,
                baseline=True,
                absent=peer.absent,
                failed=sharded.failed if peer.cp else failed,
            )
            found.append(provider)
        return found

    def _sharded_call(self, transport: BoundaryTransport, engine: str | None) -> Call:
        cp = CPContext(self.plan, transport)
        return lambda inputs: self.layer.call(inputs, cp, engine)

    def _unsharded(self, engine: str | None) -> Provider:
        single = self.single(self.layer.tokens)
        expected, failed = self._reference()
        return Provider(
            "cptransport",
            lambda inputs: self.layer.call(inputs, single, engine),
            expected,
            TOLERANCES[self.dtype],
            baseline=True,
            options={"cp": False, "engine": engine or "auto"},
            engine=engine,
            failed=failed,
        )

    def _reference(self) -> tuple[Tensors, str | None]:
        """Return what the op gives on the interior rank's tokens alone, in fp64, or why there is nothing."""
        if self._alone is None:
            inputs = {name: x.double() for name, x in self.local(self.rank).items()}
            grad = self.local_grad(self.rank).double()
            single = self.single(self.layer.tokens)
            try:
                self._alone = self.layer.explicit(inputs, single, "torch", grad), None
            except Exception as error:
                self._alone = {}, f"the reference in fp64: {type(error).__name__}: {error}"
        return self._alone

    def _recorded(
        self, engine: str | None, setting: Mapping[str, str]
    ) -> tuple[Tensors, Recording, str]:
        """Run all ranks, check them against the unsharded op, and return the interior rank's part."""
        explicit = self.layer.explicit

        def step(transport: BoundaryTransport) -> tuple[Tensors, str]:
            cp, rank = CPContext(self.plan, transport), transport.rank
            result = explicit(self.local(rank), cp, engine, self.local_grad(rank))
            ran = last_run()
            assert ran is not None
            return result, ran.composition

        with asking(overlap=False, composition=self.composition(), setting=setting):
            both, recordings = record(step, self.setup.world_size, device=str(self.device))
        results, (composition, *_) = zip(*both, strict=True)
        whole = explicit(self.inputs, self.single(self.plan.total_rows), engine, self.grad)
        for name, expected in whole.items():
            limit = self._sharded_limit(engine, name)
            if name == "o" or name in self.layer.sharded:
                for rank, result in enumerate(results):
                    part = self.plan.shard(expected, rank)
                    check(f"{name} of rank {rank}, sharded,", result[name], part, limit)
            else:
                total = sum_of([result[name] for result in results])
                check(f"{name}, summed over ranks,", total, expected, limit)
        return results[self.rank], recordings[self.rank], composition

    def _sharded_limit(self, engine: str | None, name: str) -> float:
        """Return how far a sharded result may be from the unsharded one.

        Another library may round its states, so each of the two may be as far from fp64 as 16-bit
        results may.
        """
        if engine not in FOREIGN or self.dtype not in (torch.bfloat16, torch.float16):
            return SHARDED[self.dtype]
        return Rms(2**0.5 * rms_tolerance("output" if name == "o" else name))

    def _volume(self, recording: Recording, composition: str) -> dict[str, int]:
        """Return the bytes that the plan says for the interior rank, by mode."""
        parts: dict[str, PartSpec] = {}
        for many in recording.generations.values():
            for slot, _ in many:
                parts.update({part.name: part for part in slot.parts})
        volume = self.plan.volume(Slot("bench", tuple(parts.values())), composition)
        forward = volume.forward[self.rank]
        return {"fwd": forward, "fwd_bwd": forward + volume.backward[self.rank]}


@contextmanager
def asking(
    *,
    overlap: bool,
    composition: str | None = None,
    setting: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Set ``CULA_CP_OVERLAP``, ``CULA_CP_COMPOSITION`` if one is asked for, and further variables in the block."""
    wanted = {env.OVERLAP.name: str(int(overlap)), **setting}
    if composition is not None:
        wanted[env.COMPOSITION.name] = composition
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def check(what: str, actual: Tensor, expected: Tensor, limit: float) -> float:
    """Return the largest absolute error.

    Raises:
        AssertionError: the relative error, of the kind that the limit is of, is above it.
    """
    rms = isinstance(limit, Rms)
    error = (relative_rms if rms else relative_error)(actual, expected)
    if not error <= limit:
        kind = "relative rms" if rms else "relative"
        raise AssertionError(f"{what} is off by {error:.1e} {kind}, above {limit:.0e}")
    return float((actual.detach().double() - expected.double()).abs().max())


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of tensors in fp64."""
    return torch.stack([tensor.double() for tensor in tensors]).sum(0)
