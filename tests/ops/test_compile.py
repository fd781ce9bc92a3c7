# SPDX-License-Identifier: Apache-2.0
"""Ops inside ``torch.compile``: whole graphs, the same values and gradients, nothing kept too long."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import cptransport
from cptransport.ops import (
    causal_conv1d,
    chunk_kda,
    last_run,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
    traced,
)
from cptransport.testing.recorded import RecordedTransport, record
from cptransport.transport import BoundaryTransport

OFFSETS = [0, 5, 5, 12]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()
    assert not traced._kept


class Layer(torch.nn.Module):
    """A projection, a convolution, one of the mixers, and its final states."""

    def __init__(self, mixer: str, context: cptransport.CPContext, final: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.context, self.final = context, final
        self.mix: Callable[[Tensor], Any] = getattr(self, mixer)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, generator=generator))

        self.project = parameter(6, 24)
        self.taps = parameter(24, 3)
        states = context.plan.num_sequences
        self.initial = parameter(states, 2, 3, 3)
        self.A = parameter(2)

    def kda(self, x: Tensor) -> Any:
        q, k, v, g = (part.unflatten(-1, (2, 3)) for part in x.chunk(4, -1))
        return chunk_kda(
            q, k, v, g, g.sum(-1), cp_context=self.context, use_gate_in_kernel=True, A_log=self.A,
            use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            initial_state=self.initial, output_final_state=self.final, engine="torch",
        )  # fmt: skip

    def ssd(self, x: Tensor) -> Any:
        y, b, c, dt = (part.unflatten(-1, (2, 3)) for part in x.chunk(4, -1))
        return mamba_chunk_scan_combined(
            y, dt.sum(-1), -self.A.exp(), b, c, 16, cp_context=self.context, dt_softplus=True,
            initial_states=self.initial, return_final_states=self.final, dt_limit=(0.0, 2.0),
        )  # fmt: skip

    def mamba(self, x: Tensor) -> Any:
        channels = torch.cat([x[..., :12], x[..., 12:14], x], -1)
        return mamba_split_conv1d_scan_combined(
            channels[..., :20], self.taps[:12], None, self.A, -self.A.exp(), self.A, 16,
            cp_context=self.context, headdim=3, ngroups=1, load_balancing="virtual",
            initial_states=self.initial, return_final_states=self.final,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        x, _ = causal_conv1d(
            x @ self.project, self.taps, cp_context=self.context, activation="silu"
        )
        found = self.mix(x)
        o, final = found if isinstance(found, tuple) else (found, None)
        loss = o.sin().square().sum()
        return loss if final is None else loss + final.cos().sum()


def gradients(run: Callable[[Tensor], Tensor], layer: Layer, tokens: int) -> list[Tensor | None]:
    x = torch.randn(1, tokens, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()
    layer.zero_grad()
    loss = run(x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in layer.parameters())]


def check(layer: Layer, tokens: int, backend: str) -> None:
    expected = gradients(layer, layer, tokens)
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    for _ in range(2):
        for got, want in zip(gradients(compiled, layer, tokens), expected, strict=True):
            assert got is not None
            assert want is not None
            assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("final", [False, True])
@pytest.mark.parametrize("mixer", ["kda", "ssd", "mamba"])
def test_a_layer_is_one_graph_with_the_same_gradients(
    mixer: str, final: bool, backend: str
) -> None:
    with cptransport.create_transport(backend="loopback") as transport:
        plan = cptransport.build_plan(OFFSETS, world_size=1)
        check(Layer(mixer, cptransport.CPContext(plan, transport), final), 12, backend)
        assert last_run() is not None


def test_a_rank_inside_a_chain() -> None:
    """What the op exchanges is not part of the graph."""
    plan = cptransport.build_plan([0, 16], world_size=4)

    def step(transport: BoundaryTransport) -> None:
        layer = Layer("kda", cptransport.CPContext(plan, transport), True)
        gradients(layer, layer, 4)

    transport = RecordedTransport(record(step, 4)[1][2])
    check(Layer("kda", cptransport.CPContext(plan, transport), True), 4, "aot_eager")
    assert transport.stats().bytes_received > 0


def test_what_a_backward_needs_is_kept_until_it_has_run() -> None:
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan(OFFSETS, world_size=1), transport)
    layer = Layer("kda", context, False)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    x = torch.randn(1, 12, 6)
    first, second = compiled(x), compiled(x)
    gc.collect()
    assert len(traced._kept) == 4
    second.backward()
    del second
    gc.collect()
    assert len(traced._kept) == 2
    first.backward(retain_graph=True)
    first.backward()
    with torch.no_grad():
        assert torch.equal(compiled(x), first)
    del first


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_an_output_may_go_before_the_backward(backend: str) -> None:
    """Nothing keeps its memory for a backward that does not read it, which comes all the same."""
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan(OFFSETS, world_size=1), transport)
    x, taps = torch.randn(1, 12, 4), torch.randn(4, 3).requires_grad_()

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y, _ = causal_conv1d(x, taps, cp_context=context)
        return y, y.sum()

    expected = torch.autograd.grad(run(x)[1], taps)[0]
    y, loss = torch.compile(run, backend=backend, fullgraph=True)(x)
    freed = weakref.ref(y.untyped_storage())
    del y
    gc.collect()
    assert freed() is None
    (kept,) = traced._kept.values()
    # Before torch 2.13 a Python function's node does not own its graph.
    assert not any(
        isinstance(e.node, torch.autograd.function.BackwardCFunction) for e in kept.edges
    )
    del kept
    assert torch.equal(torch.autograd.grad(loss, taps)[0], expected)


def test_errors_are_those_of_the_op() -> None:
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan(OFFSETS, world_size=1), transport)
    compiled = torch.compile(Layer("kda", context, False), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="its plan says 12"):
        compiled(torch.randn(1, 11, 6))


def test_a_context_that_is_gone_is_missed() -> None:
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan([0, 2], world_size=1), transport)
    key = context.key
    assert cptransport.context.context_of(key) is context
    del context
    gc.collect()
    with pytest.raises(cptransport.OpInputError, match="is gone"):
        cptransport.context.context_of(key)


def test_the_operator_describes_itself_rightly() -> None:
    """Its schema, and what it says of its results, against what it does."""
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan(OFFSETS, world_size=1), transport)
    x, weight = torch.randn(1, 12, 4), torch.randn(4, 3)
    settings = '{"activation": null, "output_final_state": true, "engine": null}'
    text = f'["causal_conv1d", "{context.key}", ["x", "weight"], ["bias"], [], {settings}]'
    torch.library.opcheck(
        torch.ops.cptransport.op, ([x, weight], text), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("dynamic", [None, True])
def test_options_may_come_from_outside_and_change(dynamic: bool | None) -> None:
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan(OFFSETS, world_size=1), transport)
    generator = torch.Generator().manual_seed(2)
    q, k, v, g = (torch.randn(1, 12, 2, 3, generator=generator) for _ in range(4))

    def run(scale: float, low: float, chunk_size: int) -> Tensor:
        o, _ = chunk_kda(q, k, v, -g.abs(), g.sum(-1), cp_context=context, scale=scale)
        y = mamba_chunk_scan_combined(
            q, k.sum(-1).abs(), -g[0, 0, :, 0].abs(), k, v, chunk_size, cp_context=context,
            dt_limit=(low, float("inf")),
        )  # fmt: skip
        return o + y

    compiled = torch.compile(run, backend="eager", fullgraph=True, dynamic=dynamic)
    for given in ((0.5, 0.1, 16), (0.25, 0.2, 32), (0.75, 0.0, 16)):
        assert torch.equal(compiled(*given), run(*given))


def test_a_compilation_on_another_thread_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """``is_compiling`` is true for the whole process then; an eager call must not enter the graph's way."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan(OFFSETS, world_size=1), transport)
    monkeypatch.setattr(traced, "_ops", {})
    for mixer in ("kda", "ssd", "mamba"):
        layer = Layer(mixer, context, True)
        assert all(each is not None for each in gradients(layer, layer, 12))


@pytest.mark.parametrize("fn", [torch.clone, lambda x: x.detach().numpy().copy()])
def test_hooks_that_copy_the_ticket_are_told(fn: Callable[[Tensor], Any]) -> None:
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan(OFFSETS, world_size=1), transport)
    layer = Layer("kda", context, False)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(fn, torch.as_tensor):
        loss = compiled(torch.randn(1, 12, 6))
    with pytest.raises(cptransport.OpInputError, match="hooks on saved tensors that copy"):
        loss.backward()
