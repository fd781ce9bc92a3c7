# SPDX-License-Identifier: Apache-2.0
"""A package ``fla`` with the communication seam of FLA 0.6.0 and none of its kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

COMM = """
import torch
import torch.distributed as dist


def all_gather_into_tensor(inp, out=None, group=None, async_op=False):
    world_size = dist.get_world_size(group=group)
    if out is None:
        out = torch.empty(world_size, *inp.shape, device=inp.device, dtype=inp.dtype)
    # gloo wants the rows joined, unlike NCCL
    handle = dist.all_gather_into_tensor(out.flatten(0, 1), inp, group=group, async_op=async_op)
    return out, handle


def send_recv_fwd(send_tensor, group):
    gathered, _ = all_gather_into_tensor(send_tensor, group=group)
    rank = dist.get_rank(group)
    return gathered[rank - 1].clone() if rank else torch.zeros_like(send_tensor)
"""

PACKAGE = """
from .comm import all_gather_into_tensor, send_recv_fwd
"""

#: An op whose forward and backward depend on what other ranks have, in rank order, like FLA's.
USER = """
import torch
import torch.distributed as dist
from fla.ops.cp.comm import all_gather_into_tensor


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        rank = dist.get_rank(group)
        gathered, handle = all_gather_into_tensor(x.T.contiguous(), group=group, async_op=True)
        handle.wait()
        return x + sum((0.5 ** (rank - r) * gathered[r].T for r in range(rank)), torch.zeros_like(x))

    @staticmethod
    def backward(ctx, grad):
        rank, size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        gathered, _ = all_gather_into_tensor(grad.contiguous(), group=ctx.group)
        back = sum((0.5 ** (r - rank) * gathered[r] for r in range(rank + 1, size)), torch.zeros_like(grad))
        return grad + back, None


def scan(x, group=None):
    return _Scan.apply(x, group)
"""

Edit = tuple[str, str] | None
Make = Callable[..., Path]


@pytest.fixture
def make_fla(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that puts such a package on ``sys.path``; files may be edited, or left out (None)."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]

    def make(*, package: Edit = ("", ""), comm: Edit = ("", ""), user: Edit = ("", "")) -> Path:
        folder = tmp_path / "fla" / "ops" / "cp"
        folder.mkdir(parents=True)
        (tmp_path / "fla" / "__init__.py").write_text("__version__ = '9.9'\n")
        (tmp_path / "fla" / "ops" / "__init__.py").write_text("")
        files = (
            ("__init__", PACKAGE, package),
            ("comm", COMM, comm),
            ("chunk_delta_h", USER, user),
        )
        for name, text, edit in files:
            if edit is not None:
                assert edit[0] in text
                (folder / f"{name}.py").write_text(text.replace(*edit))
        forget()
        monkeypatch.syspath_prepend(tmp_path)
        return tmp_path

    yield make
    forget()
