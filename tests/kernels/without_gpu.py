# SPDX-License-Identifier: Apache-2.0
"""The KDA engine compiled for sm_90 on a machine without a GPU: launches do nothing, tensors are on the CPU.

A script, since Triton reads at import whether to interpret. It prints one JSON document::

    kernels     name -> bytes of shared memory, of all that was compiled
    launches    names, in order, of a forward and backward of a rank inside a chain
    calls       Python calls in this repository's code for them, once everything is cached
    operators   torch operators likewise, name -> number
    handles     per launch whether Triton itself would have launched the same compiled kernel
    saved       [shape, dtype] of what a forward keeps for its backward, beside its inputs
    peak        bytes alive at most in a forward and backward, beside what the caller holds
    narrow      kernels of K = 16, V = 32, float16, that use the warp group instructions of sm_90
"""

from __future__ import annotations

import json
import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import cptransport
import cptransport_kernels
from cptransport import merge
from cptransport.engines import KDAInputs, KDAOptions, LocalSegment, Need, OutputGrads
from cptransport.engines.triton import KDA_ENGINE
from cptransport.ops import chunk_kda
from cptransport.testing.recorded import RecordedTransport, record
from cptransport.transport import BoundaryTransport
from cptransport_kernels import launch

#: The packages of this repository; an environment may be inside its folder.
PACKAGES = tuple(
    str(Path(package.__file__).parent) for package in (cptransport, cptransport_kernels)
)
TOKENS, HEADS, DIM = 1024, 2, 128


class _Utilities:
    """What Triton asks of a device when it loads a kernel."""

    def load_binary(
        self, name: str, kernel: bytes, shared: int, device: int
    ) -> tuple[int, int, int, int, int]:
        kernels[name] = max(shared, kernels.get(name, 0))
        return 1, 2, 128, 0, 1024

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132}


class _Launcher:
    def __init__(self, source: Any, metadata: Any) -> None:
        self.name = metadata.name

    def __call__(self, *args: Any) -> None:
        launches.append(self.name)


class _Driver:
    """A driver of one H100-like device whose launches do nothing."""

    utils = _Utilities()
    launcher_cls = _Launcher

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def map_python_to_cpp_type(self, kind: str) -> str:
        return kind


kernels: dict[str, int] = {}
launches: list[str] = []


