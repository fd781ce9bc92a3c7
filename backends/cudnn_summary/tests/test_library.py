# SPDX-License-Identifier: Apache-2.0
"""What is said when cuDNN's KDA is absent, broken, too old, or there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from cptransport.cli import doctor
from cptransport.engine_registry import load_engine
from cptransport.errors import (
    BackendFallbackWarning,
    BackendUnavailableError,
    CPTransportError,
    EnvVarError,
)
from cptransport.testing.op_cases import OpCase, OpSpec
from cptransport.testing.op_rank import run_rank, run_threads
from cptransport.transports import threads
from cptransport_cudnn_summary import BACKEND, library

INSTALL = "needs nvidia-cudnn-frontend >= 1.32.0: pip install 'cptransport-cudnn-summary[cu13]'"


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., None]]:
    """Return a function that puts a package ``cudnn`` of these sources first on the path."""

    def put(**modules: str) -> None:
        folder = tmp_path / "cudnn"
        folder.mkdir()
        for name, source in modules.items():
            (folder / f"{name}.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    def forget() -> None:
        library._find.cache_clear()
        for name in [name for name in sys.modules if name.partition(".")[0] == "cudnn"]:
            del sys.modules[name]

    monkeypatch.setattr(library, "version", lambda distribution: "9.9.9")
    before = {n: m for n, m in sys.modules.items() if n.partition(".")[0] == "cudnn"}
    forget()
    yield put
    forget()
    sys.modules.update(before)


def absent(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let a module not be found, whether it is installed here or not."""
    monkeypatch.setitem(sys.modules, name, None)


def refusal() -> str:
    with pytest.raises(BackendUnavailableError) as caught:
        library.find()
    return str(caught.value)


def test_absent(cudnn: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = library.importlib.import_module

    def no_cudnn(name: str) -> Any:
        if name == "cudnn":
            raise ModuleNotFoundError("No module named 'cudnn'", name="cudnn")
        return real(name)

    monkeypatch.setattr(library.importlib, "import_module", no_cudnn)
    said = refusal()
    assert said == f"nvidia-cudnn-frontend is not installed; cudnn {INSTALL}"
    assert refusal() == said  # looked for once, said every time


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (
            {"__init__": "raise OSError('libcudnn.so.9: cannot open')"},
            ["is broken", "libcudnn.so.9"],
        ),
        ({"__init__": "import cpt_no_such_module"}, ["is broken", "cpt_no_such_module"]),
        ({"__init__": ""}, ["9.9.9 has no cudnn.linear_attention.kimi_delta_attention"]),
        ({"__init__": "", "linear_attention": ""}, ["9.9.9 has no cudnn.linear_attention.kimi"]),
        (
            {"__init__": "", "linear_attention": "import cpt_no_such_module"},
            ["is broken", "cpt_no_such_module"],
        ),
        (
            {"__init__": "", "linear_attention": "def kimi_delta_attention(): pass"},
            ["registers no op 'kimi_delta_attention_fwd'"],
        ),
    ],
    ids=["broken", "dependency", "old", "older", "half", "unregistered"],
)
def test_broken_or_too_old(modules: dict[str, str], words: list[str], cudnn: Any) -> None:
    if hasattr(torch.ops.cudnn, "kimi_delta_attention_fwd"):
        pytest.skip("cuDNN's own ops are registered in this process")
    cudnn(**modules)
    said = refusal()
    for word in ("nvidia-cudnn-frontend 9.9.9", INSTALL, *words):
        assert word in said


def test_the_stand_in_has_the_schemas_of_what_is_installed() -> None:
    """Where cuDNN's frontend is: arguments, their order, types and defaults, and what comes back."""
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    import fake_cudnn

    found = library.find()
    more = {"more": ""} if found.binding is None else None
    if more is None:
        pytest.skip("a newer frontend, with the concatenated-summary API")
    for op, schema in (
        (found.forward, fake_cudnn.FORWARD.format(**more)),
        (found.backward, fake_cudnn.BACKWARD.format(**more)),
        (found.summary, fake_cudnn.SUMMARY),
        (found.summary_backward, fake_cudnn.SUMMARY_BACKWARD),
    ):
        assert str(op.default._schema) == f"cudnn::{schema}"


