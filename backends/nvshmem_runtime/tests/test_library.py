# SPDX-License-Identifier: Apache-2.0
"""Where NVSHMEM's library is looked for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cptransport_nvshmem_runtime import library

NAME = "libnvshmem_host.so.3"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    library.load_library.cache_clear()
    yield
    library.load_library.cache_clear()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Let only some names load, and return the list of those that were tried."""

    def install(*there: str, loaded: bool = False) -> list[str]:
        tried: list[str] = []

        def load(name: str, mode: int) -> object:
            how = "loaded" if mode & os.RTLD_NOLOAD else "new"
            tried.append(f"{how} {name}")
            if (how == "loaded" and loaded) or (how == "new" and name in there):
                return object()
            raise OSError(f"{name}: cannot open shared object file")

        monkeypatch.setattr(library.ctypes, "CDLL", load)
        return tried

    return install


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A wheel of NVSHMEM in the environment; its library's path."""
    path = tmp_path / "lib" / NAME
    path.parent.mkdir()
    path.write_bytes(b"")
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(library, "find_spec", lambda name: spec)
    return str(path)


def test_what_the_process_has_loaded_comes_first(loads: Any, wheel: str) -> None:
    tried = loads(wheel, NAME, loaded=True)
    assert library.load_library() is None
    assert tried == [f"loaded {NAME}"]


def test_then_the_wheel_then_the_linker(loads: Any, wheel: str) -> None:
    tried = loads(wheel, NAME)
    assert library.load_library() is None
    assert tried == [f"loaded {NAME}", f"new {wheel}"]
    library.load_library.cache_clear()
    tried = loads(NAME)
    assert library.load_library() is None
    assert tried == [f"loaded {NAME}", f"new {wheel}", f"new {NAME}"]


def test_without_it_the_reason_says_what_to_install(
    loads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_nvidia(name: str) -> None:
        raise ModuleNotFoundError("No module named 'nvidia'")

    monkeypatch.setattr(library, "find_spec", no_nvidia)
    loads()
    reason = library.load_library() or ""
    assert "cannot open shared object file" in reason
    assert "pip install nvidia-nvshmem-cu13" in reason
    with pytest.raises(RuntimeError, match="nvidia-nvshmem-cu13"):
        library.bindings()
