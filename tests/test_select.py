# SPDX-License-Identifier: Apache-2.0
"""Choosing a backend for one process, and what a user is told about it."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cptransport
from cptransport import env, notices, select
from cptransport.agreement import Ranks
from cptransport.errors import (
    BackendContractError,
    BackendError,
    BackendFallbackWarning,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    EnvVarError,
    TransportClosedError,
)
from cptransport.request import device_of

MakeDistribution = Callable[..., Path]

#: A plugin that serves one rank through loopback; fields of the descriptor follow.
PLUGIN = """
from dataclasses import replace
from cptransport import BackendUnavailableError, Variable
from cptransport.transports import loopback

made = []

def create(group, device, timeout_s):
    transport = loopback.LoopbackTransport(device, timeout_s)
    made.append(transport)
    return transport

def fail(error):
    raise error

BACKEND = replace(loopback.BACKEND, **{{"name": {name!r}, "create": create, **dict({fields})}})
"""


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable is set, nothing was warned of, and none of the five packages is there."""
    for name in [name for name in os.environ if name.startswith(env.PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(notices, "_given", set())
    for name in ("nccl", "nvshmem_signal", "nvshmem_barrier", "cudnn_summary", "cupy_ipc"):
        monkeypatch.setitem(sys.modules, f"cptransport_{name}", None)


@pytest.fixture
def plugin(distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that installs a plugin."""

    def make(name: str, fields: str = "") -> None:
        module = f"cpt_select_{name}"
        source = PLUGIN.format(name=name, fields=fields)
        folder = distribution(
            f"{name}-dist", backends={name: f"{module}:BACKEND"}, modules={module: source}
        )
        monkeypatch.delitem(sys.modules, module, raising=False)
        monkeypatch.syspath_prepend(folder)

    return make


def selection(**arguments: object) -> cptransport.Selection:
    with cptransport.create_transport(**arguments) as transport:  # type: ignore[arg-type]
        return transport.selection


def test_alone_auto_takes_loopback_on_cpu() -> None:
    with cptransport.create_transport() as transport:
        assert transport.selection == cptransport.Selection("auto", "default", "loopback")
        assert (transport.rank, transport.world_size) == (0, 1)
        assert transport.device == torch.device("cpu")
        assert transport.timeout_s == 300.0
        assert transport.strict is False


def test_argument_beats_variable_beats_default(
    plugin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("mine")
    monkeypatch.setenv("CULA_CP_COMM_BACKEND", "mine")
    assert selection() == cptransport.Selection("mine", "environment", "mine")
    assert selection(backend="loopback").source == "argument"
    assert selection(backend="").requested == "mine"
    monkeypatch.setenv("CULA_CP_COMM_BACKEND", " ")
    assert selection(backend="  ") == cptransport.Selection("auto", "default", "loopback")


def test_strict_and_timeout_belong_to_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CULA_CP_STRICT", "1")
    monkeypatch.setenv("CULA_CP_TIMEOUT_S", "7.5")
    with cptransport.create_transport() as first:
        monkeypatch.setenv("CULA_CP_TIMEOUT_S", "8")
        assert (first.strict, first.timeout_s) == (True, 7.5)
    with cptransport.create_transport(strict=False, timeout_s=2) as second:
        assert (second.strict, second.timeout_s) == (False, 2.0)


def test_a_plugin_is_taken_by_name_or_by_reference_and_never_by_auto(
    plugin: Callable[..., None],
) -> None:
    plugin("mine")
    assert selection(backend="mine").chosen == "mine"
    by_reference = selection(backend="cpt_select_mine:BACKEND")
    assert (by_reference.requested, by_reference.chosen) == ("cpt_select_mine:BACKEND", "mine")
    assert selection().chosen == "loopback"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("source", ["argument", "variable"])
def test_an_unknown_name_is_an_error_in_both_modes(
    source: str, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "variable":
        monkeypatch.setenv("CULA_CP_COMM_BACKEND", "ncll")
    with pytest.raises(BackendNotFoundError, match="'ncll'; did you mean 'nccl'"):
        cptransport.create_transport(
            backend="ncll" if source == "argument" else None, strict=strict
        )


def test_a_name_must_be_text() -> None:
    with pytest.raises(BackendNotFoundError, match="backend must be a name"):
        cptransport.create_transport(backend=cptransport.threads.BACKEND)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"), [("CULA_CP_STRICT", "yes"), ("CULA_CP_TIMEOUT_S", "soon")]
)
def test_variables_are_parsed_strictly(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(EnvVarError, match=f"{name}={value}"):
        cptransport.create_transport()


def test_a_named_backend_that_cannot_serve_falls_back_and_warns_once_per_reason() -> None:
    with pytest.warns(BackendFallbackWarning) as caught:
        chosen = selection(backend="nccl")
    assert chosen == cptransport.Selection(
        "nccl", "argument", "loopback", (("nccl", "not installed: pip install cptransport-nccl"),)
    )
    assert len(caught) == 1
    for words in ("'nccl'", "pip install cptransport-nccl", "'loopback'", "CULA_CP_STRICT=1"):
        assert words in str(caught[0].message)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert selection(backend="nccl").chosen == "loopback"
    with pytest.warns(BackendFallbackWarning, match="'cupy_ipc' cannot serve"):
        selection(backend="cupy_ipc")


@pytest.mark.parametrize(
    ("backend", "reason"),
    [
        ("nccl", "pip install cptransport-nccl"),
        ("gloo", "torch.distributed is not initialised"),
        ("threads", "inside cptransport.threads.run only"),
        ("nvshmem", "pip install 'cptransport-nvshmem-signal"),
    ],
)
def test_strict_forbids_the_fallback(backend: str, reason: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"{backend!r} cannot serve here: .*{reason}"):
        cptransport.create_transport(backend=backend, strict=True)


def test_nvshmem_stands_for_the_signal_backend_up_to_two_ranks() -> None:
    with pytest.warns(BackendFallbackWarning):
        chosen = selection(backend="nvshmem")
    assert chosen.requested == "nvshmem"
    assert [name for name, _ in chosen.passed_over] == ["nvshmem_signal"]


def test_a_fallback_that_the_user_made_an_error_leaves_nothing_open(
    plugin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("mine")
    monkeypatch.setattr(select, "auto_candidates", lambda *_, **__: ("mine",))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BackendFallbackWarning):
            cptransport.create_transport(backend="nccl")
    (made,) = sys.modules["cpt_select_mine"].made
    with pytest.raises(TransportClosedError):
        made.check()


def test_auto_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cptransport")
    selection()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "loopback" in record.getMessage()
    caplog.clear()
    selection(backend="loopback")
    assert not caplog.records


def test_what_probe_or_create_refuses_is_passed_over(plugin: Callable[..., None]) -> None:
    plugin("says_no", "probe=lambda group, device: f'no luck on {device}'")
    plugin("probe_raises", "probe=lambda group, device: fail(BackendUnavailableError('no nerve'))")
    plugin(
        "create_raises",
        "create=lambda group, device, timeout_s: fail(BackendUnavailableError('no memory'))",
    )
    for name, reason in (
        ("says_no", "no luck on cpu"),
        ("probe_raises", "no nerve"),
        ("create_raises", "no memory"),
    ):
        with pytest.warns(BackendFallbackWarning, match=reason):
            assert selection(backend=name).passed_over == ((name, reason),)
        with pytest.raises(BackendUnavailableError, match=reason):
            cptransport.create_transport(backend=name, strict=True)


def test_a_backend_for_other_devices_cannot_serve(plugin: Callable[..., None]) -> None:
    plugin("for_tpu", "capabilities=replace(loopback.BACKEND.capabilities, device_types=('tpu',))")
    with pytest.raises(BackendUnavailableError, match="needs a tpu device, not cpu"):
        cptransport.create_transport(backend="for_tpu", strict=True)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("field", "kind", "words"),
    [
        ("probe=lambda group, device: 1 / 0", BackendContractError, "probe raised ZeroDivision"),
        ("probe=lambda group, device: False", BackendContractError, "got False"),
        ("probe=lambda group, device: ''", BackendContractError, "got ''"),
        ("create=lambda group, device, timeout_s: 1 / 0", BackendError, "ZeroDivisionError"),
        ("create=lambda group, device, timeout_s: None", BackendContractError, "NoneType.*barrier"),
    ],
)
def test_a_plugin_that_breaks_its_word_is_an_error_in_both_modes(
    field: str, kind: type[Exception], words: str, strict: bool, plugin: Callable[..., None]
) -> None:
    plugin("faithless", field)
    with pytest.raises(BackendError, match=words) as caught:
        cptransport.create_transport(backend="faithless", strict=strict)
    assert type(caught.value) is kind
    assert "faithless-dist 1.0" in str(caught.value)
    if "1 / 0" in field:
        assert type(caught.value.__cause__) is ZeroDivisionError


def test_a_transport_of_another_size_is_refused_and_closed(plugin: Callable[..., None]) -> None:
    plugin("resized")
    module_made: list[object] = []

    def work(transport: cptransport.BoundaryTransport) -> str:
        with pytest.raises(BackendContractError, match="rank 0 of 1, this is rank . of 2"):
            cptransport.create_transport(backend="resized", timeout_s=10)
        return "refused"

    assert cptransport.threads.run(work, 2, timeout_s=10) == ["refused"] * 2
    module_made += sys.modules["cpt_select_resized"].made
    assert len(module_made) == 2
    for made in module_made:
        with pytest.raises(TransportClosedError):
            made.check()  # type: ignore[attr-defined]


def test_a_broken_plugin_that_is_asked_for_raises_its_cause(
    distribution: MakeDistribution, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "raise ImportError('libfabric.so.1 is missing')"
    folder = distribution(
        "ofi", backends={"ofi": "cpt_select_ofi:BACKEND"}, modules={"cpt_select_ofi": source}
    )
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(BackendLoadError, match="libfabric.so.1 is missing") as caught:
        cptransport.create_transport(backend="ofi")
    assert type(caught.value.__cause__) is ImportError
    assert selection().chosen == "loopback"


def test_unknown_variables_warn_and_are_errors_under_strict(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CULA_CP_BACKEND", "gloo")
    with pytest.warns(UserWarning, match="CULA_CP_BACKEND; did you mean") as caught:
        selection()
    assert caught[0].filename == __file__
    with pytest.raises(EnvVarError, match="CULA_CP_BACKEND"):
        cptransport.create_transport(strict=True)


def test_declared_variables_are_known_and_their_values_checked(
    plugin: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plugin("deep", "variables=(Variable('CULA_CP_DEPTH', '2', ('2', '3')),)")
    monkeypatch.setenv("CULA_CP_DEPTH", "3")
    assert selection(backend="deep", strict=True).chosen == "deep"
    monkeypatch.setenv("CULA_CP_DEPTH", "4")
    assert selection(backend="loopback", strict=True).chosen == "loopback"  # not its variable
    with pytest.raises(EnvVarError, match="CULA_CP_DEPTH=4 is not valid; choose one of 2, 3"):
        cptransport.create_transport(backend="deep")


def test_advice_about_the_environment_warns_and_is_an_error_under_strict(
    plugin: Callable[..., None],
) -> None:
    plugin("wise", "advice=lambda device: [f'set MY_RAILS for {device}', 'unset MY_DEBUG']")
    words = "wise advises: set MY_RAILS for cpu; unset MY_DEBUG"
    with pytest.warns(UserWarning, match=words) as caught:
        assert selection(backend="wise").chosen == "wise"
    assert caught[0].filename == __file__
    with pytest.raises(EnvVarError, match=words):
        cptransport.create_transport(backend="wise", strict=True)
    assert selection(strict=True).chosen == "loopback"  # nobody asked the wise one
    plugin("content", "advice=lambda device: []")
    assert selection(backend="content", strict=True).chosen == "content"
    plugin("confused", "advice=lambda device: 1 / 0")
    with pytest.raises(BackendContractError, match="advice raised ZeroDivisionError"):
        cptransport.create_transport(backend="confused")


def test_a_device_is_what_torch_calls_one() -> None:
    assert cptransport.create_transport(device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(BackendError, match="'cpux' is not valid"):
        cptransport.create_transport(device="cpux")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device_cannot_be_served() -> None:
    with pytest.raises(BackendUnavailableError, match="loopback: torch sees no CUDA device"):
        cptransport.create_transport(device="cuda")


def test_cuda_means_the_current_device_and_others_must_exist(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    ranks = Ranks(group=None, world=None, rank=0, world_size=1, control=None)
    assert device_of(ranks, "cuda") == torch.device("cuda", 1)
    assert device_of(ranks, None) == torch.device(
        "cpu"
    )  # no group, so none that talks through CUDA
    for missing in ("cuda:2", "cuda:999"):
        with pytest.raises(BackendError, match="torch sees 2 CUDA devices"):
            device_of(ranks, missing)


@pytest.mark.parametrize(
    ("backends", "device"),
    [
        ("cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:nccl", "cuda:1"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cpu:gloo", "cpu"),
    ],
)
def test_the_device_goes_by_what_the_group_talks_through(
    backends: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group: backends)
    ranks = Ranks(group=object(), world=None, rank=0, world_size=2, control=None)
    assert device_of(ranks, None) == torch.device(device)


@pytest.mark.gpu
def test_a_cuda_device_is_taken_when_asked_for() -> None:
    with cptransport.create_transport(device="cuda") as transport:
        assert transport.device == torch.device("cuda", torch.cuda.current_device())


def test_a_rank_of_a_launcher_alone_is_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(notices, "_given", set())
    with pytest.warns(UserWarning, match="init_process_group first"):
        transport = cptransport.create_transport()
    assert transport.selection.chosen == "loopback"
    transport.close()
