# SPDX-License-Identifier: Apache-2.0
"""The convolution's kernels on a GPU: what the interpreter cannot show.

Among ranks, one rank runs alone on what its peers sent when all of them ran on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cptransport import CPContext, build_plan
from cptransport.ops import causal_conv1d, last_run, mamba_split_conv1d_scan_combined
from cptransport.testing.numerics import relative_rms
from cptransport.testing.recorded import RecordedTransport, record
from cptransport.transport import BoundaryTransport
from cptransport.transports.loopback import LoopbackTransport
from cptransport_kernels.launch import count_launches

pytestmark = pytest.mark.gpu

#: Relative root mean squares against torch in the same dtype, whose sums are float32 too.
LIMITS = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 3e-3}


class Case:
    """One convolution on ranks, with everything that it can have.

    Args:
        offsets: of the sequences. world_size, layout: of the plan.
    """

    def __init__(
        self,
        offsets: list[int],
        channels: int,
        width: int,
        dtype: torch.dtype = torch.bfloat16,
        *,
        world_size: int = 1,
        layout: str = "contiguous",
        batch: int = 1,
        silu: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.plan = build_plan(offsets, world_size=world_size, layout=layout)
        rows, states = offsets[-1], batch if len(offsets) == 2 else len(offsets) - 1
        self.silu = silu
        # Columns of a wider projection, as in a mixer.
        wide = torch.randn(3, batch, rows, channels + 24).to(dtype)
        self.x, self.residual, self.dy = wide[..., 8:-16]
        self.weight = torch.randn(channels, width)
        self.bias = torch.randn(channels).to(dtype)
        self.initial, self.dfinal = torch.randn(2, states, channels, width - 1).to(dtype)

    def step(self, transport: BoundaryTransport) -> dict[str, Tensor]:
        """Run forward and backward of a rank where its transport is; one call may follow another."""
        run = self.ready(transport)
        return run()

    def ready(self, transport: BoundaryTransport) -> Callable[[], dict[str, Tensor]]:
        """Return the call with its inputs in place."""
        rank, device = transport.rank, transport.device

        def local(x: Tensor) -> Tensor:
            wide = torch.nn.functional.pad(self.plan.shard(x, rank), (8, 16), value=torch.nan)
            return wide.to(device)[..., 8:-16]

        given = {
            "x": local(self.x),
            "weight": self.weight.to(device),
            "bias": self.bias.to(device),
            "residual": local(self.residual),
            "initial_state": self.initial.to(device),
        }
        leaves = {name: t.detach().requires_grad_() for name, t in given.items()}
        dy, dfinal = local(self.dy), self.dfinal.to(device)
        context = CPContext(self.plan, transport)

        def run() -> dict[str, Tensor]:
            y, final = causal_conv1d(
                **leaves,
                cp_context=context,
                activation="silu" if self.silu else None,
                output_final_state=True,
            )
            assert final is not None
            grads = torch.autograd.grad([y, final], list(leaves.values()), [dy, dfinal])
            return {
                "y": y.detach(),
                "final": final.detach(),
                **dict(zip(leaves, grads, strict=True)),
            }

        return run


def check(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    # States that a rank does not own are zero there, which is an error of 0 or of inf.
    errors = {n: relative_rms(found[n].cpu().float(), x.float()) for n, x in expected.items()}
    bad = {name: error for name, error in errors.items() if not error < limit}  # "not <": NaN too
    assert not bad, bad
    for name, right in expected.items():
        assert found[name].shape == right.shape
        assert found[name].dtype == right.dtype


def alone(case: Case) -> dict[str, Tensor]:
    found = case.step(LoopbackTransport(torch.device("cuda"), 30.0))
    assert last_run().engine == "triton"
    return found


#: Few, since each is compiled anew.
@pytest.mark.parametrize(
    ("dtype", "channels", "width", "offsets"),
    [
        (torch.bfloat16, 256, 4, [0, 700]),
        (torch.bfloat16, 6144, 4, [0, 130, 131, 131, 300]),
        (torch.bfloat16, 50, 3, [0, 1, 2, 2, 200]),
        (torch.bfloat16, 129, 8, [0, 70, 300]),
        (torch.bfloat16, 96, 1, [0, 300]),
        (torch.bfloat16, 72, 9, [0, 3, 200]),
        (torch.float16, 136, 4, [0, 130, 300]),
        (torch.float32, 136, 4, [0, 130, 300]),
        (torch.float32, 96, 2, [0, 300]),
        (torch.float32, 40, 31, [0, 90, 200]),
    ],
)
def test_equals_torch(dtype: torch.dtype, channels: int, width: int, offsets: list[int]) -> None:
    case = Case(offsets, channels, width, dtype)
    check(alone(case), case.step(LoopbackTransport(torch.device("cpu"), 30.0)), LIMITS[dtype])


@pytest.mark.parametrize("width", [5, 7])
def test_other_widths_and_a_batch(width: int) -> None:
    case = Case([0, 150], 64, width, batch=3, silu=False)
    expected = case.step(LoopbackTransport(torch.device("cpu"), 30.0))
    check(alone(case), expected, LIMITS[torch.bfloat16])


@pytest.mark.parametrize("overlap", ["0", "1"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rank_among_others(
    dtype: torch.dtype, layout: str, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CULA_CP_OVERLAP", overlap)
    case = Case([0, 3, 290, 520], 136, 4, dtype, world_size=4, layout=layout)
    expected, recordings = record(case.step, 4)
    for rank, right in enumerate(expected):
        found = case.step(RecordedTransport(recordings[rank], "cuda"))
        assert last_run().engine == "triton"
        check(found, right, LIMITS[dtype])


def test_channels_first_memory() -> None:
    case = Case([0, 300], 64, 4)
    case.x = case.x.transpose(1, 2).contiguous().transpose(1, 2)
    expected = case.step(LoopbackTransport(torch.device("cpu"), 30.0))
    transport = LoopbackTransport(torch.device("cuda"), 30.0)
    x = case.x.cuda().transpose(1, 2).contiguous().transpose(1, 2)
    assert x.stride(1) == 1
    y, _ = causal_conv1d(
        x,
        case.weight.cuda(),
        case.bias.cuda(),
        cp_context=CPContext(case.plan, transport),
        activation="silu",
        residual=case.residual.cuda(),
        initial_state=case.initial.cuda(),
    )
    assert relative_rms(y.cpu().float(), expected["y"].float()) < LIMITS[torch.bfloat16]


def interior() -> Callable[[], dict[str, Tensor]]:
    case = Case([0, 2000], 512, 4, world_size=4)
    _, recordings = record(case.step, 4)
    return case.ready(RecordedTransport(recordings[2], "cuda"))


def test_an_interior_rank_costs_six_launches() -> None:
    """Rows for the next rank, the convolution, the final states that were asked for; and three back."""
    run = interior()
    run()
    with count_launches() as counter:
        run()
    assert counter == {
        "conv_rows_kernel": 3,
        "conv_fwd_kernel": 1,
        "conv_bwd_kernel": 1,
        "conv_reduce_kernel": 1,
    }


def test_neither_waits_for_the_device_nor_breaks_capture() -> None:
    run = interior()
    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        expected = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for name, tensor in captured.items():
        if name != "residual":  # that gradient is dy itself, which the graph reads
            tensor.fill_(torch.nan)
    for _ in range(2):
        graph.replay()
    # Twice: the sums of the parameters' gradients have a fixed order, so the bits are the same.
    for name, right in expected.items():
        assert torch.equal(captured[name], right), name


def far(x: Tensor, stride: int) -> Tensor:
    """Return the values of ``[1, T, D]`` with tokens ``stride`` elements apart."""
    _, tokens, channels = x.shape
    storage = torch.empty((tokens - 1) * stride + channels, dtype=x.dtype, device="cuda")
    return storage.as_strided(x.shape, (tokens * stride, stride, 1)).copy_(x)


def test_offsets_beyond_32_bits() -> None:
    """Report 31: tokens 2^30 elements apart, so that the last one's taps reach back over 2^31."""
    plan = build_plan([0, 4], world_size=1)
    context = CPContext(plan, LoopbackTransport(torch.device("cuda"), 30.0))
    near, dy = torch.randn(2, 1, 4, 8, device="cuda").bfloat16()
    weight = torch.randn(8, 4, device="cuda")
    results = []
    for x, grad in ((near, dy), (far(near, 2**30), dy), (near, far(dy, 2**30))):
        leaf, w = x.detach().requires_grad_(), weight.clone().requires_grad_()
        y, _ = causal_conv1d(leaf, w, cp_context=context, activation="silu")
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, w], grad)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_more_than_2_to_the_31_elements() -> None:
    """Output and gradient of x are as large; rows on both sides of the 2^31 equal a short call."""
    channels, rows = 4096, 2**19 + 640
    plan = build_plan([0, rows], world_size=1)
    transport = LoopbackTransport(torch.device("cuda"), 30.0)
    x = torch.empty(1, rows, channels, dtype=torch.bfloat16, device="cuda").normal_()
    weight = torch.randn(channels, 4, device="cuda")
    with torch.no_grad():
        y, _ = causal_conv1d(x, weight, cp_context=CPContext(plan, transport), activation="silu")
    assert y.numel() > 2**31
    (dx,) = grads(x, weight, CPContext(plan, transport), x)
    for first in (0, 2**19 - 100, rows - 300):
        piece = x[:, first : first + 300].contiguous()
        short = CPContext(build_plan([0, 300], world_size=1), transport)
        with torch.no_grad():
            z, _ = causal_conv1d(piece, weight, cp_context=short, activation="silu")
        (dz,) = grads(piece, weight, short, piece)
        # The first rows lack what stands before them, the last what comes after.
        inner = slice(0 if first == 0 else 3, 300)
        assert torch.equal(y[:, first : first + 300][:, inner], z[:, inner])
        inner = slice(0 if first == 0 else 3, 300 if first == rows - 300 else 297)
        assert torch.equal(dx[:, first : first + 300][:, inner], dz[:, inner])


