# SPDX-License-Identifier: Apache-2.0
"""The torch engine over chains of ranks equals the token-by-token recurrence, gradients included."""

from __future__ import annotations

import pytest
import torch

from cptransport.plan import build_plan

OPS = pytest.mark.parametrize("op", ["kda", "ssd"])


@pytest.mark.parametrize("seed", range(40))
@OPS
def test_random_calls_equal_the_recurrence(lab, engines, op, seed):
    case = lab.random_case(op, seed)
    expected = lab.reference(case)
    for dtype in (torch.float64, torch.float32):
        lab.compare(lab.chain(engines[op], case.to(dtype)).run(), expected, dtype)


@OPS
def test_random_calls_have_interior_empty_padded_and_dense_segments(lab, op):
    cases = [lab.random_case(op, seed) for seed in range(40)]
    plans = [case.plan for case in cases]
    chains = [plan.chain(s) for plan in plans for s in range(plan.num_sequences)]
    assert sum(len(chain) > 2 for chain in chains) >= 10
    assert sum(any(not s.length for s in plan.segments) for plan in plans) >= 4
    assert sum(plan.has_padding for plan in plans) >= 5
    assert sum(case.shaped.shape[0] > 1 for case in cases) >= 5


@pytest.mark.parametrize("fault", ["transposed", "dropped", "other sequence"])
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_faulty_exchange_is_noticed(lab, engines, fault, direction):
    class Faulty(lab.chain):
        def _carry(self, transition, state, way):
            if way == direction and fault == "transposed":
                transition = transition.mT
            return super()._carry(transition, state, way)

        def _fold(self, way, seeds):
            entering = super()._fold(way, seeds)
            if way == direction and fault == "dropped":
                chains = [self.plan.chain(s) for s in range(self.plan.num_sequences)]
                own = {c[0 if way == "forward" else -1] for c in chains}
                entering = {i: s if i in own else s * 0 for i, s in entering.items()}
            elif way == direction and fault == "other sequence":
                indices = list(entering)
                entering = dict(zip(indices, [entering[i] for i in indices[::-1]], strict=True))
            return entering

    plan = build_plan([0, 40, 75], world_size=4)
    case = lab.make_case("kda", plan)
    actual, expected = Faulty(engines["kda"], case).run(), lab.reference(case)
    with pytest.raises(AssertionError, match="relative error"):
        lab.compare(actual, expected, torch.float32)


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("cuts", ["one", "packed"])
def test_every_rank_has_its_gates_in_the_backward(lab, engines, world_size, cuts):
    """reports.md 1: sequence starts other than 0, a different gate per head, channel and rank."""
    total = 64 * world_size
    cu = [0, total] if cuts == "one" else [0, 40, total]
    case = lab.make_case(
        "kda",
        build_plan(cu, world_size=world_size),
        optional=("A_log", "dt_bias"),
        use_gate_in_kernel=True,
        use_qk_l2norm_in_kernel=True,
    )
    actual = lab.chain(engines["kda"], case.to(torch.float32)).run()
    expected = lab.reference(case)
    lab.compare(actual, expected, torch.float32)
    for rank in range(world_size):
        for name in ("q", "k", "v", "g", "beta"):
            pair = (case.plan.shard(r.grads[name], rank) for r in (actual, expected))
            torch.testing.assert_close(*pair, rtol=0, atol=2e-5 * 8, check_dtype=False)


@OPS
def test_weak_decay_keeps_what_came_over_three_ranks(lab, engines, op):
    """reports.md 23."""
    case = lab.make_case(op, build_plan([0, 256], world_size=4))
    if op == "kda":
        case.inputs["g"].fill_(-0.01)
        case.inputs["beta"].fill_(0.05)
    else:
        case.inputs["A"].fill_(-0.01)
    lab.compare(
        lab.chain(engines[op], case.to(torch.float32)).run(), lab.reference(case), torch.float32
    )


@OPS
def test_losses_on_the_last_rank_reach_the_first(lab, engines, op):
    """reports.md 40."""
    case = lab.make_case(op, build_plan([0, 60], world_size=3))
    case.inputs["g" if op == "kda" else "A"].fill_(-0.05)
    case.grad_output[:, :40] = 0
    actual = lab.chain(engines[op], case).run()
    lab.compare(actual, lab.reference(case), torch.float64)
    for name in ("k", "v", "g") if op == "kda" else ("x", "dt", "B"):
        assert actual.grads[name][:, :20].abs().max() > 1e-3


@OPS
def test_later_segments_never_touch_earlier_ones(lab, engines, op):
    """reports.md 24: NaN in a later rank's inputs leaves every earlier rank's outputs clean."""
    case = lab.make_case(op, build_plan([0, 60], world_size=3))
    clean = lab.chain(engines[op], case).run()
    for name in ("k", "v", "g") if op == "kda" else ("x", "dt", "B"):
        case.inputs[name][:, 40:] = torch.nan
    dirty = lab.chain(engines[op], case).run()
    assert torch.equal(dirty.output[:, :40], clean.output[:, :40])
    assert dirty.output[:, 40:].isnan().all()


@OPS
def test_identical_documents_have_identical_outputs(lab, engines, op):
    """reports.md 7, 25: documents do not see each other, wherever a rank's cut falls."""
    case = lab.make_case(op, build_plan([0, 20, 40], world_size=2, boundaries=[0, 13, 40]))
    for name in (n for n in case.inputs if case.inputs[n].ndim > 2):
        case.inputs[name][:, 20:] = case.inputs[name][:, :20]
    case.initial[1:] = case.initial[:1]
    result = lab.chain(engines[op], case).run()
    torch.testing.assert_close(result.output[:, 20:], result.output[:, :20], rtol=0, atol=1e-13)
    torch.testing.assert_close(result.final[1], result.final[0], rtol=0, atol=1e-13)


