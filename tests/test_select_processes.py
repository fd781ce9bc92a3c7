# SPDX-License-Identifier: Apache-2.0
"""Agreement of ranks that are processes: environments, installations and lives of their own."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import cptransport
from cptransport import env, registry, request
from cptransport.errors import CPTransportError, TransportTimeoutError
from cptransport.testing import Ranks, run_ranks
from cptransport.transport import BoundaryTransport, PartSpec, Slot

MakeDistribution = Callable[..., Path]

WORLD_SIZE = 3
PACKAGES = ("nccl", "nvshmem_signal", "nvshmem_barrier", "cudnn_summary", "cupy_ipc")

#: A plugin that serves processes through gloo; ``fault`` runs first in create.
PLUGIN = """
from dataclasses import replace
import torch.distributed as dist
from cptransport import BackendUnavailableError
from cptransport.backend import group_store
from cptransport.transports import gloo

def create(group, device, timeout_s):
    rank = dist.get_rank(group)
    {fault}
    return gloo.BACKEND.create(group, device, timeout_s)

BACKEND = replace(gloo.BACKEND, **{{"name": {name!r}, "create": create, **dict({fields})}})
"""


@contextlib.contextmanager
def machine(variables: dict[str, str], path: str | None) -> Iterator[None]:
    """Let this rank have an environment and an installation of its own, without the five packages."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(env.PREFIX)}
    absent = {f"cptransport_{name}": None for name in PACKAGES}
    with (
        mock.patch.dict(os.environ, {**clean, **variables}, clear=True),
        mock.patch.object(sys, "path", [path, *sys.path] if path else sys.path),
        mock.patch.dict(sys.modules, absent),
    ):
        yield


def exchange(transport: BoundaryTransport) -> list[float]:
    """Return what every rank published."""
    slot = Slot("values", (PartSpec("value", (1,), torch.float32),))
    transport.stage(slot)["value"].fill_(transport.rank)
    transport.publish(slot)
    gathered = transport.gather(slot)
    return [gathered.tensor("value", rank).item() for rank in range(transport.world_size)]


def attempt(group: Any = None, **arguments: Any) -> Any:
    """Make a transport and use it; return the selection, or class, words and cause of the error."""
    try:
        with cptransport.create_transport(group, **arguments) as made:
            assert exchange(made) == [float(rank) for rank in range(made.world_size)]
            return made.selection, getattr(made, "strict", None)
    except CPTransportError as error:
        return type(error).__name__, str(error), type(error.__cause__).__name__


