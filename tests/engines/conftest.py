# SPDX-License-Identifier: Apache-2.0
"""Ranks without a transport: engines are driven through their protocol, the fold is spelled out.

What a real exchange would overwrite is overwritten with NaN as early as the protocol allows.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport.engines import (
    Engine,
    Finished,
    KDAInputs,
    KDAOptions,
    LocalSegment,
    Need,
    OpFacts,
    OutputGrads,
    SSDInputs,
    SSDOptions,
)
from cptransport.engines.naive import naive_kda, naive_ssd
from cptransport.engines.torch import KDA_ENGINE, SSD_ENGINE
from cptransport.plan import Plan, build_plan
from cptransport.testing import assert_close

TOKENS = {"kda": ("q", "k", "v", "g", "beta"), "ssd": ("x", "dt", "B", "C", "z")}


@dataclass
class Case:
    """One op call on the whole stream, and the gradients that enter its backward."""

    op: str
    inputs: dict[str, Tensor]
    options: dict[str, Any]
    plan: Plan
    grad_output: Tensor
    grad_final: Tensor
    initial: Tensor | None

    @property
    def shaped(self) -> Tensor:
        """The input that gives the output's shape."""
        return self.inputs["v" if self.op == "kda" else "x"]

    @property
    def state_dtype(self) -> torch.dtype:
        return torch.float64 if self.shaped.dtype == torch.float64 else torch.float32

    def to(self, dtype: torch.dtype, device: str = "cpu") -> Case:
        """Return the case with its stream in a dtype and its states in the state dtype of that."""
        state = torch.float64 if dtype == torch.float64 else torch.float32
        return replace(
            self,
            inputs={name: x.to(device, dtype) for name, x in self.inputs.items()},
            initial=None if self.initial is None else self.initial.to(device, state),
            grad_output=self.grad_output.to(device, dtype),
            grad_final=self.grad_final.to(device, state),
        )

    def with_plan(self, plan: Plan) -> Case:
        return replace(self, plan=plan)

    def op_options(self) -> KDAOptions | SSDOptions:
        if self.op == "ssd":
            return SSDOptions(**self.options)
        return KDAOptions(**{"scale": self.inputs["k"].shape[3] ** -0.5, **self.options})

    def facts(self) -> OpFacts:
        key = self.inputs["k" if self.op == "kda" else "B"]
        return OpFacts(
            op=self.op,
            device_type=self.shaped.device.type,
            world_size=self.plan.world_size,
            batch=self.shaped.shape[0],
            heads=key.shape[2],
            value_heads=self.shaped.shape[2],
            key_dim=key.shape[3],
            value_dim=self.shaped.shape[3],
            dtypes={name: x.dtype for name, x in self.inputs.items()},
            state_dtype=self.state_dtype,
            max_segments=self.plan.max_segments,
            max_tokens=self.plan.max_tokens,
            requires_grad=frozenset(self.inputs),
            options=self.op_options(),
        )

    def local_inputs(self, rank: int, seed: Tensor | None) -> KDAInputs | SSDInputs:
        local = {
            name: self.plan.shard(x, rank) if name in TOKENS[self.op] else x
            for name, x in self.inputs.items()
        }
        kind, optional = (
            (KDAInputs, ("A_log", "dt_bias"))
            if self.op == "kda"
            else (SSDInputs, ("D", "z", "dt_bias"))
        )
        return kind(**{**dict.fromkeys(optional), **local}, seed=seed, options=self.op_options())


@dataclass
class Results:
    """Output, final states, and gradients by input name (``initial`` among them)."""

    output: Tensor
    final: Tensor
    grads: dict[str, Tensor] = field(default_factory=dict)

    def items(self) -> dict[str, Tensor]:
        named = {f"d{name}": grad for name, grad in self.grads.items()}
        return {"output": self.output, "final": self.final, **named}


