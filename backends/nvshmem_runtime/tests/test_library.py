# SPDX-License-Identifier: Apache-2.0
"""Where NVSHMEM's library is looked for, and how it is called."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
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


HOST = """
#include <stdlib.h>
#include <unistd.h>
void *nvshmem_malloc(size_t size) { usleep(300000); return size < 4096 ? malloc(size) : NULL; }
void nvshmem_free(void *address) { usleep(300000); free(address); }
void nvshmemx_hostlib_finalize(void) { usleep(300000); }
"""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Bindings over a library of the real one's name, whose calls that meet all PEs take 0.3 s."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "host.c").write_text(HOST)
    soname = f"libcpt_test_{tmp_path.name}.so"  # loaded for good: a name of its own
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{soname}", "-o", soname, "host.c"]
    subprocess.run(command, cwd=tmp_path, check=True)
    held = ctypes.CDLL(str(tmp_path / soname))
    monkeypatch.setattr(library, "_NAME", soname)
    module = ModuleType("nvshmem.bindings")
    module.my_pe = lambda: 3  # type: ignore[attr-defined]
    package = ModuleType("nvshmem")
    package.bindings = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvshmem", package)
    monkeypatch.setitem(sys.modules, "nvshmem.bindings", module)
    yield library.bindings()
    del held


def test_calls_that_meet_all_pes_let_other_threads_run(host: Any) -> None:
    """nvshmem4py's own hold the interpreter's lock, so that no deadline could pass meanwhile."""
    address = 0

    def malloc() -> None:
        nonlocal address
        address = host.malloc(64)

    for call in (malloc, lambda: host.free(address), host.hostlib_finalize):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join(0.05)
        assert thread.is_alive(), "this thread came to run only when the call had ended"
        thread.join()
    assert address > 1 << 32  # not cut to an int
    assert host.malloc(1 << 20) == 0
    assert host.my_pe() == 3
