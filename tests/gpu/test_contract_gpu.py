# SPDX-License-Identifier: Apache-2.0
"""The contract suite on CUDA tensors: every backend at 2 and 4 ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import rig

from cptransport.testing.contract import TransportContract
from cptransport.testing.pool import RankPool

pytestmark = pytest.mark.gpu

#: Their subject is how transports come and go, or which groups have some.
COME_AND_GO = ("cptransport.testing.contract_lifetime", "cptransport.testing.contract_groups")
#: Cycles of creating and closing over NVSHMEM, which take seconds each.
CYCLES = 5


class OnTheRig(TransportContract):
    """Ranks where the rig puts them."""

    __test__ = False
    device = rig.DEVICE
    timeout_s = 8.0
    #: Whether creating a transport starts a library that is better kept between tests.
    starts_slowly = False

    def pool(self, world_size: int) -> RankPool:
        return rig.serving(self.backend, world_size)

    def run(
        self, case: Callable[..., Any], world_size: int, *, watchdog_s: float = 0, **kwargs: Any
    ) -> list[Any]:
        if self.starts_slowly:
            keep = case.__module__ not in COME_AND_GO and "exits" not in kwargs
            rig.hold(self.pool(world_size), keep)
            if "cycles" in kwargs:
                kwargs["cycles"] = min(kwargs["cycles"], CYCLES)
        limit = watchdog_s or rig.WATCHDOG_S
        return super().run(case, world_size, watchdog_s=limit, **kwargs)


def _suite(backend: str, ranks: int) -> type[OnTheRig]:
    name = "Test" + "".join(map(str.capitalize, backend.split("_"))) + str(ranks)
    members = {
        "__doc__": f"``{backend}`` with {ranks} ranks.",
        "__module__": __name__,
        "backend": rig.named(backend),
        "starts_slowly": backend.startswith("nvshmem"),
        "world_sizes": (ranks,),
        "ranks_per_device": rig.per_device(ranks),
    }
    return type(name, (OnTheRig,), members)


#: ``TestNccl2`` and so on; gloo carries CUDA tensors through the host.
SUITES = [_suite(backend, ranks) for backend in (*rig.BACKENDS, "gloo") for ranks in rig.RANKS]
globals().update({suite.__name__: suite for suite in SUITES})
