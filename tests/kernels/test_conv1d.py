# SPDX-License-Identifier: Apache-2.0
"""``causal_conv1d`` on the Triton kernels, in the interpreter: the op's oracle, and against torch.

Ranks are threads, so these run on the CPU only. Tiles are small, so that every case has many.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport import BackendNotFoundError, BackendUnavailableError, CPContext, build_plan
from cptransport.errors import BackendFallbackWarning
from cptransport.ops import causal_conv1d, conv1d, conv1d_triton, last_run
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_oracle import check, judge
from cptransport.testing.op_rank import run_threads
from cptransport.transport import BoundaryTransport
from cptransport.transports import threads
from cptransport_kernels.configs import ConvConfig, ConvTile, conv_config
from cptransport_kernels.launch import count_launches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="threads share no CUDA device")


def small(width: int, *, walk: bool | None = None) -> ConvConfig:
    """Tiles of a few tokens and channels; the walk as the width says, or as asked for."""
    config = conv_config(width)
    walk = config.walk if walk is None else walk
    return replace(
        config,
        walk=walk,
        span=8 if walk else 16,
        forward=ConvTile(8, 16, 1),
        backward=ConvTile(4, 16, 1) if walk else ConvTile(16, 16, 1),
        rows=ConvTile(4, 16, 1),
        reduce=ConvTile(2, 16, 1),
    )


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conv1d_triton, "conv_config", small)


ALL = ("bias", "residual", "initial_state")


def right(**changes: Any) -> None:
    spec = OpSpec(
        "conv1d",
        (0, 4, 4, 13, 19),
        world_size=3,
        value_heads=1,
        value_dim=11,
        engine="triton",
        optional=ALL,
        options={"activation": "silu"},
    ).with_(**changes)
    case = OpCase.of(spec)
    runs = run_threads(case, 120.0)
    check(case, runs)
    assert all(run.record is not None and run.record.engine == "triton" for run in runs)


@pytest.mark.parametrize("width", range(1, 10))
def test_widths(width: int) -> None:
    given = {"layout": "zigzag", "value_dim": 19 if width == 4 else 11}
    if width > 6:  # slow in the interpreter
        given.update(cu_seqlens=(0, 4, 4, 14), world_size=2)
    right(width=width, **given)


@pytest.mark.parametrize(
    "changes",
    [
        {"optional": ()},
        {"optional": ("bias",), "options": {}},
        {"optional": ("residual",)},
        {"optional": ("initial_state",), "options": {"activation": "swish"}},
        {"loss": ("final",)},
        {"loss_ranks": (2,)},
        {"dtype": "float16"},
        {"dtype": "bfloat16", "parameter_dtype": "bfloat16"},
        {"strided": True, "overlap": True},
    ],
    ids=str,
)
def test_options(changes: dict[str, Any]) -> None:
    right(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"cu_seqlens": (0, 14), "batch": 2},
        {"cu_seqlens": (0, 12), "batch": 3, "optional": (), "world_size": 2},
        {"cu_seqlens": (0, 9), "world_size": 4, "width": 6},
        {"layout": "zigzag_per_sequence", "overlap": True},
        {"layout": "contiguous_per_sequence"},
        {"cu_seqlens": (0, 0, 1, 2, 2, 3, 20, 20), "world_size": 2},
        {"cu_seqlens": (0, 3), "world_size": 4},
        {"cu_seqlens": (0, 9, 20), "padded_cu_seqlens": (0, 12, 27), "world_size": 2},
        {"cu_seqlens": (0, 5, 25), "boundaries": (0, 2, 2, 25)},
        {"cu_seqlens": (0, 20), "world_size": 1},
    ],
    ids=str,
)
def test_layouts(changes: dict[str, Any]) -> None:
    right(**changes)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_the_wide_backward_serves_narrow_convolutions_too(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv1d_triton, "conv_config", lambda w: small(w, walk=False))
    right(width=width, layout="zigzag", strided=True, world_size=2, value_dim=19)
    if width == 2:  # segments of several spans
        right(width=width, cu_seqlens=(0, 3, 60), world_size=2)


@pytest.mark.parametrize("seed", range(3))
def test_random(seed: int) -> None:
    draw = random.Random(seed)
    cuts = sorted(draw.choices(range(26), k=draw.randint(0, 4)))
    dense = not cuts and draw.random() < 0.5
    right(
        cu_seqlens=(0, *cuts, 25),
        batch=2 if dense else 1,
        world_size=draw.randint(1, 4),
        layout=draw.choice(["contiguous", "zigzag", "zigzag_per_sequence"]),
        width=draw.randint(1, 8),
        value_dim=draw.randint(1, 21),
        optional=tuple(name for name in ALL if draw.random() < 0.6),
        options=draw.choice([{}, {"activation": "silu"}]),
        strided=draw.random() < 0.5,
        overlap=draw.random() < 0.5,
        seed=seed,
    )


def on_ranks(step: Callable[[BoundaryTransport], Any], world_size: int) -> list[Any]:
    return threads.run(step, world_size, 60.0)


def channels_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def columns(x: Tensor) -> Tensor:
    """Return the same values as columns of a projection."""
    wide = x.new_full((*x.shape[:2], x.shape[2] + 7), torch.nan)
    wide[..., 5:-2] = x
    return wide[..., 5:-2]


@pytest.mark.parametrize("view", [channels_first, columns])
def test_views_are_read_where_they_are(view: Callable[[Tensor], Tensor]) -> None:
    """Report 13: inputs and gradients of any strides, a gradient without memory of its own too."""
    plan = build_plan([0, 9, 30], world_size=2)
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 30, 18)
    weight, initial = torch.randn(18, 4), view(torch.randn(2, 18, 3))

    def step(transport: BoundaryTransport, engine: str) -> list[Tensor]:
        x, residual, grad = (view(plan.shard(t, transport.rank)) for t in whole)
        leaves = [t.detach().requires_grad_() for t in (x, residual, weight.T.contiguous().T)]
        for leaf, given in zip(leaves, (x, residual), strict=False):
            assert leaf.stride() == given.stride()
        y, final = causal_conv1d(
            leaves[0],
            leaves[2],
            cp_context=CPContext(plan, transport),
            residual=leaves[1],
            initial_state=initial,
            activation="silu",
            output_final_state=True,
            engine=engine,
        )
        assert final is not None
        torch.autograd.backward([y, final], [grad, torch.ones(()).expand(final.shape)])
        return [y, final, *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    expected = on_ranks(lambda transport: step(transport, "torch"), 2)
    found = on_ranks(lambda transport: step(transport, "triton"), 2)
    for rank in range(2):
        for mine, reference in zip(found[rank], expected[rank], strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-5, atol=1e-5)


def far(x: Tensor, stride: int) -> Tensor:
    """Return the values of ``[1, T, D]`` with tokens ``stride`` elements apart; most pages stay untouched."""
    _, tokens, channels = x.shape
    storage = torch.empty((tokens - 1) * stride + channels, dtype=x.dtype)
    return storage.as_strided(x.shape, (tokens * stride, stride, 1)).copy_(x)


@pytest.mark.parametrize("walk", [True, False])
def test_offsets_beyond_32_bits(walk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Report 31: tokens 2^30 elements apart, so that the last one's taps reach back over 2^31."""
    monkeypatch.setattr(conv1d_triton, "conv_config", lambda w: small(w, walk=walk))
    plan = build_plan([0, 4], world_size=1)
    torch.manual_seed(0)
    near, dy = torch.randn(2, 1, 4, 8).half()
    weight = torch.randn(8, 4)

    def step(transport: BoundaryTransport, x: Tensor, grad: Tensor) -> list[Tensor]:
        leaves = [x.detach().requires_grad_(), weight.clone().requires_grad_()]
        context = CPContext(plan, transport)
        y, _ = causal_conv1d(*leaves, cp_context=context, activation="silu", engine="triton")
        return [y.detach(), *torch.autograd.grad(y, leaves, grad)]

    (expected,) = on_ranks(lambda transport: step(transport, near, dy), 1)
    for x, grad in ((far(near, 2**30), dy), (near, far(dy, 2**30))):
        (found,) = on_ranks(lambda transport, x=x, grad=grad: step(transport, x, grad), 1)
        assert all(map(torch.equal, expected, found))


