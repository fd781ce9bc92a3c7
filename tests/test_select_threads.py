# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks, with threads as ranks: every rank decides alike, whatever one of them meets."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cptransport
from cptransport import env, notices
from cptransport.errors import (
    BackendContractError,
    BackendError,
    BackendFallbackWarning,
    BackendMismatchError,
    BackendNotFoundError,
    BackendUnavailableError,
    CPTransportError,
    EnvVarError,
    PeerFailedError,
    TransportClosedError,
    TransportTimeoutError,
)
from cptransport.transport import BoundaryTransport, PartSpec, Slot

MakeDistribution = Callable[..., Path]

#: A plugin that serves threads through ``threads``; ``fault(rank, where)`` runs before probe and create.
PLUGIN = """
from dataclasses import replace
from cptransport import BackendUnavailableError, create_transport
from cptransport.transports import threads

made = []

def fault(rank, where):
    {fault}

def rank():
    return threads._member.rank

def probe(group, device):
    return fault(rank(), "probe")

def create(group, device, timeout_s):
    fault(rank(), "create")
    transport = threads.create_here(timeout_s)
    made.append(transport)
    fault(rank(), "made")
    return transport

BACKEND = replace(threads.BACKEND, name={name!r}, probe=probe, create=create)
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(notices, "_given", set())


@pytest.fixture
def plugin(distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a plugin."""

    def make(name: str, fault: str = "pass") -> None:
        module = f"cpt_agree_{name}"
        source = PLUGIN.format(name=name, fault=fault)
        folder = distribution(
            f"{name}-dist", backends={name: f"{module}:BACKEND"}, modules={module: source}
        )
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(folder)

    return make


def exchange(transport: BoundaryTransport) -> list[float]:
    """Return what every rank published."""
    slot = Slot("values", (PartSpec("value", (1,), torch.float32),))
    transport.stage(slot)["value"].fill_(transport.rank)
    transport.publish(slot)
    gathered = transport.gather(slot)
    return [gathered.tensor("value", rank).item() for rank in range(transport.world_size)]


def choose(world_size: int, timeout_s: float = 10, **by_rank: Any) -> list[Any]:
    """Let every rank make a transport; a tuple as argument has one value per rank.

    Returns:
        Per rank the selection, after an exchange through the transport, or the error.
    """

    def rank_main(outer: BoundaryTransport) -> Any:
        arguments = {
            name: value[outer.rank] if isinstance(value, tuple) else value
            for name, value in by_rank.items()
        }
        try:
            made = cptransport.create_transport(timeout_s=timeout_s, **arguments)
        except CPTransportError as error:
            return error
        with made:
            assert exchange(made) == [float(rank) for rank in range(world_size)]
            return made.selection, getattr(made, "strict", None)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BackendFallbackWarning)
        return cptransport.threads.run(rank_main, world_size, timeout_s=timeout_s)


def same_error(results: list[Any], kind: type[CPTransportError]) -> str:
    """Return the words of the error that all ranks raised alike."""
    assert [type(result) for result in results] == [kind] * len(results), results
    (text,) = {str(result) for result in results}
    return text


