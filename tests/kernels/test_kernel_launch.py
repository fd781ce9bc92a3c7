# SPDX-License-Identifier: Apache-2.0
"""Launches take the compiled kernel that Triton would, and pass what its launcher reads.

Nothing is compiled: what stands for a compiled kernel is what Triton itself says it specialises on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from cptransport_kernels import launch

BLOCK = 64


class GpuTensor(Tensor):
    """A tensor in host memory that says it is not."""

    is_cuda = True
    __torch_function__ = torch._C._disabled_torch_function_impl


def tensor(offset: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return one that starts ``offset`` elements behind an aligned address."""
    return torch.zeros(64, dtype=dtype)[offset:].as_subclass(GpuTensor)


def body(p_x, p_y, stride, size, step, limit, scale, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    """Has all kinds of arguments."""


def one(p_x, BLOCK: tl.constexpr):  # noqa: ANN001, ANN201
    """Has one argument."""


class Handle:
    """Stands for a compiled kernel; what it was launched with."""

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, stream: int) -> None:
            self.launches.append((grid, args, stream))

        return run


class Kernel:
    """A kernel as Triton decorates it, which makes a handle instead of compiling."""

    def __init__(self, function: Any, **options: Any) -> None:
        jit = JITFunction(function, **options)
        self.fn, self.params, self.arg_names = jit.fn, jit.params, jit.arg_names
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._read = create_function_from_signature(jit.signature, jit.params, backend)
        self._handles: dict[str, Handle] = {}
        self.asked = 0

    def select(self, *args: Any) -> Handle:
        """Return what Triton launches for these arguments."""
        _, specialisation, _ = self._read(*args, BLOCK=BLOCK)
        return self._handles.setdefault(repr(specialisation), Handle())

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Handle]:
        def run(*args: Any, **constants: Any) -> Handle:
            self.asked += 1
            return self.select(*args)

        return run


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A driver whose ``device`` can be set; its streams are numbers."""
    active = SimpleNamespace(device=0)
    active.get_current_device = lambda: active.device
    active.get_current_stream = lambda device: 70 + device
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "_INTERPRETED", False)
    return active


@pytest.fixture
def kernel(active: SimpleNamespace) -> Kernel:
    return Kernel(body, do_not_specialize=["step", "limit"])


@pytest.fixture
def bound(kernel: Kernel) -> launch.Bound:
    return launch.Bound(kernel, {"BLOCK": BLOCK, "num_warps": 4})


X, Y = tensor(), tensor()
BASE = {"p_x": X, "p_y": Y, "stride": 32, "size": 3, "step": 5, "limit": 7, "scale": 0.5}


def check(bound: launch.Bound, *args: Any) -> None:
    """Launch until Triton is not asked again; that must be what Triton would launch."""
    handle = bound.kernel.select(*args)
    bound((2,), *args)
    asked, before = bound.kernel.asked, len(handle.launches)
    bound((2,), *args)
    assert bound.kernel.asked == asked
    assert len(handle.launches) == before + 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("p_x", tensor(1)),
        ("p_y", tensor(3)),
        ("p_x", tensor(dtype=torch.bfloat16)),
        ("p_x", None),
        ("stride", 1),
        ("stride", 2),
        ("stride", 2**31),
        ("stride", 2**31 + 1),
        ("stride", -(2**31) - 16),
        ("size", 1),
        ("size", 16),
        ("size", 2**63),
        ("step", 2**31),
        ("step", -(2**31) - 1),
        ("step", 2**63),
        ("step", True),
        ("step", 5.0),
        ("step", None),
        ("scale", 1),
    ],
)
def test_what_triton_tells_apart(bound: launch.Bound, name: str, value: Any) -> None:
    args, changed = tuple(BASE.values()), tuple({**BASE, name: value}.values())
    assert bound.kernel.select(*args) is not bound.kernel.select(*changed)
    check(bound, *args)
    check(bound, *changed)
    check(bound, *args)
    assert bound.kernel.asked == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("p_x", tensor(4)),
        ("p_x", torch.zeros(0).as_subclass(GpuTensor)),
        ("stride", 48),
        ("size", 2),
        ("size", -3),
        ("step", 1),
        ("step", 16),
        ("step", -1),
        ("step", 2**30 - 8),
        ("scale", 1.0),
    ],
)
def test_what_is_not_asked_again(bound: launch.Bound, name: str, value: Any) -> None:
    args, changed = tuple(BASE.values()), tuple({**BASE, name: value}.values())
    check(bound, *args)
    check(bound, *changed)
    assert bound.kernel.asked == 1


def test_one_of_two_tensors_is_unaligned(bound: launch.Bound) -> None:
    for x, y in ((tensor(1), Y), (X, tensor(1)), (tensor(1), tensor(1)), (X, Y)):
        check(bound, *{**BASE, "p_x": x, "p_y": y}.values())
    assert bound.kernel.asked == 4


def test_any_mixture(bound: launch.Bound) -> None:
    choose = random.Random(0).choice
    tensors = (X, tensor(1), tensor(dtype=torch.float16), None)
    edges = (2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**63 - 1, 2**63, -(2**63))
    ints = (-1, 0, 1, 2, 16, *edges, True)
    for _ in range(500):
        check(bound, *(choose(tensors) for _ in range(2)), *(choose(ints) for _ in range(5)))


@pytest.mark.parametrize("name", ["stride", "step"])
def test_the_ends_of_int32(bound: launch.Bound, name: str) -> None:
    for value in (-(2**31), 2**31, 2**31 - 16, -(2**31) - 16, -(2**63), 2**63):
        check(bound, *{**BASE, name: value}.values())


def test_devices_have_their_own(bound: launch.Bound, active: SimpleNamespace) -> None:
    args = tuple(BASE.values())
    for _ in range(2):
        for active.device in (0, 1):
            bound((1,), *args)
    assert bound.kernel.asked == 2
    assert [stream for *_, stream in bound.kernel.select(*args).launches] == [70, 71]


@pytest.mark.parametrize("wide", [7, 10**12])
def test_what_is_passed(bound: launch.Bound, wide: int) -> None:
    host = torch.zeros(4)
    args = (X, host, 32, 3, 5, wide, 0.5)
    for step in range(3):
        bound((2, 3), *args[:4], step, *args[5:])
    passed = [(X.data_ptr(), host, 32, 3, step, wide, 0.5, BLOCK) for step in (1, 2)]
    launches = bound.kernel.select(*args).launches
    assert [grid for grid, *_ in launches] == [(2, 3, 1)] * 2
    for (_, found, _), expected in zip(launches, passed, strict=True):
        assert found[1] is host
        assert (found[0], *found[2:]) == (expected[0], *expected[2:])


def test_one_argument(active: SimpleNamespace) -> None:
    bound = launch.Bound(Kernel(one), {"BLOCK": BLOCK})
    for x in (X, tensor(1), None, 3, 2**31, 0.5):
        check(bound, x)


def test_sizes_that_vary_keep_caches_small(bound: launch.Bound) -> None:
    limit = launch._specialise.cache_info().maxsize
    assert limit is not None
    for size in range(1, 3 * limit):
        bound((1,), X, Y, 16 * size, size, size << 10, size << 30, 0.5)
    # Strides of 32 bits, sizes that are one, multiples of 16 or neither, steps and limits of each width.
    assert len(bound._compiled) <= 3 * 2 * 2
    assert len(bound._readers) == 1
    assert launch._specialise.cache_info().currsize <= limit


def test_an_empty_grid_launches_nothing(bound: launch.Bound) -> None:
    with launch.count_launches() as counter:
        bound((2, 0), *BASE.values())
        assert not counter
        bound((2, 1), *BASE.values())
    assert counter == {"body": 1}
    assert bound.kernel.asked == 1