def outputs(world_size: int, layout: str, x: Tensor, weight: Tensor) -> Tensor:
    plan = build_plan([0, 9, 41], world_size=world_size, layout=layout)

    def step(transport: BoundaryTransport) -> tuple[Tensor, Tensor | None]:
        local = plan.shard(x, transport.rank)
        context = CPContext(plan, transport)
        y, final = causal_conv1d(
            local,
            weight,
            cp_context=context,
            activation="silu",
            output_final_state=True,
            engine="triton",
        )
        return y, final

    results = on_ranks(step, world_size)
    # The state holds the very inputs, not what a sum made of them.
    for sequence, end in enumerate((9, 41)):
        total = sum(final[sequence] for _, final in results)
        assert torch.equal(total, x[0, end - 3 : end].T)
    return plan.unshard([y for y, _ in results])


def test_sharding_changes_no_bit_of_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 41, 12), torch.randn(12, 4)
    alone = outputs(1, "contiguous", x, weight)
    for overlap in ("0", "1"):
        monkeypatch.setenv("CULA_CP_OVERLAP", overlap)
        for layout in ("zigzag", "contiguous_per_sequence"):
            assert torch.equal(outputs(3, layout, x, weight), alone)


def test_padding_is_never_read() -> None:
    plan = build_plan([0, 9, 20], world_size=1, padded_cu_seqlens=[0, 12, 27])
    x = torch.randn(1, 27, 5)
    real = torch.zeros(27, dtype=torch.bool)
    real[:9] = real[12:23] = True
    x[:, ~real] = torch.nan
    x.requires_grad_()
    weight = torch.randn(5, 3, requires_grad=True)

    def step(transport: BoundaryTransport) -> Tensor:
        context = CPContext(plan, transport)
        return causal_conv1d(x, weight, cp_context=context, residual=x, engine="triton")[0]

    (y,) = on_ranks(step, 1)
    y.backward(torch.where(real[:, None], 1.0, torch.nan).expand(y.shape))
    assert x.grad is not None
    assert weight.grad is not None
    for each in (y, x.grad):
        assert each[:, real].isfinite().all()
        assert torch.equal(each[:, ~real], torch.zeros(1, 7, 5))
    assert weight.grad.isfinite().all()