def test_an_op_without_an_argument_that_is_needed() -> None:
    namespace = torch.library.Library("cpt_fake_old_cudnn", "DEF")
    namespace.define("kimi_delta_attention_fwd(Tensor q, Tensor k) -> Tensor")
    ops = torch.ops.cpt_fake_old_cudnn
    with pytest.raises(BackendUnavailableError, match="does not take v, g, beta, cu_seqlens"):
        library.library_of(object(), ops, "1.31.0", ("cpu",))


def call(**changes: Any) -> list[Any]:
    spec = OpSpec("kda", [0, 20], world_size=2, heads=1, value_heads=1, key_dim=4, value_dim=4)
    return run_threads(OpCase.of(spec.with_(engine="cudnn", **changes)))


def test_asked_for_by_name_it_is_an_error_or_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing() -> Any:
        raise BackendUnavailableError("nvidia-cudnn-frontend 9.9.9 is too old")

    monkeypatch.setattr(library, "find", nothing)
    monkeypatch.setenv("CULA_CP_STRICT", "1")
    with pytest.raises(BackendUnavailableError, match="9.9.9 is too old"):
        call()
    monkeypatch.setenv("CULA_CP_STRICT", "0")
    with pytest.warns(BackendFallbackWarning, match="9.9.9 is too old"):
        runs = call(seed=1)
    assert runs[0].record.engine == "torch"
    assert ("cudnn", "nvidia-cudnn-frontend 9.9.9 is too old") in runs[0].record.reasons


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.filterwarnings("ignore::cptransport.errors.BackendFallbackWarning")
def test_ranks_whose_machines_differ(
    use: Any, monkeypatch: pytest.MonkeyPatch, strict: str
) -> None:
    """Without cuDNN on one of them: an error, not states that are read in another layout."""
    fake = use("hopper")
    here = threading.local()

    def find() -> Any:
        if here.rank == 1:
            raise BackendUnavailableError("nvidia-cudnn-frontend is not installed")
        return fake.library

    monkeypatch.setattr(library, "find", find)
    monkeypatch.setenv("CULA_CP_STRICT", strict)
    spec = OpSpec("kda", [0, 20], world_size=3, heads=1, value_heads=1, key_dim=4, value_dim=4)
    case = OpCase.of(spec.with_(engine="cudnn", dtype="float64"))
    told: list[str] = []

    def step(transport: Any) -> None:
        here.rank = transport.rank
        try:
            run_rank(transport, case)
        except CPTransportError as error:
            told.append(f"{type(error).__name__} {error}")
            raise

    with pytest.raises(CPTransportError):
        threads.run(step, 3, 20.0)
    assert len(told) == 3
    words = "rank 1 by torch (cudnn: nvidia" if strict == "0" else "cannot serve kda: nvidia"
    assert any(words in text for text in told)


def test_doctor_says_what_is_there(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def details() -> list[str]:
        rows = {row["name"]: row for row in doctor.examine()["backends"]}
        return list(rows["cudnn_summary"]["details"])

    use("blackwell")
    engine, concat = details()
    assert engine == "engine cudnn: nvidia-cudnn-frontend 1.32.0, summary ops registered"
    assert concat.startswith("concatenated summaries (CULA_CP_CUDNN_CONCAT=auto): absent: the sig")
    use("concatenated")
    monkeypatch.setenv("CULA_CP_CUDNN_CONCAT", "require")
    assert "=require): present (forward preceding_state_update" in details()[1]
    monkeypatch.setenv("CULA_CP_CUDNN_CONCAT", "yes")
    assert "CULA_CP_CUDNN_CONCAT=yes is not valid; choose one of auto, require, off" in details()[0]
    with pytest.raises(EnvVarError):
        library.setting("CULA_CP_CUDNN_CONCAT")


def test_the_engine_is_preferred_by_the_backend_and_imports_no_cudnn() -> None:
    assert BACKEND.preferred_engine == "cudnn"
    engine = load_engine("kda", "cudnn")
    assert (engine.op, engine.name, engine.state_layout) == ("kda", "cudnn", "v_major")  # type: ignore[attr-defined]
