# SPDX-License-Identifier: Apache-2.0
"""Skips by device for the markers ``gpu`` and ``multigpu(n)``; distributions made on the fly."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

# A shell that runs the tests in the background ignores Ctrl-C for them, and tests are about it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    needed = 1 if item.get_closest_marker("gpu") else 0
    if (marker := item.get_closest_marker("multigpu")) is not None:
        needed = marker.args[0]
    if needed and (found := torch.cuda.device_count()) < needed:
        pytest.skip(f"needs {needed} CUDA device(s), torch sees {found}")


@pytest.fixture
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes an installed distribution and returns its folder, for sys.path.

    ``backends`` and ``engines`` are entry points, ``modules`` the source of its modules by name.
    """

    def make(
        name: str,
        version: str = "1.0",
        *,
        backends: Mapping[str, str] | None = None,
        engines: Mapping[str, str] | None = None,
        modules: Mapping[str, str] | None = None,
    ) -> Path:
        folder = tmp_path_factory.mktemp("site")
        info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        groups = {"cptransport.backends": backends or {}, "cptransport.engines": engines or {}}
        lines = []
        for group, points in groups.items():
            lines += [f"[{group}]", *(f"{point} = {value}" for point, value in points.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for module, source in (modules or {}).items():
            (folder / f"{module}.py").write_text(source)
        return folder

    return make


@pytest.fixture
def install_engine(
    distribution: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return a function that installs a distribution with one engine, ``ENGINE`` of its source."""

    def make(name: str, *, point: str, source: str) -> None:
        module = f"cpt_engine_{name.replace('-', '_')}"
        folder = distribution(name, engines={point: f"{module}:ENGINE"}, modules={module: source})
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(folder)

    return make