@OPS
def test_a_final_state_continues_its_sequence(lab, engines, op):
    """reports.md 21: two chained calls equal one, with K = V and a non-symmetric state."""
    whole = lab.make_case(op, build_plan([0, 50], world_size=1), dims=(16, 16))
    one = lab.chain(engines[op], whole).run()
    state, outputs = whole.initial, []
    for start, stop in ((0, 23), (23, 50)):
        part = whole.with_plan(build_plan([0, stop - start], world_size=2))
        part.inputs = {n: x[:, start:stop] if x.ndim > 2 else x for n, x in part.inputs.items()}
        part.grad_output, part.initial = part.grad_output[:, start:stop], state
        result = lab.chain(engines[op], part).run()
        outputs.append(result.output)
        state = result.final
    torch.testing.assert_close(torch.cat(outputs, 1), one.output, rtol=0, atol=1e-12)
    torch.testing.assert_close(state, one.final, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@OPS
def test_low_precision_inputs_lose_only_the_rounding_of_results(lab, engines, op, dtype):
    """Against the recurrence on the same rounded inputs; results are rounded once."""
    optional = () if op == "kda" else ("D", "z", "dt_bias")
    case = lab.make_case(op, build_plan([0, 9, 70], world_size=3), optional=optional).to(dtype)
    result, expected = lab.chain(engines[op], case).run(), lab.reference(case)
    assert result.output.dtype == dtype
    assert result.final.dtype == torch.float32
    for name, value in result.items().items():
        want = expected.items()[name]
        rms = ((value.double() - want).square().mean() / want.square().mean()).sqrt()
        assert rms < torch.finfo(dtype).eps, name


@OPS
def test_gradients_and_inputs_of_any_strides(lab, engines, op):
    """reports.md 13: slices of one projection, an expanded gradient, a transposed one."""
    case = lab.make_case(op, build_plan([0, 45], world_size=2))
    for name in ("q", "k") if op == "kda" else ("B", "C"):
        x = case.inputs[name]
        wide = torch.cat([torch.full_like(x, torch.nan), x], -1)
        case.inputs[name] = wide[..., x.shape[-1] :]
    shape = case.grad_output.shape
    transposed = torch.randn(shape[::-1], dtype=torch.float64).permute(3, 2, 1, 0)
    for grad in (torch.ones((), dtype=torch.float64).expand(shape), transposed):
        case.grad_output = grad
        # shards of one rank are views: the strides reach the engine
        case = case.with_plan(build_plan([0, 45], world_size=1))
        lab.compare(lab.chain(engines[op], case).run(), lab.reference(case), torch.float64)


@OPS
def test_nothing_at_all(lab, engines, op):
    for cu in ([0, 0], [0, 0, 0]):
        case = lab.make_case(op, build_plan(cu, world_size=3))  # two ranks without segments
        result = lab.chain(engines[op], case).run()
        assert result.output.shape == case.grad_output.shape
        assert torch.equal(result.final, case.initial)
        assert torch.equal(result.grads["initial"], case.grad_final)
        for name, x in case.inputs.items():
            assert not result.grads[name].count_nonzero()
            assert result.grads[name].shape == x.shape


@OPS
def test_an_empty_sequence_hands_its_state_through(lab, engines, op):
    case = lab.make_case(op, build_plan([0, 30, 30, 45], world_size=3))
    result = lab.chain(engines[op], case).run()
    lab.compare(result, lab.reference(case), torch.float64)
    assert torch.equal(result.final[1], case.initial[1])
    assert torch.equal(result.grads["initial"][1], case.grad_final[1])


@OPS
def test_padding_rows_give_exact_zeros(lab, engines, op):
    """reports.md 6, with NaN in the padding rows of inputs and gradients."""
    plan = build_plan([0, 3, 30], world_size=2, padded_cu_seqlens=[0, 6, 40])
    case = lab.make_case(op, plan)
    result = lab.chain(engines[op], case).run()
    lab.compare(result, lab.reference(case), torch.float64)
    padding = [3, 4, 5, *range(33, 40)]
    for value in (result.output, *(g for g in result.grads.values() if g.shape[1:2] == (40,))):
        assert not value[:, padding].count_nonzero()


@pytest.mark.parametrize("block", [16, 64])
@OPS
def test_blocks_change_nothing(lab, engines, op, block, monkeypatch):
    """A segment of many blocks, and one block."""
    case = lab.make_case(op, build_plan([0, 230], world_size=2))
    monkeypatch.setattr(type(engines[op]), "block_tokens", lambda self, inputs: block)
    lab.compare(lab.chain(engines[op], case).run(), lab.reference(case), torch.float64)


@OPS
def test_blocks_bound_memory(lab, engines, op):
    """The tokens of a block depend on shapes alone, and never fall below a chunk."""

    def tokens(heads, dims):
        case = lab.make_case(op, build_plan([0, 1], world_size=1))
        case.inputs = {
            name: x[..., :1, :1].expand(1, 1, heads, dims) if x.ndim == 4 else x
            for name, x in case.inputs.items()
        }
        return engines[op].block_tokens(case.local_inputs(0, None))

    assert tokens(4, 64) == 16 * tokens(64, 64)
    assert tokens(512, 256) == 16