def tokens(dtype: torch.dtype, offset: int = 0) -> dict[str, torch.Tensor]:
    """Return a rank's inputs, which start ``offset`` elements into their memory."""

    def values(*shape: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        count = torch.Size(shape).numel()
        flat = torch.rand(count + offset).to(kind)
        return flat[offset:].view(shape).detach().requires_grad_()

    shape = (1, TOKENS, HEADS, DIM)
    x = {name: values(*shape, kind=dtype) for name in ("q", "k", "v")}
    return {**x, "g": values(*shape), "beta": values(1, TOKENS, HEADS)}


def interior() -> tuple[dict[int, dict[str, torch.Tensor]], Callable[[int], torch.Tensor]]:
    """Return inputs of rank 2 of 4 by their offset, and a forward on those with recorded peers."""
    os.environ["CULA_CP_COMPOSITION"] = "scan"
    plan = cptransport.build_plan([0, 4 * TOKENS], world_size=4)

    def step(transport: BoundaryTransport) -> None:
        x = tokens(torch.float32)
        context = cptransport.CPContext(plan, transport)
        o, _ = chunk_kda(**x, cp_context=context, engine="torch")
        o.sum().backward()

    transport = RecordedTransport(record(step, 4)[1][2])
    context = cptransport.CPContext(plan, transport)
    given = {offset: tokens(torch.bfloat16, offset) for offset in (0, 1)}

    def forward(offset: int) -> torch.Tensor:
        return chunk_kda(**given[offset], cp_context=context, engine="triton")[0]

    return given, forward


def last(x: dict[str, torch.Tensor], options: KDAOptions) -> None:
    """Run the last rank of a chain, with final states and gradients of them."""
    keys, values = x["q"].shape[3], x["v"].shape[3]
    parameters = torch.zeros(HEADS), torch.zeros(HEADS, keys)
    table = torch.zeros(1, HEADS, keys, values)
    inputs = KDAInputs(
        *(value.detach() for value in x.values()),
        *(parameters if options.use_gate_in_kernel else (None, None)),
        table,
        options,
    )
    segments = [LocalSegment(0, TOKENS, 0, False, True)]
    out = {"state": table, "transition": torch.zeros(1, HEADS, keys, keys)}
    local = KDA_ENGINE.forward_local(inputs, segments, [Need(False, False)], out)
    finished = KDA_ENGINE.forward_finish(local, lambda: table)
    grads = OutputGrads(inputs.v, table)
    local_grad = KDA_ENGINE.backward_local(finished.saved, grads, [Need(True, False)], out)
    KDA_ENGINE.backward_finish(local_grad, lambda: table)


def narrow() -> list[str]:
    """Return kernels for K = 16, V = 32 that use warp group instructions; float16 compiles fastest."""
    before = [handle for bound in launch._bound.values() for handle in bound._compiled.values()]
    x = tokens(torch.float16)
    x = {**x, **{name: x[name][..., :16].contiguous() for name in ("q", "k", "g")}}
    last({**x, "v": x["v"][..., :32].contiguous()}, KDAOptions(1.0))
    return [
        bound.name
        for bound in launch._bound.values()
        for handle in bound._compiled.values()
        if handle not in before and "wgmma" in handle.asm["ptx"]
    ]


def count_calls(run: Callable[[], None]) -> int:
    """Count calls of functions of this repository; comprehensions are calls on some Pythons only."""
    count = 0

    def see(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGES) and code.co_name[0] != "<":
            count += 1

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.seen[str(function.name())] += 1
        return function(*args, **(kwargs or {}))


class _Peak(TorchDispatchMode):
    """Follow the memory of the tensors that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = 0
        self.most = 0
        self._known: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        given = {x.untyped_storage() for x in args if isinstance(x, torch.Tensor)}
        for x in made if isinstance(made, (tuple, list)) else [made]:
            storage = x.untyped_storage()
            if storage not in given and storage not in self._known:
                self._known[storage] = None
                self.alive += storage.nbytes()
                self.most = max(self.most, self.alive)
                weakref.finalize(storage, self._free, storage.nbytes())
        return made

    def _free(self, nbytes: int) -> None:
        self.alive -= nbytes


def memory(x: dict[str, torch.Tensor], forward: Callable[[], torch.Tensor]) -> dict[str, Any]:
    """Return what ``saved`` and ``peak`` are."""
    held = {value.untyped_storage().data_ptr() for value in x.values()}
    saved: list[tuple[list[int], str]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in held:
            saved.append((list(tensor.shape), str(tensor.dtype)))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    do = torch.ones(x["v"].shape, dtype=x["v"].dtype)
    with _Peak() as peak:
        forward().backward(do)
    return {"saved": saved, "peak": peak.most}


def compare_handles(run: Callable[[], None]) -> list[bool]:
    """Ask Triton for the kernel of every launch, beside launching our own handle."""
    same = []
    ours = launch.Bound.__call__

    def both(self: launch.Bound, grid: tuple[int, ...], *args: Any) -> None:
        ours(self, grid, *args)
        handle = self._compiled[(0, *self._split(args)[1])]
        same.append(handle is self.kernel[grid](*args, **self.constants))

    launch.Bound.__call__ = both
    try:
        run()
    finally:
        launch.Bound.__call__ = ours
    return same


def main() -> None:
    """Run everything and print what was found."""
    driver.set_active(_Driver())
    type(KDA_ENGINE).eligible = lambda self, facts: None
    merge._kernel_serves = lambda *_: True
    given, forward = interior()
    do = torch.ones(1, TOKENS, HEADS, DIM, dtype=torch.bfloat16)

    def run(offset: int) -> None:
        forward(offset).backward(do)
        for x in given[offset].values():
            x.grad = None

    for _ in range(3):  # both generations of every slot
        run(0)
    launches.clear()
    run(0)
    found: dict[str, Any] = {"launches": list(launches), "calls": count_calls(lambda: run(0))}
    with _Operators() as operators:
        run(0)
    found["operators"] = operators.seen
    found["handles"] = compare_handles(lambda: run(0)) + compare_handles(lambda: run(1))
    found.update(memory(given[0], lambda: forward(0)))
    last(tokens(torch.bfloat16), KDAOptions(1.0, True, True, False, None, True, True))
    print(json.dumps({**found, "kernels": kernels, "narrow": narrow()}))


if __name__ == "__main__":
    main()