def grads(x: Tensor, weight: Tensor, context: CPContext, dy: Tensor) -> tuple[Tensor, ...]:
    leaf = x.detach().requires_grad_()
    y, _ = causal_conv1d(leaf, weight, cp_context=context, activation="silu")
    return torch.autograd.grad(y, [leaf], dy)


def test_float64_stays_with_torch() -> None:
    context = CPContext(
        build_plan([0, 5], world_size=1), LoopbackTransport(torch.device("cuda"), 30.0)
    )
    x, weight = torch.randn(1, 5, 3).double().cuda(), torch.randn(3, 2).double().cuda()
    causal_conv1d(x, weight, cp_context=context)
    record_: Any = last_run()
    assert record_.engine == "torch"
    assert "float64" in dict(record_.reasons)["triton"]


def test_a_mixer_among_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolution and scan on the kernels, between columns of one projection."""
    monkeypatch.setenv("CULA_CP_COMPOSITION", "gather")
    nheads, headdim, ngroups, dstate = 4, 64, 2, 64
    inner, channels = nheads * headdim, nheads * headdim + 2 * ngroups * dstate
    plan = build_plan([0, 90, 390], world_size=4, layout="zigzag")
    torch.manual_seed(0)
    zxbcdt = torch.randn(1, 390, inner + channels + nheads).bfloat16()
    parameters = [
        torch.randn(channels, 4) / 2,
        torch.randn(channels) / 4,
        torch.randn(nheads),
        -torch.rand(nheads),
        torch.ones(nheads),
    ]

    def step(transport: BoundaryTransport) -> dict[str, Tensor]:
        device = transport.device
        leaves = [
            plan.shard(zxbcdt, transport.rank).to(device),
            *(p.to(device) for p in parameters),
        ]
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        y = mamba_split_conv1d_scan_combined(
            *leaves, 64, cp_context=CPContext(plan, transport), headdim=headdim, ngroups=ngroups
        )
        assert isinstance(y, Tensor)
        grads = torch.autograd.grad(y, leaves, torch.ones_like(y))
        names = ("zxbcdt", "weight", "bias", "dt_bias", "A", "D")
        return {"y": y.detach(), **dict(zip(names, grads, strict=True))}

    expected, recordings = record(step, 4)
    for rank, right in enumerate(expected):
        with count_launches() as counter:
            found = step(RecordedTransport(recordings[rank], "cuda"))
        assert counter["conv_fwd_kernel"] == counter["conv_bwd_kernel"] == 1
        assert counter["conv_rows_kernel"] <= 2
        check(found, right, 2e-2)
