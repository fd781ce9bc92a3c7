# SPDX-License-Identifier: Apache-2.0
"""What contract tests share: clause numbers, figures, parametrisation by world size, running a case on the pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import pytest

from cptransport.testing.pool import RankPool, pool
from cptransport.transport import Capabilities

__all__ = ["CONTRACT_VERSION", "FULL", "SHORT", "ContractTests", "Figures", "clause", "clauses_of"]

#: Version of the contract that these tests check; ``docs/contract.md`` has the same number.
CONTRACT_VERSION = "1.0"

#: A wait that ends must do so within its limit and this many seconds.
GRACE_S = 2.0

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Figures:
    """How long and how large; the short ones run in CI, the full ones are marked ``slow``.

    Attributes:
        delay_s: how late a delayed rank is.
        rounds: generations with jitter.
        barriers: barriers with jitter.
        cycles: create, use, close.
        large_bytes: of the largest part.
        jitter_s: largest random pause.
    """

    delay_s: float
    rounds: int
    barriers: int
    cycles: int
    large_bytes: int
    jitter_s: float


SHORT = Figures(delay_s=0.3, rounds=200, barriers=60, cycles=8, large_bytes=4 << 20, jitter_s=0.002)
FULL = Figures(
    delay_s=2.0, rounds=1000, barriers=1000, cycles=20, large_bytes=64 << 20, jitter_s=0.05
)


def clause(
    *numbers: str,
    ranks: int = 1,
    processes: bool = False,
    largest: bool = False,
    **capabilities: bool,
) -> Callable[[F], F]:
    """Say which clauses of ``docs/contract.md`` a test checks and what it needs.

    Args:
        numbers: ``"C7"`` and so on.
        ranks: smallest world size at which it shows anything.
        processes: ranks must be processes (it ends them, or makes groups of them).
        largest: run at the largest world size only, since ranks have to start anew.
        capabilities: flags that the transport must claim, else the test is skipped with that
            reason.
    """

    def mark(function: F) -> F:
        function.contract = {  # type: ignore[attr-defined]
            "clauses": numbers,
            "ranks": ranks,
            "processes": processes,
            "largest": largest,
            "capabilities": capabilities,
        }
        return function

    return mark


def clauses_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the clauses that a test cites."""
    contract: Mapping[str, Any] = getattr(function, "contract", {})
    return tuple(contract.get("clauses", ()))


class ContractTests:
    """Base of the groups of contract tests."""

    #: Name of the backend, or ``module:ATTR``.
    backend: ClassVar[str] = ""
    #: World sizes to run at.
    world_sizes: ClassVar[Sequence[int]] = (1, 2, 3, 4)
    #: ``"cpu"`` or ``"cuda"``.
    device: ClassVar[str] = "cpu"
    #: How many ranks share a device; more than 1 needs the capability ``shared_device``.
    ranks_per_device: ClassVar[int] = 1
    #: None: threads for the backend ``threads``, processes for all others.
    processes: ClassVar[bool | None] = None
    #: Limit of waits where a test does not set its own.
    timeout_s: ClassVar[float] = 20.0

    def make_options(self) -> dict[str, str]:
        """Return environment variables of the rank processes."""
        return {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run every test at every world size at which it shows anything, with short and full figures."""
        needs = getattr(metafunc.function, "contract", {})
        if "world_size" in metafunc.fixturenames:
            sizes = [size for size in self.world_sizes if size >= needs.get("ranks", 1)]
            if needs.get("largest"):
                sizes = sizes[-1:]
            few = pytest.mark.skip(reason=f"shows nothing below {needs.get('ranks')} ranks")
            metafunc.parametrize("world_size", sizes or [pytest.param(0, marks=few)])
        if "figures" in metafunc.fixturenames:
            full = pytest.param(FULL, marks=pytest.mark.slow, id="full")
            metafunc.parametrize("figures", [pytest.param(SHORT, id="short"), full])

    @property
    def by_processes(self) -> bool:
        """Whether ranks are processes."""
        return self.backend != "threads" if self.processes is None else self.processes

    def pool(self, world_size: int) -> RankPool:
        """Return the pool that runs the cases."""
        return pool(
            self.backend,
            world_size,
            self.ranks_per_device,
            processes=self.processes,
            device=self.device,
            env=self.make_options(),
        )

    def run(
        self, case: Callable[..., Any], world_size: int, *, watchdog_s: float = 60.0, **kwargs: Any
    ) -> list[Any]:
        """Run a case that makes its own transports (``fn(ranks, **kwargs)``) on all ranks."""
        figures = kwargs.get("figures")
        if isinstance(figures, Figures):
            kwargs["figures"] = asdict(figures)
            if figures is FULL:
                watchdog_s = max(watchdog_s, 600.0)
        return self.pool(world_size).run(
            case,
            transport=False,
            timeout_s=watchdog_s,
            transport_timeout_s=self.timeout_s,
            **kwargs,
        )

    @pytest.fixture(autouse=True)
    def _needs(self, request: pytest.FixtureRequest) -> None:
        needs = getattr(request.function, "contract", None)
        assert needs is not None, f"{request.function.__name__} cites no clause"
        if needs["processes"] and not self.by_processes:
            pytest.skip("ranks are threads of one process here")
        if needs["capabilities"]:
            claimed = self.capabilities()
            for name, wanted in needs["capabilities"].items():
                if getattr(claimed, name) != wanted:
                    pytest.skip(f"the transport {'lacks' if wanted else 'has'} capability {name}")

    def capabilities(self) -> Capabilities:
        """Return what a live transport claims."""
        key = (self.backend, self.device)
        if key not in _claimed:
            found = self.run(_capabilities, min(self.world_sizes))
            _claimed[key] = found[0]
        return _claimed[key]


_claimed: dict[tuple[str, str], Capabilities] = {}


def _capabilities(ranks: Any) -> Capabilities:
    claimed: Capabilities = ranks.create().capabilities
    return claimed
