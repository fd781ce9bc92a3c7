# SPDX-License-Identifier: Apache-2.0
"""What the engine itself asks of torch on an interior rank: every op costs the host, most the device too.

The triton engine and cuDNN are stood in for, so what is counted is the glue between them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cptransport.engines import (
    Finished,
    KDAInputs,
    KDAOptions,
    LocalSegment,
    Need,
    OutputGrads,
    Saved,
)
from cptransport_cudnn_summary import interior, resolve
from cptransport_cudnn_summary.engine import KDA_ENGINE

HEADS, DIM = 2, 4
#: Ops that only describe memory, or only allocate it.
_FREE = {
    *(
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "empty",
        "empty_like",
        "expand",
        "new_empty",
        "permute",
    ),
    *(
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "t",
        "transpose",
        "unbind",
        "unsqueeze",
        "unsqueeze_",
        "view",
    ),
}


class _Ops(TorchDispatchMode):
    """Names of the ops that are called, none of those inside others."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def work(self) -> list[str]:
        """Those that run something, since the last time this was asked."""
        found, self.names = [name for name in self.names if name not in _FREE], []
        return found


class _Triton:
    """In the triton engine's place; the tables it would write are ours to look at."""

    def __init__(self, o: Tensor) -> None:
        self.o = o
        self.segments: list[Sequence[LocalSegment]] = []

    def forward_local(
        self,
        inputs: KDAInputs,
        segments: Sequence[LocalSegment],
        need: Sequence[Need],
        out: Mapping[str, Tensor],
    ) -> None:
        assert {name: table.shape[2:] for name, table in out.items()} == {
            "state": (DIM, DIM),
            "transition": (DIM, DIM),
        }
        self.segments.append(segments)

    def forward_finish(self, local: None, incoming: Callable[[], Tensor]) -> Finished:
        assert incoming().is_contiguous()
        return Finished(self.o, None, Saved(()))

    def backward_local(
        self, saved: Saved, grad: OutputGrads, need: Sequence[Need], out: Mapping[str, Tensor]
    ) -> None:
        assert [(each.state, each.transition) for each in need] == [(True, False)] * len(need)
        assert list(out) == ["state"]


def passes(segments: Sequence[LocalSegment]) -> dict[str, list[str]]:
    """Run both directions on a rank of such segments, twice; return the second one's ops."""
    tokens = segments[-1].stop
    x = [torch.rand(1, tokens, HEADS, DIM, requires_grad=True) for _ in range(3)]
    g = -torch.rand(1, tokens, HEADS, DIM)
    options = KDAOptions(scale=DIM**-0.5)
    beta = torch.rand(1, tokens, HEADS)
    inputs = KDAInputs(*x, g, beta, None, None, None, options, outgoing=False)
    rows = len(segments)
    tables = [torch.rand(rows, HEADS, DIM, DIM) for _ in range(2)]
    out = {name: torch.empty(rows, HEADS, DIM, DIM) for name in ("state", "transition")}
    need = (Need(True, True),) * rows
    do = torch.rand(1, tokens, HEADS, DIM)
    found = {}
    for _ in range(2):
        with torch.no_grad(), _Ops() as ops:
            local = KDA_ENGINE.forward_local(inputs, segments, need, out)
            found["forward_local"] = ops.work()
            finished = KDA_ENGINE.forward_finish(local, lambda: tables[0])
            found["forward_finish"] = ops.work()
            back = KDA_ENGINE.backward_local(finished.saved, OutputGrads(do, None), need, out)
            found["backward_local"] = ops.work()
            grads = KDA_ENGINE.backward_finish(back, lambda: tables[1])
            found["backward_finish"] = ops.work()
    for name, given in zip("qkvg", (*x, g), strict=True):
        grad = grads.inputs[name]
        assert grad is not None
        assert grad.shape == given.shape
    return found


FORWARD, BACKWARD = "kimi_delta_attention_fwd", "kimi_delta_attention_bwd"
ONE = [LocalSegment(0, 32, 0, first=False, last=False)]
TWO = [LocalSegment(0, 32, 0, False, False), LocalSegment(32, 64, 0, False, False)]


@pytest.mark.parametrize("segments", [ONE, TWO], ids=["one", "zigzag"])
def test_interior_rank_by_the_triton_engine(
    segments: list[LocalSegment], use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States from one layout to the other, five times; nothing else beside cuDNN's backward."""
    use("hopper")
    engine = _Triton(torch.rand(1, segments[-1].stop, HEADS, DIM))
    monkeypatch.setattr(interior, "_engine", lambda: engine)
    monkeypatch.setattr(resolve, "_triton_declines", lambda kind: None)
    assert passes(segments) == {
        "forward_local": ["copy_", "copy_"],
        "forward_finish": ["clone"],
        "backward_local": ["copy_", "copy_"],
        "backward_finish": [BACKWARD],
    }
    # What the triton engine makes of segments, it keeps by the object.
    assert engine.segments[0] is engine.segments[1]


def test_interior_rank_from_the_identity(
    use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run from zero for E and outputs, one from the identity for M and R; then ``o += R X0``."""
    use("hopper")
    monkeypatch.setenv("CULA_CP_CUDNN_INTERIOR", "identity")
    found = passes(ONE)
    identity = ["new_zeros", "fill_", "new_zeros", FORWARD]
    assert found == {
        "forward_local": ["new_zeros", FORWARD, "copy_", *identity, "copy_"],
        "forward_finish": ["baddbmm_"],
        "backward_local": ["bmm", "copy_", "copy_"],
        "backward_finish": [BACKWARD],
    }
