# SPDX-License-Identifier: Apache-2.0
"""Engines by op and name: this repository's, plugins', and what is wrong with either."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cptransport import engine_registry, registry
from cptransport.errors import (
    BackendConflictError,
    BackendContractError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
)

MakeDistribution = Callable[..., Path]

ENGINE = """
class Engine:
    op, name = {op!r}, {name!r}
    def eligible(self, facts): return None
    slot_parts = forward_local = forward_finish = backward_local = backward_finish = eligible

ENGINE = Engine()
"""


@pytest.mark.parametrize("op", ["kda", "ssd"])
def test_the_reference_engine_is_always_there(op: str) -> None:
    engine = registry.load_engine(op, "torch")
    assert (engine.op, engine.name) == (op, "torch")
    assert registry.engine_names(op)[0] == "torch"


def test_asking_for_ours_imports_no_plugin(install_engine: Callable[..., None]) -> None:
    install_engine("unasked", point="x", source="1 / 0")
    registry.load_engine("kda", "torch")
    assert "cpt_engine_unasked" not in sys.modules


def test_a_plugin_is_found_by_what_it_says_of_itself(install_engine: Callable[..., None]) -> None:
    install_engine("fast", point="whatever", source=ENGINE.format(op="ssd", name="fast"))
    assert registry.load_engine("ssd", "fast").name == "fast"
    assert "fast" in registry.engine_names("ssd")
    assert "fast" not in registry.engine_names("kda")
    with pytest.raises(BackendUnavailableError, match="'fast' serves ssd, not kda"):
        registry.load_engine("kda", "fast")


def test_a_typo_lists_the_names_and_the_closest_one() -> None:
    with pytest.raises(BackendNotFoundError) as caught:
        registry.load_engine("kda", "tirton")
    assert "did you mean 'triton'" in str(caught.value)
    for name in ("auto", "torch", "triton", "cudnn"):
        assert name in str(caught.value)


def test_an_engine_of_a_package_that_is_absent_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_registry, "_load_plugins", lambda path: engine_registry._Plugins())
    monkeypatch.setitem(engine_registry._PACKAGED, ("kda", "cudnn"), "cpt_no_such_package.engine:E")
    assert "cudnn" not in registry.engine_names("kda")
    with pytest.raises(BackendUnavailableError, match="pip install 'cptransport-cudnn-summary"):
        registry.load_engine("kda", "cudnn")


def test_an_engine_of_a_package_on_the_path_needs_no_installation(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ENGINE.format(op="kda", name="cudnn")
    folder = distribution("unused", modules={"cpt_engine_beside": source})
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setattr(engine_registry, "_load_plugins", lambda path: engine_registry._Plugins())
    beside = ("kda", "cudnn")
    monkeypatch.setitem(engine_registry._PACKAGED, beside, "cpt_engine_beside:ENGINE")
    assert registry.load_engine("kda", "cudnn").name == "cudnn"
    assert "cudnn" in registry.engine_names("kda")


def test_our_engine_without_the_library_it_needs_is_unavailable(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = distribution("unused", modules={"cpt_engine_own": "import cpt_no_such_library"})
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setitem(engine_registry._OWN, ("kda", "triton"), "cpt_engine_own:ENGINE")
    with pytest.raises(
        BackendUnavailableError, match="'triton' needs cpt_no_such_library: pip install triton"
    ):
        registry.load_engine("kda", "triton")


def test_a_broken_plugin_that_is_asked_for_raises_its_cause_and_affects_no_other(
    install_engine: Callable[..., None],
) -> None:
    install_engine("slow", point="kda_slow", source="raise OSError('libslow.so is missing')")
    install_engine("quick", point="kda_quick", source=ENGINE.format(op="kda", name="quick"))
    with pytest.raises(BackendLoadError, match=r"slow 1.0.*libslow.so is missing") as caught:
        registry.load_engine("kda", "slow")
    assert type(caught.value.__cause__) is OSError
    assert registry.load_engine("kda", "quick").name == "quick"
    assert any("libslow.so" in text for text in registry.broken_engines())
    with pytest.raises(BackendNotFoundError, match="slow 1.0 .* is broken"):
        registry.load_engine("kda", "quikc")


def test_two_distributions_may_not_claim_one_engine(install_engine: Callable[..., None]) -> None:
    for name in ("one-engine", "other-engine"):
        install_engine(name, point="twin", source=ENGINE.format(op="kda", name="twin"))
    with pytest.raises(BackendConflictError, match="one-engine and by other-engine"):
        registry.load_engine("kda", "twin")


def test_a_plugin_may_not_shadow_ours(install_engine: Callable[..., None]) -> None:
    install_engine("shadow-engine", point="torch", source=ENGINE.format(op="kda", name="torch"))
    assert type(registry.load_engine("kda", "torch")).__module__.startswith("cptransport.")
    assert registry.engine_names("kda").count("torch") == 1
    assert any("by cptransport and by shadow-engine" in text for text in registry.broken_engines())


def test_an_engine_that_lacks_a_method_breaks_the_contract(
    install_engine: Callable[..., None],
) -> None:
    source = ENGINE.format(op="kda", name="half").replace("backward_local = ", "")
    install_engine("half", point="half", source=source)
    with pytest.raises(BackendContractError, match="half 1.0 .* lacks backward_local"):
        registry.load_engine("kda", "half")