def test_auto_is_threads_inside_threads_run(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cptransport")
    for selection, strict in choose(3):
        assert selection == cptransport.Selection("auto", "default", "threads")
        assert strict is False
    (record,) = caplog.records  # rank 0's
    assert "backend threads serves 3 rank(s)" in record.getMessage()


def test_the_variable_counts_inside_threads_run_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_COMM_BACKEND", "gloo")
    reason = "gloo serves process groups, not the ranks of threads.run"
    for selection, _ in choose(2):
        assert selection == cptransport.Selection(
            "gloo", "environment", "threads", (("gloo", reason),)
        )


def test_loopback_does_not_stand_in_for_several_ranks() -> None:
    text = same_error(choose(2, backend="loopback", strict=True), BackendUnavailableError)
    assert "loopback serves one rank, this group has 2" in text
    assert [selection.chosen for selection, _ in choose(1, backend="loopback")] == ["loopback"]


@pytest.mark.parametrize(("world_size", "backend"), [(2, "nvshmem_signal"), (3, "nvshmem_barrier")])
def test_nvshmem_goes_by_world_size(world_size: int, backend: str) -> None:
    for selection, _ in choose(world_size, backend="nvshmem"):
        assert selection.requested == "nvshmem"
        assert [name for name, _ in selection.passed_over] == [backend]


def test_an_alias_and_what_it_stands_for_are_alike() -> None:
    results = choose(2, backend=("nvshmem", "nvshmem_signal"))
    assert [selection.requested for selection, _ in results] == ["nvshmem", "nvshmem_signal"]
    assert {selection.chosen for selection, _ in results} == {"threads"}


def test_one_warning_per_process_and_reason() -> None:
    def rank_main(outer: BoundaryTransport) -> None:
        for _ in range(2):
            cptransport.create_transport(backend="gloo", timeout_s=10).close()

    with pytest.warns(BackendFallbackWarning) as caught:
        cptransport.threads.run(rank_main, 3, timeout_s=10)
    assert len(caught) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_different_names_are_a_mismatch_everywhere(strict: bool) -> None:
    results = choose(3, backend=("threads", "gloo", "threads"), strict=strict)
    text = same_error(results, BackendMismatchError)
    assert "ranks 0, 2: 'threads'; rank 1: 'gloo'" in text


def test_a_name_against_auto_is_a_mismatch() -> None:
    text = same_error(choose(2, backend=("threads", None)), BackendMismatchError)
    assert "rank 0: 'threads'; rank 1: 'auto'" in text


def test_one_unknown_name_is_not_found_everywhere() -> None:
    text = same_error(choose(3, backend=("gloo", "gloo", "glooo")), BackendNotFoundError)
    assert "ranks 0, 1: asked for 'gloo'; rank 2: no backend is named 'glooo'" in text


def test_one_wrong_argument_is_an_error_everywhere() -> None:
    text = same_error(choose(2, device=("cpu", "cpux")), BackendError)
    assert "rank 1: device 'cpux' is not valid" in text


def test_strict_on_one_rank_is_strict_on_all() -> None:
    results = choose(2, backend="threads", strict=(False, True))
    assert [strict for _, strict in results] == [True, True]
    same_error(choose(2, backend="gloo", strict=(False, True)), BackendUnavailableError)


@pytest.mark.parametrize("where", ["probe", "create", "made"])
def test_what_one_rank_refuses_is_passed_over_by_all(
    where: str, plugin: Callable[..., None]
) -> None:
    name = f"refuses_{where}"
    refuse = f"if (rank, where) == (1, {where!r}): raise BackendUnavailableError('no peer access')"
    plugin(name, refuse)
    results = choose(3, backend=name)
    for selection, _ in results:
        assert selection.chosen == "threads"
        assert selection.passed_over == ((name, "rank 1: no peer access"),)
    text = same_error(choose(3, backend=name, strict=True), BackendUnavailableError)
    assert "rank 1: no peer access" in text
    module = sys.modules[f"cpt_agree_{name}"]
    assert len(module.made) == {"probe": 0, "create": 4, "made": 6}[where]
    for transport in module.made:
        if (transport.rank, where) == (1, "made"):
            continue  # a backend frees itself what it does not return
        with pytest.raises(TransportClosedError):
            transport.check()


@pytest.mark.parametrize(
    ("where", "kind"), [("probe", BackendContractError), ("create", BackendError)]
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_breaks_on_one_rank_is_an_error_on_all(
    where: str, kind: type[CPTransportError], strict: bool, plugin: Callable[..., None]
) -> None:
    name = f"breaks_{where}"
    plugin(name, f"if (rank, where) == (2, {where!r}): raise OSError('bad handle')")
    results = choose(3, backend=name, strict=strict)
    text = same_error(results, kind)
    assert "rank 2: backend" in text
    assert "OSError: bad handle" in text
    assert [type(result.__cause__) for result in results] == [type(None), type(None), OSError]


def test_the_lasting_error_is_what_was_met_not_who_waited(plugin: Callable[..., None]) -> None:
    plugin(
        "stuck",
        "import time; from cptransport import TransportTimeoutError\n"
        "    if where == 'create' and rank == 1: raise OSError('bad handle')\n"
        "    if where == 'create': time.sleep(0.3); raise TransportTimeoutError('waited for rank 1')",
    )
    text = same_error(choose(3, backend="stuck"), BackendError)
    assert "ranks 0, 2: waited for rank 1; rank 1: backend" in text


def test_a_rank_that_takes_its_whole_limit_to_fail_is_still_heard(
    plugin: Callable[..., None],
) -> None:
    plugin(
        "slow_to_fail",
        "import time\n"
        "    if (rank, where) == (0, 'create'): raise BackendUnavailableError('no memory')\n"
        "    if where == 'create': time.sleep(1.2); raise BackendUnavailableError('no peer')",
    )
    for selection, _ in choose(2, timeout_s=1, backend="slow_to_fail"):
        assert selection.passed_over == (("slow_to_fail", "rank 0: no memory; rank 1: no peer"),)


def test_a_variable_that_one_candidate_declares_is_checked_for_all(
    plugin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("deep", "pass")
    module = sys.modules["cpt_agree_deep"] = __import__("cpt_agree_deep")
    variables = (cptransport.Variable("CULA_CP_DEPTH", "2", ("2", "3")),)
    monkeypatch.setattr(module, "BACKEND", replace(module.BACKEND, variables=variables))
    monkeypatch.setenv("CULA_CP_DEPTH", "9")
    text = same_error(choose(2, backend="deep"), EnvVarError)
    assert text == "CULA_CP_DEPTH=9 is not valid; choose one of 2, 3"


def test_a_backend_may_make_its_transport_of_another(plugin: Callable[..., None]) -> None:
    plugin("wrapper", "pass")
    module = __import__("cpt_agree_wrapper")

    def create(group: Any, device: Any, timeout_s: float) -> BoundaryTransport:
        return cptransport.create_transport(group, device=device, timeout_s=timeout_s)

    module.BACKEND = replace(module.BACKEND, create=create)
    for selection, _ in choose(3, backend="wrapper"):
        assert selection.chosen == "wrapper"


def test_a_rank_that_never_comes_is_named_within_the_limit() -> None:
    def rank_main(outer: BoundaryTransport) -> Any:
        if outer.rank == 1:
            time.sleep(1.2)
            return None
        start = time.monotonic()
        with pytest.raises(
            TransportTimeoutError, match=r"choosing a backend: ranks \[1\]"
        ) as caught:
            cptransport.create_transport(timeout_s=0.5)
        assert 0.5 <= time.monotonic() - start < 2.5
        return caught.value.missing

    assert cptransport.threads.run(rank_main, 3, timeout_s=10) == [(1,), None, (1,)]


def test_a_rank_that_comes_too_late_learns_it_at_once() -> None:
    def rank_main(outer: BoundaryTransport) -> str:
        if outer.rank == 1:
            time.sleep(1.0)
        start = time.monotonic()
        try:
            cptransport.create_transport(timeout_s=30 if outer.rank == 1 else 0.4)
        except (PeerFailedError, TransportTimeoutError) as error:
            assert time.monotonic() - start < 5
            return type(error).__name__
        return "made"

    expected = ["TransportTimeoutError", "PeerFailedError", "TransportTimeoutError"]
    assert cptransport.threads.run(rank_main, 3, timeout_s=10) == expected


def test_a_rank_slower_than_half_the_limit_is_no_error() -> None:
    def rank_main(outer: BoundaryTransport) -> str:
        time.sleep(0.5 if outer.rank == 1 else 0)
        with cptransport.create_transport(timeout_s=1) as transport:
            return transport.selection.chosen

    assert cptransport.threads.run(rank_main, 2, timeout_s=10) == ["threads"] * 2


def test_a_rank_that_leaves_in_its_own_way_ends_the_others_wait(
    plugin: Callable[..., None],
) -> None:
    plugin("interrupted", "if (rank, where) == (1, 'create'): raise KeyboardInterrupt")

    def rank_main(outer: BoundaryTransport) -> str:
        start = time.monotonic()
        try:
            cptransport.create_transport(backend="interrupted", timeout_s=30)
        except (KeyboardInterrupt, PeerFailedError) as error:
            assert time.monotonic() - start < 5
            return f"{type(error).__name__}: {error}"
        return "made"

    results = cptransport.threads.run(rank_main, 3, timeout_s=30)
    assert results[1] == "KeyboardInterrupt: "
    assert results[0] == results[2] == "PeerFailedError: rank 1 failed: KeyboardInterrupt: "
    for transport in sys.modules["cpt_agree_interrupted"].made:
        with pytest.raises(TransportClosedError):
            transport.check()
