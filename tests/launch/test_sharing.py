# SPDX-License-Identifier: Apache-2.0
"""The environment of ranks that share a GPU."""

from __future__ import annotations

import pytest

from cptransport.env import PREFIX
from cptransport.launch import (
    MARKER,
    banner,
    daemon_environment,
    ranks_per_device,
    sharing_environment,
)

MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


@pytest.mark.parametrize(("ranks", "share"), [(2, "50"), (3, "33"), (4, "25"), (300, "1")])
def test_shares_do_not_add_up_to_more_than_the_gpu(ranks: int, share: str) -> None:
    found = sharing_environment(ranks, {})
    assert found["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == share


def test_nccl_is_told_what_it_needs() -> None:
    found = sharing_environment(2, {})
    assert found["NCCL_HOSTID"].format(rank=0) != found["NCCL_HOSTID"].format(rank=1)
    assert (found["NCCL_SOCKET_IFNAME"], found["NCCL_IB_DISABLE"]) == ("lo", "1")


def test_multicast_is_off_unless_set_and_never_touched_where_it_is_set() -> None:
    assert MULTICAST.items() <= sharing_environment(2, {}).items()
    assert MULTICAST.items() <= sharing_environment(2, dict.fromkeys(MULTICAST, "")).items()
    given = dict.fromkeys(MULTICAST, "as it was")
    assert not MULTICAST.keys() & sharing_environment(2, given).keys()


@pytest.mark.parametrize(
    ("visible", "daemon", "plain", "client"),
    [
        (None, "0", "0", "0"),
        ("2", "2", "2", "0"),
        ("3, 1", "3", "3", "0"),
        ("GPU-8932f937,1", "GPU-8932f937", "GPU-8932f937", "GPU-8932f937"),
        ("", None, None, None),
    ],
)
def test_all_ranks_get_the_first_visible_gpu(
    visible: str | None, daemon: str | None, plain: str | None, client: str | None
) -> None:
    given = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    name = "CUDA_VISIBLE_DEVICES"
    assert daemon_environment(given).get(name) == daemon
    assert sharing_environment(2, given).get(name) == plain
    assert sharing_environment(2, given, mps=True).get(name) == client
    assert sharing_environment(2, given)["LOCAL_RANK"] == "0"


def test_the_marker_gives_the_banner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER, raising=False)
    assert ranks_per_device() == 1
    assert banner() is None
    monkeypatch.setenv(MARKER, sharing_environment(4, {})[MARKER])
    assert ranks_per_device() == 4
    assert "4 ranks share one GPU" in str(banner())
    assert "no NVLink or network figures" in str(banner())


def test_nothing_is_named_like_a_declared_variable() -> None:
    assert not [name for name in sharing_environment(2, {}) if name.startswith(PREFIX)]
