# SPDX-License-Identifier: Apache-2.0
"""What only ``gloo`` can get wrong: lazy connections, a store that dies with its host, exit without close."""

from __future__ import annotations

import gc
import os
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cptransport.errors import PeerFailedError, TransportTimeoutError
from cptransport.testing import RankPool, Ranks
from cptransport.testing.contract_bytes import exchange_all, fill
from cptransport.transport import PartSpec, Slot

SLOT = Slot("slot", (PartSpec("x", (100,), torch.float32),))
EXIT = 5


def dies_before_first_use(ranks: Ranks, limit_s: float) -> float:
    transport = ranks.create(ranks.subgroup([0, 1, 2]), timeout_s=limit_s)
    ranks.sync()
    if ranks.rank == 0:
        os._exit(EXIT)
    start = time.monotonic()
    with pytest.raises((PeerFailedError, TransportTimeoutError)):
        exchange_all(transport, SLOT, 1)
    waited = time.monotonic() - start
    transport.close()
    return waited


def dies_before_the_group_is_made(ranks: Ranks, limit_s: float) -> float:
    """The rank is gone when the others make their transport."""
    if ranks.rank == 0:
        os._exit(EXIT)
    time.sleep(0.3)
    start = time.monotonic()
    with pytest.raises((PeerFailedError, TransportTimeoutError)):
        ranks.create(timeout_s=limit_s)
    return time.monotonic() - start


def host_of_the_store_dies(ranks: Ranks, limit_s: float) -> str:
    """The group's store lives in rank 0, as with torchrun-less launches, and dies with it."""
    if ranks.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, ranks.world_size, True, timedelta(seconds=30), False)
        ranks.tell("port", str(store.port))
    else:
        port = int(ranks.ask("port"))
        store = dist.TCPStore("127.0.0.1", port, ranks.world_size, False, timedelta(seconds=30))
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=ranks.rank, world_size=ranks.world_size)
    transport = ranks.create(timeout_s=limit_s)
    exchange_all(transport, SLOT, 1)
    ranks.sync()
    if ranks.rank == 0:
        os._exit(EXIT)
    start = time.monotonic()
    with pytest.raises((PeerFailedError, TransportTimeoutError)) as caught:
        exchange_all(transport, SLOT, 2)
    assert time.monotonic() - start < limit_s + 2
    transport.close()
    return str(caught.value)


def leaves_transports_open(ranks: Ranks) -> int:
    kept = ranks.create()
    dropped = ranks.create()
    exchange_all(kept, SLOT, 1)
    exchange_all(dropped, SLOT, 1)
    ranks.forget(kept)
    ranks.forget(dropped)
    globals()["_kept"] = kept
    del dropped
    gc.collect()
    return ranks.rank


def beside_the_users_group(ranks: Ranks) -> list[float]:
    """A transport that breaks leaves the user's own group as it was, and no thread inside gloo."""
    transport = ranks.create(timeout_s=0.5)
    if ranks.rank != 0:
        time.sleep(0.7)
    with pytest.raises((PeerFailedError, TransportTimeoutError)):
        transport.barrier()
    transport.close()
    # One on its way out of gloo would abort an interpreter that ends now.
    assert "cpt-gloo-wait" not in [thread.name for thread in threading.enumerate()]
    total = torch.tensor([float(ranks.rank)])
    dist.all_reduce(total)
    return total.tolist()


def waits_for_one_when_another_is_gone(ranks: Ranks, limit_s: float) -> None:
    """Rank 2 gives up waiting for rank 1, who lives; the connection to rank 0, the next one, is closed."""
    transport = ranks.create(timeout_s=limit_s)
    exchange_all(transport, SLOT, 1)
    ranks.sync()
    if ranks.rank == 0:
        os._exit(EXIT)
    if ranks.rank == 1:
        ranks.ask("given up")
        return
    fill(transport, SLOT, 2)
    transport.publish(SLOT, to=[])
    with pytest.raises((PeerFailedError, TransportTimeoutError)):
        transport.fetch(SLOT, "x", source=1)
    transport.close()
    assert "cpt-gloo-wait" not in [thread.name for thread in threading.enumerate()]
    ranks.tell("given up", "")


@pytest.mark.parametrize("case", [dies_before_first_use, dies_before_the_group_is_made])
def test_a_death_before_the_first_use_with_lazy_connections(case: Any) -> None:
    with RankPool("gloo", 3, env={"TORCH_GLOO_LAZY_INIT": "1"}) as pool:
        waits = pool.run(case, transport=False, limit_s=2.0, exits={0: EXIT}, timeout_s=30)
        assert max(waits[1:]) < 4.0


def test_the_host_of_the_store_dies() -> None:
    with RankPool("gloo", 3) as pool:
        found = pool.run(
            host_of_the_store_dies, transport=False, limit_s=3.0, exits={0: EXIT}, timeout_s=40
        )
        assert all("0" in text or "store is gone" in text for text in found[1:])


def test_transports_that_were_not_closed_do_not_hinder_the_end() -> None:
    with RankPool("gloo", 2) as pool:
        broken = pool.run(beside_the_users_group, transport=False)
        assert broken == [[1.0], [1.0]]
        assert pool.run(leaves_transports_open, transport=False) == [0, 1]
        start = time.monotonic()
        assert pool.close() == [0, 0]
        assert time.monotonic() - start < 8.0


def test_no_thread_stays_inside_gloo_when_the_next_rank_is_gone() -> None:
    with RankPool("gloo", 3) as pool:
        pool.run(
            waits_for_one_when_another_is_gone,
            transport=False,
            limit_s=1.0,
            exits={0: EXIT},
            timeout_s=30,
        )