class Chain:
    """All ranks of one op call, one after another.

    Attributes:
        saved_tensors: per rank, how many tensors its forward saved.
        summaries: per direction and index of a segment in the plan, what the engine wrote.
    """

    def __init__(self, engine: Engine, case: Case) -> None:
        self.engine, self.case, self.plan = engine, case, case.plan
        self.batch = case.shaped.shape[0]
        self.parts = {part.name: part for part in engine.slot_parts(case.facts())}
        self.global_indices = [
            [i for i, s in enumerate(self.plan.segments) if s.rank == rank]
            for rank in range(self.plan.world_size)
        ]
        self.segments = [
            [self._local_segment(i) for i in indices] for indices in self.global_indices
        ]
        self.saved_tensors: list[int] = []
        self.summaries: dict[str, dict[int, dict[str, Tensor]]] = {}

    def run(self) -> Results:
        """Run forward and backward on all ranks."""
        case, plan = self.case, self.plan
        finished = self._forward()
        final = self._gather_states([f.outgoing for f in finished], "last")
        self.saved_tensors = [len(f.saved.tensors) for f in finished]
        grads = self._backward(finished)

        named: dict[str, Tensor] = {}
        for name, x in case.inputs.items():
            parts = [grad.inputs[name] for grad in grads]
            assert all(part.dtype == x.dtype for part in parts)
            named[name] = (
                plan.unshard(parts)
                if name in TOKENS[case.op]
                else sum(part.to(case.state_dtype) for part in parts)
            )
        assert all(
            grad is None for part in grads for n, grad in part.inputs.items() if n not in named
        )
        if case.initial is not None:
            named["initial"] = self._gather_states([grad.incoming for grad in grads], "first")
        return Results(plan.unshard([f.output for f in finished]), final, named)

    def _forward(self) -> list[Finished]:
        locals_ = []
        for rank, segments in enumerate(self.segments):
            inputs = self.case.local_inputs(rank, self._seed(rank, self.case.initial, "first"))
            needs = [Need(state=not s.last, transition=not (s.first or s.last)) for s in segments]
            out = self._stage()
            locals_.append(self.engine.forward_local(inputs, segments, needs, out))
            self._publish("forward", rank, out, needs)
        entering = self._fold("forward", self.case.initial)
        finished = []
        for rank, local in enumerate(locals_):
            table = self._table(rank, entering)
            finished.append(self.engine.forward_finish(local, once(table)))
            table.fill_(torch.nan)
        return finished

    def _backward(self, finished: Sequence[Finished]) -> list[Any]:
        locals_ = []
        for rank, segments in enumerate(self.segments):
            grad = OutputGrads(
                self.plan.shard(self.case.grad_output, rank),
                self._seed(rank, self.case.grad_final, "last"),
            )
            needs = [Need(state=not s.first, transition=not (s.first or s.last)) for s in segments]
            out = self._stage()
            locals_.append(self.engine.backward_local(finished[rank].saved, grad, needs, out))
            self._publish("backward", rank, out, needs)
        entering = self._fold("backward", self.case.grad_final)
        return [
            self.engine.backward_finish(local, once(self._table(rank, entering)))
            for rank, local in enumerate(locals_)
        ]

    def _local_segment(self, index: int) -> LocalSegment:
        s = self.plan.segments[index]
        chain = self.plan.chain(s.sequence)
        stop = s.local_start + s.length
        return LocalSegment(s.local_start, stop, s.sequence, index == chain[0], index == chain[-1])

    def _rows(self, index: int) -> slice:
        return slice(index * self.batch, (index + 1) * self.batch)

    def _stage(self) -> dict[str, Tensor]:
        device = self.case.shaped.device
        return {
            name: torch.full(part.shape, torch.nan, dtype=part.dtype, device=device)
            for name, part in self.parts.items()
        }

    def _publish(
        self, direction: str, rank: int, out: Mapping[str, Tensor], needs: Sequence[Need]
    ) -> None:
        """Copy what was asked for, check that nothing else was written, poison the rest."""
        taken = self.summaries.setdefault(direction, {})
        for local, (index, need) in enumerate(zip(self.global_indices[rank], needs, strict=True)):
            taken[index] = {}
            for name in ("state", "transition"):
                rows = out[name][self._rows(local)]
                if getattr(need, name):
                    taken[index][name] = rows.clone()
                else:
                    assert rows.isnan().all(), f"{name} was written unasked"
        for table in out.values():
            table.fill_(torch.nan)

    def _fold(self, direction: str, seeds: Tensor | None) -> dict[int, Tensor]:
        """Return the state that enters each segment in travel order, by index in the plan."""
        summaries, entering = self.summaries[direction], {}
        zero = self._stage()["state"][: self.batch].zero_()
        for sequence in range(self.plan.num_sequences):
            chain = list(self.plan.chain(sequence))
            if direction == "backward":
                chain.reverse()
            state = zero if seeds is None else seeds[self._rows(sequence)]
            for position, index in enumerate(chain):
                entering[index] = state
                if position == len(chain) - 1:
                    break
                state = summaries[index]["state"] + (
                    self._carry(summaries[index]["transition"], state, direction)
                    if position
                    else 0.0
                )
        return entering

    def _carry(self, transition: Tensor, state: Tensor, direction: str) -> Tensor:
        if self.case.op == "ssd":
            return transition.exp()[..., None, None] * state
        return (transition if direction == "forward" else transition.mT) @ state

    def _seed(self, rank: int, states: Tensor | None, where: str) -> Tensor | None:
        if states is None:
            return None
        rows = [states[:0]]
        for segment in self.segments[rank]:
            state = states[self._rows(segment.sequence)]
            rows.append(state if getattr(segment, where) else torch.zeros_like(state))
        return torch.cat(rows)

    def _table(self, rank: int, entering: Mapping[int, Tensor]) -> Tensor:
        empty = self._stage()["state"][:0]
        return torch.cat([empty, *(entering[index] for index in self.global_indices[rank])])

    def _gather_states(self, tables: Sequence[Tensor], where: str) -> Tensor:
        """Take one state per sequence from its first (last) segment."""
        states = torch.full_like(self.case.grad_final, torch.nan)
        for table, segments in zip(tables, self.segments, strict=True):
            for local, segment in enumerate(segments):
                if getattr(segment, where):
                    states[self._rows(segment.sequence)] = table[self._rows(local)]
        return states


