# SPDX-License-Identifier: Apache-2.0
"""Double backward is an error for every input, whatever the op keeps and the loss is."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import cptransport
from cptransport import OpInputError, threads
from cptransport.ops import chunk_kda
from cptransport.testing.op_cases import INITIAL, OPS, OPTIONAL, OpCase, OpSpec
from cptransport.testing.op_rank import RankCall

Transport = threads.ThreadTransport
Hooks = Callable[[], AbstractContextManager[object]]

OPTIONS = {
    "kda": {"use_gate_in_kernel": True},
    "ssd": {"chunk_size": 16},
    "conv1d": {},
    "mixer": {"chunk_size": 16},
}


def case_of(op: str, world_size: int, **more: object) -> OpCase:
    """Every input that the op has, the optional ones too."""
    spec = OpSpec(op, (0, 6, 23), world_size, layout="contiguous", options=OPTIONS[op])
    return OpCase.of(spec.with_(optional=OPTIONAL[op], **more))


def offloaded() -> AbstractContextManager[object]:
    return saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda y, final: y.sum() + final.sum(),
    "linear in one output": lambda y, final: y.sum(),
    "linear in final states": lambda y, final: final.sum(),
    "nonlinear": lambda y, final: y.square().sum() + final.square().sum(),
}


@pytest.mark.parametrize("hooks", [nullcontext, offloaded])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("op", OPS)
def test_every_gradient_refuses_every_input(
    op: str, world_size: int, loss: str, hooks: Hooks
) -> None:
    case = case_of(op, world_size, strided=True)

    def body(transport: Transport) -> None:
        call = RankCall(transport, case)
        leaves = call.leaves
        assert {*OPTIONAL[op], INITIAL[op]} <= {*leaves}
        with hooks():
            call.forward()
        total = LOSSES[loss](call.output, call.final)
        grads = torch.autograd.grad(total, [*leaves.values()], create_graph=True)
        for grad in grads:
            for leaf in leaves.values():
                with pytest.raises(OpInputError, match="double backward"):
                    torch.autograd.grad(grad.sum(), leaf, retain_graph=True)

    threads.run(body, world_size, 20.0)


@pytest.mark.parametrize("op", OPS)
def test_an_input_that_alone_requires_a_gradient_is_refused(op: str) -> None:
    """Where no other input could bring the error."""
    case = case_of(op, 2)

    def body(transport: Transport) -> list[str]:
        names = [*RankCall(transport, case).leaves]
        for name in names:
            call = RankCall(transport, case)
            for other in names:
                call.leaves[other].requires_grad_(other == name)
            call.forward()
            asked = call.leaves[name]
            total = call.output.sum() + call.final.sum()
            (grad,) = torch.autograd.grad(total, asked, create_graph=True)
            with pytest.raises(OpInputError, match="double backward"):
                (total + grad.square().sum()).backward()
        return names

    for names in threads.run(body, 2, 60.0):
        assert {*OPTIONAL[op], INITIAL[op]} <= {*names}


@pytest.mark.parametrize("op", OPS)
def test_a_forward_without_a_backward_is_freed_at_once(op: str) -> None:
    """What leads a second backward to the inputs must not lead the op to itself."""
    case = case_of(op, 1)

    def body(transport: Transport) -> bool:
        call = RankCall(transport, case).forward()
        node = call.output.grad_fn
        assert node is not None
        node.metadata["mark"] = mark = torch.nn.Identity()
        gone = weakref.ref(mark)
        del mark, node
        call.output = call.final = torch.empty(0)
        return gone() is None

    gc.disable()
    try:
        assert threads.run(body, 1, 20.0) == [True]
    finally:
        gc.enable()


def test_a_compiled_op_refuses_too() -> None:
    """Where the compiler leaves the graph to autograd."""
    transport = cptransport.create_transport(backend="loopback")
    context = cptransport.CPContext(cptransport.build_plan([0, 5, 12], world_size=1), transport)

    def layer(q: Tensor, beta: Tensor, state: Tensor) -> Tensor:
        return chunk_kda(q, q, q, -q.exp(), beta, cp_context=context, initial_state=state)[0]

    shapes = ((1, 12, 2, 4), (1, 12, 2), (2, 2, 4, 4))
    leaves = [torch.rand(shape, requires_grad=True) for shape in shapes]
    o = torch.compile(layer, backend="eager", fullgraph=True)(*leaves)
    for grad in torch.autograd.grad(o.sum(), leaves, create_graph=True):
        for leaf in leaves:
            with pytest.raises(OpInputError, match="double backward"):
                torch.autograd.grad(grad.sum(), leaf, retain_graph=True)
