# SPDX-License-Identifier: Apache-2.0
"""Routing FLA's communication: the same bits, on and off again, and versions that it does not fit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptransport.errors import CPTransportError, OpInputError
from cptransport.integrations import fla as integration
from cptransport.select import create_transport
from cptransport.testing import RankPool, Ranks
from cptransport.transport import BoundaryTransport

Make = Callable[..., Path]

# FLA's own call, in newer versions of torch.
pytestmark = pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.*:FutureWarning")


# ------------------------------------------------------------------------------------------ on ranks


def _step(group: Any = None) -> list[torch.Tensor]:
    """Output, gradient and halo of a step through FLA."""
    from fla.ops.cp import send_recv_fwd
    from fla.ops.cp.chunk_delta_h import scan

    rank = dist.get_rank(group)
    made = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(5, 3, generator=made, requires_grad=True)
    y = scan(x, group)
    y.backward(torch.randn(5, 3, generator=made))
    assert x.grad is not None
    return [y.detach(), x.grad, send_recv_fwd(torch.full((2, 3), float(rank)), group)]


def _equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def _on_and_off(transport: BoundaryTransport) -> None:
    from fla.ops.cp import comm

    plain = _step()
    assert comm.dist is dist
    with integration.routed(transport) as routing:
        inside = _step()
    assert routing.calls == 3
    assert comm.dist is dist
    after = _step()
    assert routing.calls == 3
    assert _equal(plain, inside)
    assert _equal(plain, after)
    peers = transport.world_size - 1
    assert transport.stats().bytes_sent == transport.stats().bytes_received == peers * 4 * (30 + 6)

    routing = integration.install(transport)
    for _ in range(3):  # buffers of earlier generations are used again
        assert _equal(plain, _step())
    assert routing.calls == 9
    with pytest.raises(OpInputError, match="installed for this group already"):
        integration.install(transport)
    integration.uninstall()
    integration.uninstall()
    assert comm.dist is dist


def _one_group_of_two(ranks: Ranks) -> list[int]:
    """Another group's calls go where they went."""
    group = ranks.subgroup([0, 1], [2, 3])
    plain = [_step(group), _step()]
    transport = ranks.create(group)
    with integration.routed(transport, group) as routing:
        routed = [_step(group), _step()]
        with integration.routed(ranks.create()) as everybody:
            both = [_step(group), _step()]
        assert _equal(plain[1], _step())
    for each in (routed, both):
        assert all(_equal(a, b) for a, b in zip(plain, each, strict=True))
    with pytest.raises(OpInputError, match=r"rank \d of 2, the group rank \d of 4"):
        integration.install(transport)
    return [routing.calls, everybody.calls]


def _an_error_leaves_nothing(transport: BoundaryTransport) -> None:
    from fla.ops.cp import comm

    with pytest.raises(KeyError), integration.routed(transport):
        raise KeyError
    assert comm.dist is dist


def test_on_and_off_with_the_same_bits(make_fla: Make) -> None:
    make_fla()
    with RankPool("gloo", 3) as pool:
        pool.run(_on_and_off)
        pool.run(_an_error_leaves_nothing)


def test_groups_are_routed_apart(make_fla: Make) -> None:
    make_fla()
    with RankPool("gloo", 4) as pool:
        assert pool.run(_one_group_of_two, transport=False) == [[6, 3]] * 4


# ------------------------------------------------------------------------------------- other versions


@pytest.fixture
def alone() -> Iterator[BoundaryTransport]:
    """One rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    transport = create_transport(backend="loopback")
    yield transport
    transport.close()
    dist.destroy_process_group()


def test_one_rank_is_routed_too(make_fla: Make, alone: BoundaryTransport) -> None:
    make_fla()
    plain = _step()
    with integration.routed(alone) as routing:
        assert _equal(plain, _step())
    assert routing.calls == 3


EMPTY = ("from .comm import all_gather_into_tensor, send_recv_fwd", "")


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        ({"comm": None, "package": EMPTY}, "there is no module fla.ops.cp.comm"),
        (
            {"comm": ("all_gather_into_tensor", "gather"), "package": EMPTY},
            "has no all_gather_into_tensor",
        ),
        ({"comm": ("inp, out=None", "out, inp=None")}, "takes ('out', 'inp', "),
        (
            {"comm": ("async_op=False)", "async_op=False, stream=None)")},
            "'async_op', 'stream'), not ('inp', 'out', 'group', 'async_op')",
        ),
        (
            {"comm": ("= dist.all_gather", "= torch.distributed.all_gather")},
            "does not call torch.distributed as dist.all_gather_into_tensor",
        ),
        (
            {"comm": ("import torch.distributed as dist", "from . import dist")},
            "does not call torch.distributed as dist.all_gather_into_tensor",
        ),
        ({"user": None}, "there is no module fla.ops.cp.chunk_delta_h"),
        (
            {"user": ("from fla.ops.cp.comm import", "from fla.ops.cp.other import")},
            "chunk_delta_h does not communicate by fla.ops.cp.comm.all_gather_into_tensor",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "-",
)
def test_a_seam_that_moved(
    make_fla: Make, alone: BoundaryTransport, edits: dict[str, Any], words: str
) -> None:
    folder = make_fla(**edits) / "fla" / "ops" / "cp"
    (folder / "dist.py").write_text("from torch.distributed import *\n")
    (folder / "other.py").write_text("def all_gather_into_tensor(inp, group): ...\n")
    with pytest.raises(integration.FLASeamError) as caught:
        integration.install(alone)
    assert words in str(caught.value)
    assert "communicates in another way than 0.6.0" in str(caught.value)
    assert isinstance(caught.value, CPTransportError)


def test_no_fla(alone: BoundaryTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(integration.FLASeamError, match="pip install fla-core==0.6.0"):
        integration.install(alone)


def test_what_a_missing_dependency_of_fla_says_is_kept(
    make_fla: Make, alone: BoundaryTransport
) -> None:
    make_fla(user=("import torch\n", "import no_such_dependency\n"))
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        integration.install(alone)


def test_importing_the_integration_imports_no_fla() -> None:
    before = set(sys.modules)
    importlib.reload(integration)
    assert not [name for name in set(sys.modules) - before if name.partition(".")[0] == "fla"]