def once(table: Tensor) -> Callable[[], Tensor]:
    """A state table that can be asked for once."""
    calls = iter([table])
    return lambda: next(calls)


def reference(case: Case) -> Results:
    """Run the token-by-token op in fp64 and differentiate it with autograd."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in case.inputs.items()}
    if case.initial is not None:
        leaves["initial"] = case.initial.detach().double().requires_grad_()
    arguments: dict[str, Any] = {**leaves, **case.options}
    arguments["cu_seqlens"] = case.plan.cu_seqlens
    arguments["padded_cu_seqlens"] = case.plan.padded_cu_seqlens
    initial = arguments.pop("initial", None)
    if case.op == "kda":
        output, final = naive_kda(**arguments, initial_state=initial)
    else:
        arguments.pop("chunk_size")
        limits = (arguments.pop("dt_min", 0.0), arguments.pop("dt_max", float("inf")))
        output, final = naive_ssd(**arguments, initial_states=initial, dt_limit=limits)
    grads = torch.autograd.grad(
        (output, final),
        tuple(leaves.values()),
        (case.grad_output.double(), case.grad_final.double()),
        materialize_grads=True,
    )
    return Results(output.detach(), final.detach(), dict(zip(leaves, grads, strict=True)))


def compare(actual: Results, expected: Results, dtype: torch.dtype, *zero: str) -> None:
    """Compare everything; what ``zero`` names must be exactly zero in both."""
    a, e = actual.items(), expected.items()
    assert a.keys() == e.keys()
    for name in e:
        if e[name].numel():
            assert_close(a[name], e[name], dtype=dtype, name=name, zero=name in zero)


def random_plan(rng: random.Random, *, sequences: int | None = None) -> Plan:
    """A plan with short and empty segments; one sequence has at least 33 tokens."""
    count = sequences or rng.randint(1, 4)
    lengths = [rng.choice((0, 1, 2, 17, rng.randint(3, 40))) for _ in range(count - 1)]
    lengths.insert(rng.randint(0, count - 1), rng.randint(33, 70))
    cu = [sum(lengths[:i]) for i in range(count + 1)]
    padded = None
    if rng.random() < 0.4:
        gaps = [rng.choice((0, 0, 1, 5)) for _ in range(count + 1)]
        padded = [start + sum(gaps[: i + 1]) for i, start in enumerate(cu)]
        padded[-1] += gaps[-1]
        padded[0] = 0
    total = (padded or cu)[-1]
    world_size = rng.randint(1, 5)
    layout = rng.choice(("contiguous", "contiguous", "custom", "zigzag", "zigzag_per_sequence"))
    boundaries: Any = None
    if layout == "contiguous":
        cuts = [rng.choice((rng.randint(0, total), rng.choice(cu))) for _ in range(world_size - 1)]
        boundaries = [0, *sorted(min(cut, total) for cut in cuts), total]
    elif layout == "custom":
        cuts = sorted({0, total, *(rng.randint(0, total) for _ in range(2 * world_size))})
        boundaries = [
            (rng.randrange(world_size), start, stop)
            for start, stop in zip(cuts, cuts[1:], strict=False)
        ]
    return build_plan(
        cu,
        world_size=world_size,
        layout=layout,
        boundaries=boundaries,
        padded_cu_seqlens=padded,
    )


def make_case(
    op: str,
    plan: Plan,
    *,
    seed: int = 0,
    batch: int = 1,
    heads: tuple[int, int] = (3, 3),
    dims: tuple[int, int] = (8, 12),
    initial: bool = True,
    optional: Sequence[str] = (),
    **options: Any,
) -> Case:
    """Random inputs in fp64 for a plan; padding rows hold NaN.

    Args:
        heads: H and HV, or ngroups and nheads.
        dims: K and V, or dstate and headdim.
        optional: optional inputs to give: A_log, dt_bias, or D (per head), D2 (per channel), z, dt_bias.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    (few, many), (keys, values) = heads, dims
    rows = (batch, plan.total_rows)
    if op == "kda":
        inputs = {
            "q": normal(*rows, few, keys),
            "k": torch.nn.functional.normalize(normal(*rows, few, keys), dim=-1),
            "v": normal(*rows, many, values),
            "g": normal(*rows, many, keys),
            "beta": normal(*rows, many),
        }
        if not options.get("use_gate_in_kernel"):
            inputs["g"] = -torch.nn.functional.softplus(inputs["g"] + 2 * normal(many, keys) - 2)
        if not options.get("use_beta_sigmoid_in_kernel"):
            inputs["beta"] = inputs["beta"].sigmoid()
        shapes = {"A_log": (many,), "dt_bias": (many, keys)}
        state = (many, keys, values)
    else:
        options.setdefault("chunk_size", 16)
        inputs = {
            "x": normal(*rows, many, values),
            "dt": normal(*rows, many),
            "A": -normal(many).exp(),
            "B": normal(*rows, few, keys),
            "C": normal(*rows, few, keys),
        }
        if not options.get("dt_softplus"):
            inputs["dt"] = inputs["dt"].abs()
        shapes = {
            "D": (many,),
            "D2": (many, values),
            "z": (*rows, many, values),
            "dt_bias": (many,),
        }
        state = (many, values, keys)
    inputs |= {name.rstrip("2"): normal(*shapes[name]) for name in optional}
    real = torch.zeros(plan.total_rows, dtype=torch.bool)
    starts = plan.sequence_starts
    for start, first, last in zip(starts, plan.cu_seqlens, plan.cu_seqlens[1:], strict=False):
        real[start : start + last - first] = True
    for name in TOKENS[op]:
        if name in inputs:
            inputs[name][:, ~real] = torch.nan
    grad_output = normal(*rows, many, values)
    grad_output[:, ~real] = torch.nan
    states = batch * plan.num_sequences
    return Case(
        op,
        inputs,
        options,
        plan,
        grad_output,
        normal(states, *state),
        normal(states, *state) if initial else None,
    )