def choose(
    ranks: Ranks,
    *,
    variables: list[dict[str, str]] | None = None,
    paths: list[str | None] | None = None,
    ask: str | None = None,
    limit_s: float = 20,
    times: int = 1,
) -> Any:
    """Let every rank choose on a machine of its own; ``times``: again and again there."""
    mine = variables[ranks.rank] if variables else {}
    timeout_s = None if "CULA_CP_TIMEOUT_S" in mine else limit_s
    with machine(mine, paths[ranks.rank] if paths else None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [attempt(backend=ask, timeout_s=timeout_s) for _ in range(times)][-1]


def choose_with_versions(ranks: Ranks) -> Any:
    def installed_version(distribution: str) -> str:
        return f"0.{ranks.rank}" if distribution == "cptransport" else "1.0"

    with mock.patch.object(registry, "installed_version", installed_version):
        return choose(ranks)


def choose_on_hosts(ranks: Ranks, paths: list[str | None], ask: str) -> Any:
    with mock.patch.object(request, "_host", return_value=f"host-{ranks.rank // 2}"):
        return choose(ranks, paths=paths, ask=ask)


def choose_in_groups(ranks: Ranks) -> Any:
    """Ranks {0, 2} and {1, 2} and all, some with several transports open at once."""
    found = []
    for members in ([0, 2], [1, 2]):
        group = ranks.subgroup(members)
        if ranks.rank in members:
            assert cptransport.select.group_world_size(group) == 2
            found.append(attempt(group, timeout_s=ranks.timeout_s))
    first = cptransport.create_transport(timeout_s=ranks.timeout_s)
    second = cptransport.create_transport(timeout_s=ranks.timeout_s)
    values = exchange(second), exchange(first), exchange(second)
    first.close()
    second.close()
    return found, values


def outside_the_group(ranks: Ranks) -> Any:
    group = torch.distributed.new_group([0, 1], backend="gloo")
    if ranks.rank < 2:
        return None
    return attempt(group, timeout_s=ranks.timeout_s)


def say(ranks: Ranks) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("cptransport")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        choose(ranks)
        choose(ranks, ask="nccl")
        choose(ranks, ask="gloo")
    finally:
        logger.removeHandler(handler)
    return lines


def one_dies(ranks: Ranks) -> Any:
    if ranks.rank == 1:
        os._exit(17)
    start = time.monotonic()
    with pytest.raises(TransportTimeoutError, match=r"ranks \[1\]"):
        cptransport.create_transport(timeout_s=1)
    assert time.monotonic() - start < 3
    return "told"


def on_ranks(case: Callable[..., Any] = choose, **arguments: Any) -> list[Any]:
    return run_ranks(
        case,
        backend="gloo",
        world_size=WORLD_SIZE,
        transport=False,
        transport_timeout_s=20,
        **arguments,
    )


@pytest.fixture
def plugin(distribution: MakeDistribution) -> Callable[..., str]:
    """Return a function that makes a plugin and returns its folder."""

    def make(
        name: str, *, fault: str = "pass", fields: str = "", version: str = "1.0", source: str = ""
    ) -> str:
        module = f"cpt_processes_{name}"
        source = source or PLUGIN.format(name=name, fault=fault, fields=fields)
        backends, modules = {name: f"{module}:BACKEND"}, {module: source}
        return str(distribution(f"{name}-dist", version, backends=backends, modules=modules))

    return make


def same_error(results: list[Any], kind: str) -> str:
    """Return the words of the error that all ranks raised alike."""
    assert [result[0] for result in results] == [kind] * WORLD_SIZE, results
    (text,) = {result[1] for result in results}
    return str(text)


def same_choice(results: list[Any]) -> cptransport.Selection:
    (chosen,) = {selection for selection, _ in results}
    return chosen


def test_auto_is_gloo_on_cpu() -> None:
    assert same_choice(on_ranks()) == cptransport.Selection("auto", "default", "gloo")


def test_ranks_with_different_variables_mismatch_everywhere() -> None:
    variables = [{"CULA_CP_COMM_BACKEND": name} for name in ("gloo", "nccl", "gloo")]
    text = same_error(on_ranks(variables=variables), "BackendMismatchError")
    assert "ranks 0, 2: 'gloo'; rank 1: 'nccl'" in text


def test_a_misspelt_variable_on_one_rank_is_not_found_everywhere() -> None:
    variables = [{"CULA_CP_COMM_BACKEND": name} for name in ("nccl", "nccl", "ncll")]
    text = same_error(on_ranks(variables=variables), "BackendNotFoundError")
    assert "rank 2: no backend is named 'ncll'; did you mean 'nccl'?" in text


@pytest.mark.parametrize(
    "wrong", [{"CULA_CP_STRICT": "yes"}, {"CULA_CP_TIMEOUT_S": "soon"}], ids=lambda w: next(iter(w))
)
def test_an_invalid_variable_on_one_rank_is_an_error_everywhere(wrong: dict[str, str]) -> None:
    text = same_error(on_ranks(variables=[{}, wrong, {}]), "EnvVarError")
    ((name, value),) = wrong.items()
    assert f"rank 1: {name}={value} is not valid" in text


def test_strict_on_one_rank_forbids_the_fallback_on_all() -> None:
    variables = [{"CULA_CP_COMM_BACKEND": "nccl", "CULA_CP_STRICT": s} for s in ("", "1", "0")]
    text = same_error(on_ranks(variables=variables), "BackendUnavailableError")
    assert "'nccl' cannot serve here: not installed: pip install cptransport-nccl" in text


def test_without_strict_all_fall_back_to_what_auto_takes() -> None:
    chosen = same_choice(on_ranks(ask="nvshmem"))
    assert (chosen.requested, chosen.chosen) == ("nvshmem", "gloo")
    assert [name for name, _ in chosen.passed_over] == ["nvshmem_barrier"]


def test_a_plugin_that_one_rank_lacks_is_not_found_everywhere(plugin: Callable[..., str]) -> None:
    folder = plugin("lonely")
    results = on_ranks(paths=[folder, None, folder], ask="lonely")
    text = same_error(results, "BackendNotFoundError")
    assert "rank 1: no backend is named 'lonely'" in text


def test_a_package_of_ours_that_one_rank_lacks_is_passed_over_by_all(
    distribution: MakeDistribution,
) -> None:
    folder = distribution(
        "cptransport-cupy-ipc",
        backends={"cupy_ipc": "cpt_processes_cupy:BACKEND"},
        modules={"cpt_processes_cupy": PLUGIN.format(name="cupy_ipc", fault="pass", fields="")},
    )
    paths = [str(folder), None, str(folder)]
    chosen = same_choice(on_ranks(paths=paths, ask="cupy_ipc"))
    assert chosen.chosen == "gloo"
    ((name, reason),) = chosen.passed_over
    assert name == "cupy_ipc"
    assert reason.startswith("rank 1: not installed: pip install 'cptransport-cupy-ipc")
    everywhere = same_choice(on_ranks(paths=[str(folder)] * 3, ask="cupy_ipc"))
    assert everywhere.chosen == "cupy_ipc"


def test_a_plugin_broken_on_one_rank_is_an_error_everywhere(plugin: Callable[..., str]) -> None:
    good = plugin("fragile")
    bad = plugin("fragile", source="raise ImportError('libfragile.so is missing')")
    results = on_ranks(paths=[good, bad, good], ask="fragile")
    text = same_error(results, "BackendLoadError")
    assert "rank 1: 'fragile' of fragile-dist 1.0" in text
    assert "libfragile.so is missing" in text
    assert [cause for _, _, cause in results] == ["NoneType", "ImportError", "NoneType"]


def test_different_versions_of_a_plugin_mismatch_everywhere(plugin: Callable[..., str]) -> None:
    old, new = plugin("dated", version="1.0"), plugin("dated", version="1.1")
    text = same_error(on_ranks(paths=[old, new, new], ask="dated"), "BackendMismatchError")
    assert "different versions of dated: rank 0: 1.0; ranks 1, 2: 1.1" in text


def test_different_versions_of_the_library_mismatch_everywhere() -> None:
    text = same_error(on_ranks(choose_with_versions), "BackendMismatchError")
    for rank in range(WORLD_SIZE):
        assert f"rank {rank}: cptransport 0.{rank}, transport API 1" in text


def test_a_backend_for_one_host_is_passed_over_on_several(plugin: Callable[..., str]) -> None:
    near = plugin(
        "near", fields="capabilities=replace(gloo.BACKEND.capabilities, cross_host=False)"
    )
    chosen = same_choice(on_ranks(choose_on_hosts, paths=[near] * 3, ask="near"))
    assert chosen.passed_over == (("near", "the ranks are on 2 hosts, near serves one"),)
    assert same_choice(on_ranks(paths=[near] * 3, ask="near")).chosen == "near"


def test_ranks_that_fail_at_different_points_still_meet_afterwards(
    plugin: Callable[..., str],
) -> None:
    uneven = plugin(
        "uneven",
        fault="for _ in range(2 * rank): group_store(group, 'control'); group_store(group, 'gloo')\n"
        "    raise BackendUnavailableError('no memory')",
    )
    chosen = same_choice(on_ranks(paths=[uneven] * 3, ask="uneven", times=3))
    assert chosen.passed_over == (("uneven", "no memory"),)
    assert chosen.chosen == "gloo"
    assert same_choice(on_ranks()).chosen == "gloo"


def test_a_rank_that_does_not_join_the_making_is_passed_over_within_the_limit(
    plugin: Callable[..., str],
) -> None:
    absent = plugin("absent", fault="if rank == 1: raise BackendUnavailableError('no memory')")
    start = time.monotonic()
    results = on_ranks(paths=[absent] * 3, ask="absent", limit_s=1.5)
    assert time.monotonic() - start < 10
    ((name, reason),) = same_choice(results).passed_over
    assert name == "absent"
    assert "rank 1: no memory" in reason


def test_groups_choose_on_their_own() -> None:
    everyone = [0.0, 1.0, 2.0]
    for rank, (found, values) in enumerate(on_ranks(choose_in_groups)):
        assert [selection.chosen for selection, _ in found] == ["gloo"] * (2 if rank == 2 else 1)
        assert list(values) == [everyone] * 3


def test_a_process_outside_the_group_is_refused_at_once() -> None:
    kind, text, _ = on_ranks(outside_the_group)[2]
    assert kind == "TransportError"
    assert "not a member of the group" in text


def test_rank_0_says_what_auto_took_and_whom_it_passed_over() -> None:
    first, *others = on_ranks(say)
    assert others == [[], []]
    alone, fallback = first
    assert "backend gloo serves 3 rank(s) on cpu; asked for auto (default)" in alone
    assert "asked for nccl (argument); passed over: nccl: not installed" in fallback


def test_the_death_of_a_rank_ends_the_choice_within_the_limit() -> None:
    assert on_ranks(one_dies, exits={1: 17}) == ["told", None, "told"]
