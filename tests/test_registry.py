# SPDX-License-Identifier: Apache-2.0
"""Names of backends: where they come from, and every way in which a plugin can be wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cptransport import env, registry
from cptransport.errors import (
    BackendConflictError,
    BackendContractError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    EnvVarError,
)

MakeDistribution = Callable[..., Path]

BUILT_IN = ("loopback", "threads", "gloo")
PACKAGES = ("nccl", "nvshmem_signal", "nvshmem_barrier", "cudnn_summary", "cupy_ipc")

#: A plugin whose transport is loopback's, under another name; fields of the descriptor follow.
PLUGIN = """
from dataclasses import replace
from cptransport import Capabilities, Variable
from cptransport.transports import loopback

def fields():
    return dict({fields})

BACKEND = replace(loopback.BACKEND, **{{"name": {name!r}, **fields()}})
"""


def plugin(name: str, fields: str = "") -> str:
    return PLUGIN.format(name=name, fields=fields)


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the five packages absent, whatever this environment has."""
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, f"cptransport_{name}", None)


def test_own_names_come_first_then_plugins(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution("listed", backends={"zeta": "no_such_module_z:B", "alpha": "no_such_a:B"})
    monkeypatch.syspath_prepend(folder)
    names = registry.backend_names()
    assert names[: len(BUILT_IN + PACKAGES)] == BUILT_IN + PACKAGES
    assert [name for name in names if name in ("alpha", "zeta")] == ["alpha", "zeta"]


def test_listing_and_finding_import_nothing(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution(
        "lazy", backends={"lazy": "cpt_lazy:BACKEND"}, modules={"cpt_lazy": "1 / 0"}
    )
    monkeypatch.syspath_prepend(folder)
    assert "lazy" in registry.backend_names()
    assert registry.find_backend("lazy").distribution == "lazy"
    assert "cpt_lazy" not in sys.modules


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_ins_load(name: str) -> None:
    loaded = registry.load_backend(name)
    assert loaded.spec.name == name
    assert loaded.origin.distribution == "cptransport"


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.usefixtures("absent")
def test_the_five_packages_are_known_when_absent(name: str) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        registry.load_backend(name)
    assert str(caught.value).startswith("not installed: pip install ")
    assert f"cptransport-{name.replace('_', '-')}" in str(caught.value)


@pytest.mark.parametrize(
    ("typo", "meant"), [("ncll", "nccl"), ("NCCL", "nccl"), ("gloo2", "gloo"), ("atuo", "auto")]
)
def test_a_typo_lists_the_names_and_the_closest_one(typo: str, meant: str) -> None:
    with pytest.raises(BackendNotFoundError) as caught:
        registry.find_backend(typo)
    assert f"{typo!r}; did you mean {meant!r}?" in str(caught.value)
    for name in (*BUILT_IN, *PACKAGES, "auto", "nvshmem"):
        assert name in str(caught.value)


def test_a_plugin_is_found_by_name_and_by_reference(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution(
        "found",
        "2.5",
        backends={"found": "cpt_found:BACKEND"},
        modules={"cpt_found": plugin("found")},
    )
    monkeypatch.syspath_prepend(folder)
    by_name = registry.load_backend("found")
    assert (by_name.origin.distribution, by_name.origin.version) == ("found", "2.5")
    assert registry.load_backend("cpt_found:BACKEND").spec is by_name.spec


@pytest.mark.parametrize("reference", ["a:", ":B", "a b:C", "a:b:c", "a..b:C", "a-b:C", "a:B c"])
def test_a_malformed_reference_is_not_found(reference: str) -> None:
    with pytest.raises(BackendNotFoundError, match="package.module:ATTR"):
        registry.find_backend(reference)


@pytest.mark.parametrize(
    ("reference", "cause"),
    [
        ("cpt_no_such_module:BACKEND", ModuleNotFoundError),
        ("cptransport.transports.no_such:BACKEND", ModuleNotFoundError),
        ("cptransport.transports.gloo:BACKND", AttributeError),
    ],
)
def test_a_reference_to_nothing_is_not_found(reference: str, cause: type[Exception]) -> None:
    with pytest.raises(BackendNotFoundError) as caught:
        registry.load_backend(reference)
    assert isinstance(caught.value.__cause__, cause)


def test_a_reference_to_something_else_breaks_the_contract() -> None:
    with pytest.raises(BackendContractError, match="type, not a BackendSpec"):
        registry.load_backend("cptransport.transports.gloo:GlooTransport")


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        ("from cptransport import no_such_name", ImportError),
        ("import cpt_no_such_dependency", ModuleNotFoundError),
        ("raise RuntimeError('the driver is too old')", RuntimeError),
        ("OTHER = 1", AttributeError),
    ],
)
def test_a_broken_plugin_keeps_its_cause_and_affects_no_other(
    source: str,
    cause: type[Exception],
    distribution: MakeDistribution,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = f"cpt_broken_{cause.__name__}"
    folder = distribution(
        "broken-dist", "3.1", backends={"broken": f"{module}:BACKEND"}, modules={module: source}
    )
    monkeypatch.syspath_prepend(folder)
    for _ in range(2):  # not only the first import fails
        with pytest.raises(BackendLoadError) as caught:
            registry.load_backend("broken")
        assert type(caught.value.__cause__) is cause
        assert str(caught.value.__cause__) in str(caught.value)
        assert "broken-dist 3.1" in str(caught.value)
    assert registry.load_backend("gloo").spec.name == "gloo"
    assert isinstance(registry.declared_variables(), tuple)


def test_importing_the_library_does_not_import_plugins(distribution: MakeDistribution) -> None:
    folder = distribution(
        "eager", backends={"eager": "cpt_eager:BACKEND"}, modules={"cpt_eager": "raise ImportError"}
    )
    program = "import sys, cptransport; assert 'cpt_eager' not in sys.modules"
    path = os.pathsep.join([str(folder), *(each for each in sys.path if each)])
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": path},
        check=True,
        timeout=120,
    )


def test_a_registered_module_that_is_gone_counts_as_not_installed(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution("gone", backends={"gone": "cpt_gone.sub:BACKEND"})
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(BackendUnavailableError, match="not installed: pip install .*gone"):
        registry.load_backend("gone")


@pytest.mark.parametrize("name", ["mine", "nccl"])
def test_two_distributions_may_not_claim_one_name(
    name: str, distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each in ("first-dist", "second-dist"):
        module = f"cpt_{each.replace('-', '_')}_{name}"
        folder = distribution(
            each, backends={name: f"{module}:BACKEND"}, modules={module: plugin(name)}
        )
        monkeypatch.syspath_prepend(folder)
    with pytest.raises(BackendConflictError) as caught:
        registry.load_backend(name)
    assert "first-dist" in str(caught.value)
    assert "second-dist" in str(caught.value)
    assert registry.load_backend("loopback").spec.name == "loopback"


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("gloo", "cptransport"),
        ("threads", "cptransport"),
        ("nvshmem", "cptransport"),
        ("nccl", "cptransport-nccl"),
    ],
)
def test_a_third_party_may_not_shadow_a_name_of_ours(
    name: str, owner: str, distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution(
        "shadow", backends={name: "cpt_shadow:BACKEND"}, modules={"cpt_shadow": plugin(name)}
    )
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(BackendConflictError, match=f"by {owner} and by shadow"):
        registry.find_backend(name)


def test_one_distribution_found_twice_is_no_conflict(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    for spelling in ("twice-dist", "Twice_Dist"):
        folder = distribution(
            spelling,
            backends={"twice": "cpt_twice:BACKEND"},
            modules={"cpt_twice": plugin("twice")},
        )
        monkeypatch.syspath_prepend(folder)
    assert registry.load_backend("twice").spec.name == "twice"


def test_what_our_own_package_registers_is_what_its_name_means(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution(
        "cptransport-cupy-ipc",
        "9.9",
        backends={"cupy_ipc": "cpt_moved:BACKEND"},
        modules={"cpt_moved": plugin("cupy_ipc", "summary='moved'")},
    )
    monkeypatch.syspath_prepend(folder)
    loaded = registry.load_backend("cupy_ipc")
    assert (loaded.spec.summary, loaded.origin.version) == ("moved", "9.9")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ("api_version=2", "transport API 2"),
        ("name='other'", "named 'other'"),
        ("summary=None", "summary must be text"),
        ("probe='yes'", "probe(group, device) must be callable"),
        ("probe=lambda group: None", "probe(group, device)"),
        ("probe=lambda device, group: None", "probe(group, device)"),
        ("probe=lambda group, device, more: None", "probe(group, device)"),
        ("create=lambda group, device: None", "create(group, device, timeout_s)"),
        ("create=lambda group, device, timeout: None", "create(group, device, timeout_s)"),
        ("capabilities={'pairwise': True}", "must be a Capabilities, got dict"),
        ("capabilities=Capabilities(device_types='cpu')", "device_types"),
        ("capabilities=Capabilities(device_types=())", "device_types"),
        ("capabilities=Capabilities(cuda_graph=1)", "cuda_graph must be a bool"),
        ("variables=['CULA_CP_X']", "tuple of Variable"),
        ("variables=(Variable('CULA_CP_STRICT', '0'),)", "CULA_CP_STRICT"),
        ("variables=(Variable('CULA_CP_X', '0'),) * 2", "CULA_CP_X"),
        ("variables=(Variable('MY_X', '0'),)", "must start with CULA_CP_"),
        ("preferred_engine=3", "preferred_engine"),
        ("advice=lambda: []", "advice(device)"),
        ("details=lambda: []", "details(device)"),
    ],
)
def test_a_descriptor_that_breaks_the_contract_is_refused_with_its_distribution(
    fields: str,
    words: str,
    distribution: MakeDistribution,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = f"cpt_contract_{abs(hash(fields))}"
    folder = distribution(
        "careless",
        "0.3",
        backends={"careless": f"{module}:BACKEND"},
        modules={module: plugin("careless", fields)},
    )
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(BackendContractError) as caught:
        registry.load_backend("careless")
    assert words in str(caught.value)
    assert "careless 0.3" in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        "probe=lambda group, device, verbose=False: None",
        "probe=lambda group, device, /: None",
        "create=lambda group, device, timeout_s: None",
        "create=lambda group, device, timeout_s, **options: None",
    ],
)
def test_what_can_be_called_as_the_contract_says_is_accepted(
    fields: str, distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = f"cpt_accepted_{abs(hash(fields))}"
    folder = distribution(
        "careful",
        backends={"careful": f"{module}:BACKEND"},
        modules={module: plugin("careful", fields)},
    )
    monkeypatch.syspath_prepend(folder)
    assert registry.load_backend("careful").spec.name == "careful"


def test_variables_of_loadable_backends_are_declared(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution(
        "declaring",
        backends={"declaring": "cpt_declaring:BACKEND", "failing": "cpt_failing:BACKEND"},
        modules={
            "cpt_declaring": plugin(
                "declaring", "variables=(Variable('CULA_CP_DEPTH', '2', ('2', '3')),)"
            ),
            "cpt_failing": "raise ImportError('not this one')",
        },
    )
    monkeypatch.syspath_prepend(folder)
    assert "CULA_CP_DEPTH" in registry.declared_variables()
    spec = registry.load_backend("declaring").spec
    for value in ("", "3"):
        monkeypatch.setenv("CULA_CP_DEPTH", value)
        registry.check_values(spec)
    monkeypatch.setenv("CULA_CP_DEPTH", "4")
    with pytest.raises(EnvVarError, match="CULA_CP_DEPTH=4 is not valid; choose one of 2, 3"):
        registry.check_values(spec)
