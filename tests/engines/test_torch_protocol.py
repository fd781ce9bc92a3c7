# SPDX-License-Identifier: Apache-2.0
"""What the torch engine promises beside its numbers."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from cptransport.engines import Engine, Need, OutputGrads
from cptransport.plan import build_plan
from cptransport.precision import ieee_math

OPS = pytest.mark.parametrize("op", ["kda", "ssd"])


@OPS
def test_it_is_an_engine(engines, op):
    assert isinstance(engines[op], Engine)
    assert (engines[op].op, engines[op].name) == (op, "torch")


@OPS
def test_eligible_by_op_and_dtypes(lab, engines, op):
    facts = lab.make_case(op, build_plan([0, 9], world_size=2)).facts()
    assert engines[op].eligible(facts) is None
    half = replace(facts, dtypes=dict.fromkeys(facts.dtypes, torch.bfloat16))
    assert engines[op].eligible(half) is None
    strange = {**facts.dtypes, "dt": torch.float8_e4m3fn}
    assert "dt is torch.float8_e4m3fn" in engines[op].eligible(replace(facts, dtypes=strange))
    assert "'mlp'" in engines[op].eligible(replace(facts, op="mlp"))


def test_slot_parts_have_a_row_per_segment_and_batch_row(lab, engines):
    plan = build_plan([0, 40], world_size=2, layout="zigzag")
    assert plan.max_segments == 2
    case = lab.make_case("kda", plan, batch=3, heads=(2, 4), dims=(8, 12)).to(torch.bfloat16)
    state, transition = engines["kda"].slot_parts(case.facts())
    assert (state.name, state.shape, state.dtype) == ("state", (6, 4, 8, 12), torch.float32)
    assert (transition.name, transition.shape) == ("transition", (6, 4, 8, 8))
    case = lab.make_case("ssd", plan, heads=(2, 4), dims=(5, 6))
    state, transition = engines["ssd"].slot_parts(case.facts())
    assert (state.shape, state.dtype) == ((2, 4, 6, 5), torch.float64)
    assert transition.shape == (2, 4)


@OPS
def test_every_rank_saves_equally_many_tensors(lab, engines, op):
    """Also a rank without tokens, without segments, with kept transitions."""
    plan = build_plan([0, 30, 40], world_size=5, boundaries=[0, 0, 8, 20, 40, 40])
    chain = lab.chain(engines[op], lab.make_case(op, plan))
    chain.run()
    assert len(set(chain.saved_tensors)) == 1
    assert len(chain.saved_tensors) == 5


@OPS
def test_incoming_states_are_asked_for_once_even_without_segments(lab, engines, op):
    case = lab.make_case(op, build_plan([0, 4], world_size=2, boundaries=[0, 4, 4]))
    asked = []

    def incoming():
        asked.append("forward" if len(asked) == 0 else "backward")
        return case.grad_final[:0]

    engine = engines[op]
    local = engine.forward_local(case.local_inputs(1, None), [], [], {})
    saved = engine.forward_finish(local, incoming).saved
    grads = OutputGrads(case.grad_output[:, :0], None)
    engine.backward_finish(engine.backward_local(saved, grads, [], {}), incoming)
    assert asked == ["forward", "backward"]


@OPS
def test_a_sequence_of_one_rank_is_computed_beside_the_exchange(lab, engines, op):
    """Nobody waits for its summary: it is done when the incoming states are asked for."""
    case = lab.make_case(op, build_plan([0, 20], world_size=1))
    engine, chain = engines[op], lab.chain(engines[op], case)
    nothing = [Need(state=False, transition=False)]
    local = engine.forward_local(case.local_inputs(0, case.initial), chain.segments[0], nothing, {})
    assert not local.output.count_nonzero()

    def incoming():
        assert local.output.count_nonzero()
        return case.initial

    assert engine.forward_finish(local, incoming).output is local.output


@contextmanager
def reduced_precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", torch.bfloat16):
            yield
            assert torch.is_autocast_enabled("cpu")
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


@OPS
def test_autocast_and_reduced_precision_stay_outside(lab, engines, op):
    case = lab.make_case(op, build_plan([0, 70], world_size=3)).to(torch.float32)
    plain = lab.chain(engines[op], case).run()
    result = lab.chain(lab.within(engines[op], reduced_precision), case).run()
    for name, value in plain.items().items():
        assert torch.equal(result.items()[name], value), name


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
def test_ieee_math_overlaps_between_threads():
    """The last thread that leaves restores the process's setting."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    inside, leave = threading.Event(), threading.Event()

    def hold():
        with ieee_math("cpu"):
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    try:
        with ieee_math("cpu"):
            thread.start()
            assert inside.wait(10)
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
        leave.set()
        thread.join()
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        leave.set()
        thread.join()
        torch.set_float32_matmul_precision(before)


@OPS
def test_the_caller_needs_no_particular_grad_mode(lab, engines, op):
    case = lab.random_case(op, 5)
    plain = lab.chain(engines[op], case).run()
    for x in case.inputs.values():
        x.requires_grad_()
    with torch.no_grad():
        other = lab.chain(engines[op], case).run()
    with torch.enable_grad():
        another = lab.chain(engines[op], case).run()
    for name, value in plain.items().items():
        for result in (other, another):
            assert not result.items()[name].requires_grad
            assert torch.equal(result.items()[name].nan_to_num(), value.nan_to_num()), name


@OPS
def test_one_process_may_mix_dtypes(lab, engines, op):
    """reports.md 36."""
    case = lab.random_case(op, 7)
    first = lab.chain(engines[op], case.to(torch.float32)).run().output
    lab.chain(engines[op], case.to(torch.bfloat16)).run()
    assert torch.equal(lab.chain(engines[op], case.to(torch.float32)).run().output, first)
