# SPDX-License-Identifier: Apache-2.0
"""The five descriptors: readable without vendor libraries, truthful about why they cannot serve."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from cptransport.backend import BackendSpec

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
#: import name of the vendor library that each backend needs beyond torch
VENDOR = {
    "cudnn_summary": None,
    "cupy_ipc": "cupy",
    "nccl": None,
    "nvshmem_barrier": "nvshmem",
    "nvshmem_signal": "nvshmem",
}

each_backend = pytest.mark.parametrize("name", VENDOR)


def descriptor(name: str) -> BackendSpec:
    spec = importlib.import_module(f"cptransport_{name}").BACKEND
    assert isinstance(spec, BackendSpec)
    return spec


def find_spec_with(**known: bool) -> Callable[..., Any]:
    """Return a ``find_spec`` that finds, or does not find, the named modules."""
    original = importlib.util.find_spec

    def find_spec(module: str, package: str | None = None) -> Any:
        return (object() if known[module] else None) if module in known else original(module)

    return find_spec


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, *, vendor: bool) -> None:
    """Let the backend see a CUDA device and NCCL and, or not, its vendor library."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    if (library := VENDOR[name]) is not None:
        owner = "nvshmem_runtime" if library == "nvshmem" else name
        module = importlib.import_module(f"cptransport_{owner}")
        monkeypatch.setattr(
            module, "find_spec", find_spec_with(**{library: vendor, "triton": True})
        )
        if owner == "nvshmem_runtime":
            monkeypatch.setattr(module, "load_library", lambda: None)


@each_backend
def test_descriptor_has_the_name_of_its_entry_point(name: str) -> None:
    spec = descriptor(name)
    assert spec.name == name
    assert spec.summary
    assert spec.install.startswith("pip install ")
    assert "cuda" in spec.capabilities.device_types


def test_transports_with_a_barrier_are_not_pairwise() -> None:
    pairwise = {name for name in VENDOR if descriptor(name).capabilities.pairwise}
    assert pairwise == {"cupy_ipc", "nccl", "nvshmem_signal"}
    assert not descriptor("cupy_ipc").capabilities.cross_host


@each_backend
def test_probe_names_the_device_first(name: str) -> None:
    spec = descriptor(name)
    if "cpu" in spec.capabilities.device_types:
        assert spec.probe(None, torch.device("meta")) == "needs a CPU or CUDA device, not meta"
        assert spec.probe(None, CPU) is None
    else:
        assert spec.probe(None, CPU) == "needs a CUDA device, not cpu"


@each_backend
def test_probe_says_that_there_is_no_cuda_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert descriptor(name).probe(None, CUDA) == "torch sees no CUDA device"


@pytest.mark.parametrize("name", [name for name, vendor in VENDOR.items() if vendor])
def test_probe_says_which_library_is_missing_and_how_to_get_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, vendor=False)
    reason = descriptor(name).probe(None, CUDA) or ""
    assert "is not installed: pip install 'cptransport-" in reason
    assert "[cu13]" in reason


@pytest.mark.parametrize("name", ["nccl", "cudnn_summary"])
def test_what_stands_on_nccl_says_that_torch_lacks_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, vendor=True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    assert descriptor(name).probe(None, CUDA) == "this torch was built without NCCL"


def test_what_stands_on_another_backend_says_that_it_is_absent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = importlib.import_module("cptransport_cudnn_summary")
    monkeypatch.setattr(module, "find_spec", find_spec_with(cptransport_nccl=False))
    reason = module.BACKEND.probe(None, CPU)
    assert reason == "cptransport-nccl is not installed: pip install cptransport-nccl"


@each_backend
def test_with_everything_there_it_serves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, name, vendor=True)
    assert descriptor(name).probe(None, CUDA) is None


def test_descriptors_import_no_vendor_library() -> None:
    program = f"""
import sys, torch  # torch may look for some of them itself

class Refuse:
    def find_spec(self, name, path=None, target=None):
        assert name.split(".")[0] not in {{"cupy", "nvshmem", "cudnn", "triton"}}, name

sys.meta_path.insert(0, Refuse())
for name in {sorted(VENDOR)}:
    __import__(f"cptransport_{{name}}").BACKEND.capabilities
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