def random_case(op: str, seed: int) -> Case:
    """A random plan, shapes and options."""
    rng = random.Random(f"{op} {seed}")
    batch = rng.choice((1, 1, 2))
    plan = random_plan(rng, sequences=1 if batch > 1 else None)
    heads = rng.choice(((3, 3), (2, 4), (2, 6), (1, 3)))
    common: dict[str, Any] = {
        "seed": seed,
        "batch": batch,
        "heads": heads,
        "initial": rng.random() < 0.7,
    }
    if op == "ssd":
        optional = [name for name in ("z", "dt_bias") if rng.random() < 0.5]
        optional += rng.choice(([], ["D"], ["D2"]))
        options: dict[str, Any] = {
            "chunk_size": rng.choice((16, 32, 64, 256)),
            "dt_softplus": rng.random() < 0.5,
        }
        if rng.random() < 0.5:
            options |= {"dt_min": 0.3, "dt_max": 1.2}
        return make_case(op, plan, dims=(5, 6), optional=optional, **common, **options)
    options = {
        "use_qk_l2norm_in_kernel": rng.random() < 0.5,
        "use_gate_in_kernel": rng.random() < 0.5,
        "use_beta_sigmoid_in_kernel": rng.random() < 0.5,
    }
    options["allow_neg_eigval"] = options["use_beta_sigmoid_in_kernel"] and rng.random() < 0.5
    optional = []
    if options["use_gate_in_kernel"]:
        optional = [name for name in ("A_log", "dt_bias") if rng.random() < 0.6]
        if rng.random() < 0.5:
            options |= {"lower_bound": -5.0, "safe_gate": True}
    if rng.random() < 0.5:
        options["scale"] = 0.7
    return make_case(op, plan, optional=optional, **common, **options)


class Within:
    """An engine whose calls, and nothing else, run inside a context."""

    def __init__(self, engine: Engine, context: Callable[[], AbstractContextManager[Any]]) -> None:
        self._engine, self._context = engine, context

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._engine, name)
        if not name.endswith(("_local", "_finish")):
            return attribute

        def call(*arguments: Any) -> Any:
            with self._context():
                return attribute(*arguments)

        return call


@dataclass(frozen=True)
class Lab:
    """What the tests of engines share (test modules cannot import each other)."""

    make_case = staticmethod(make_case)
    random_case = staticmethod(random_case)
    random_plan = staticmethod(random_plan)
    reference = staticmethod(reference)
    compare = staticmethod(compare)
    chain = Chain
    within = Within
    once = staticmethod(once)


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="session")
def engines() -> dict[str, Engine]:
    """The torch engine of each op."""
    return {"kda": KDA_ENGINE, "ssd": SSD_ENGINE}