def launches(world_size: int, offsets: list[int], width: int, **given: Any) -> list[Counter[str]]:
    """Return what each rank launches in forward and backward, one rank after the other."""
    plan = build_plan(offsets, world_size=world_size)
    turns = [Counter[str]() for _ in range(2)]

    def step(transport: BoundaryTransport) -> None:
        x = torch.randn(1, plan.for_rank(transport.rank).num_tokens, 4, requires_grad=True)
        weight = torch.randn(4, width, requires_grad=True)
        y, _ = causal_conv1d(
            x, weight, cp_context=CPContext(plan, transport), engine="triton", **given
        )
        transport.barrier()
        y.sum().backward()

    with count_launches() as counter:
        on_ranks(step, world_size)
    turns[0].update({n: c for n, c in counter.items() if "fwd" in n})
    turns[1].update({n: c for n, c in counter.items() if "fwd" not in n})
    return turns


def test_launches() -> None:
    """One forward; with a neighbour, its rows are packed first. Backward: at most three."""
    alone, back = launches(1, [0, 7, 20], 4)
    assert alone == {"conv_fwd_kernel": 1}
    assert back == {"conv_bwd_kernel": 1, "conv_reduce_kernel": 1}
    # Two ranks: the first packs and is given back to, the second only the other way round.
    forward, back = launches(2, [0, 20], 4)
    assert forward == {"conv_fwd_kernel": 2}
    assert back == {"conv_rows_kernel": 2, "conv_bwd_kernel": 2, "conv_reduce_kernel": 2}
    forward, back = launches(2, [0, 20], 1)
    assert (forward, back.total()) == ({"conv_fwd_kernel": 2}, 4)


def chosen(
    argument: str | None, dtype: torch.dtype = torch.float32, *, strict: bool = False
) -> Any:
    """Return the record of a small call."""
    plan = build_plan([0, 6], world_size=1)

    def step(transport: threads.ThreadTransport) -> Any:
        transport.strict = strict
        x, weight = torch.randn(1, 6, 3, dtype=dtype), torch.randn(3, 2)
        causal_conv1d(x, weight, cp_context=CPContext(plan, transport), engine=argument)
        return last_run()

    return on_ranks(step, 1)[0]


def test_who_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(None).engine == "torch"
    assert chosen("triton").engine == "triton"
    monkeypatch.setenv("CULA_CP_ENGINE", "triton")
    assert chosen(None).engine == "triton"
    assert chosen("torch").engine == "torch"
    # An engine of the ops around the convolution is no mistake, not under strict either.
    record = chosen("cudnn", strict=True)
    assert record.engine == "torch"
    assert [name for name, _ in record.reasons] == ["cudnn"]
    with pytest.raises(BackendNotFoundError, match="did you mean 'triton'"):
        chosen("trition")


def test_kernels_that_cannot_serve_say_why() -> None:
    with pytest.warns(BackendFallbackWarning, match="needs x in bfloat16, float16 or float32"):
        record = chosen("triton", torch.float64)
    assert record.engine == "torch"
    assert "needs x in bfloat16" in dict(record.reasons)["triton"]
    with pytest.raises(BackendUnavailableError, match="cannot serve causal_conv1d: needs x in"):
        chosen("triton", torch.float64, strict=True)


def test_on_cuda_the_kernels_come_first() -> None:
    device, floats = torch.device("cuda"), {"x": torch.bfloat16, "weight": torch.float32}
    transport: Any = object()
    assert conv1d.choose(floats, device, transport, None)[0].name == "triton"
    assert conv1d.choose(floats, device, transport, "torch")[0].name == "torch"
    computes, reasons = conv1d.choose({"x": torch.float64}, device, transport, None)
    assert computes.name == "torch"
    assert reasons[0][0] == "triton"


@pytest.mark.parametrize("mode", ["virtual", "all_to_all"])
def test_a_mixer_runs_on_kernels_only(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_MAMBA_LOAD_BALANCING", mode)
    case = OpCase.of(
        OpSpec(
            "mixer",
            (0, 4, 4, 21),
            layout="zigzag",
            heads=1,
            value_heads=2,
            key_dim=16,
            value_dim=16,
            optional=("conv1d_bias", "initial_states"),
            options={"chunk_size": 16},
            engine="triton",
        )
    )
    with count_launches() as counter:
        runs = run_threads(case, 120.0)
    # What all_to_all moves is counted with activations, not here.
    wrong = [str(each) for each in judge(case, runs) if not each.ok and each.measure != "bytes"]
    assert not wrong, wrong
    assert counter["conv_fwd_kernel"] == counter["conv_bwd_kernel"] == 2
    assert counter["conv_rows_kernel"] == (4 if mode == "virtual" else 0)
    assert runs[0].record is not None
    assert runs[0].record.engine == "triton"
