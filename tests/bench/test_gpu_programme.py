# SPDX-License-Identifier: Apache-2.0
"""The driver of the GPU programme: what it asks for exists, and it survives what steps do."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from documents import document, row
from test_among_ranks import bench, rows
from torch import Tensor

from cptransport.bench import baselines
from cptransport.bench.baselines import Peer, Place
from cptransport.bench.cases import add_arguments, load_case
from cptransport.context import CPContext
from cptransport.ops import chunk_kda
from cptransport.plan import build_plan
from cptransport.transports.loopback import LoopbackTransport

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def driver() -> ModuleType:
    path = ROOT / "tests" / "gpu" / "run_all.py"
    spec = importlib.util.spec_from_file_location("cpt_run_all", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def all_steps(driver: ModuleType, out: Path) -> list[object]:
    return [step for gpus in (2, 4, 8) for step in driver.steps(out, gpus)]


def test_names_tell_steps_apart(driver: ModuleType, tmp_path: Path) -> None:
    names = [driver.slug(step.name) for step in driver.steps(tmp_path, 2)]
    assert len(names) == len(set(names))
    assert {step.group for step in driver.steps(tmp_path, 2)} == set("ABCD")


def test_what_benches_are_asked_for_is_understood(driver: ModuleType, tmp_path: Path) -> None:
    seen = 0
    for step in all_steps(driver, tmp_path):
        for arguments in (step.arguments, step.rehearsal) if step.bench else ():
            case = load_case(arguments[0])
            parser = argparse.ArgumentParser(exit_on_error=False)
            add_arguments(parser, case)
            parser.parse_args(list(arguments[1:]))
            seen += 1
    assert seen > 20


def test_what_tests_are_asked_for_exists(driver: ModuleType, tmp_path: Path) -> None:
    """Every pytest step selects some test; files of kernels that are not there yet are named."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    places = ["tests/gpu", "tests/integrations/test_fla_gpu.py"]
    done = subprocess.run(
        [*command, *places], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    ids = [line for line in done.stdout.splitlines() if "::" in line]
    assert len(ids) > 500, done.stdout[-2000:] + done.stderr[-2000:]
    for step in driver.steps(tmp_path, 2):
        if step.bench or step.command:
            continue
        where, *options = step.arguments
        path = where.partition("::")[0]
        if not path.startswith(places[0]) and path != places[1]:
            continue
        chosen = [name for name in ids if name.startswith(where)]
        words = options[options.index("-k") + 1].split(" and ") if "-k" in options else []
        for word in words:
            wanted, text = not word.startswith("not "), word.removeprefix("not ")
            chosen = [name for name in chosen if (text in name) is wanted]
        assert chosen, f"{step.name} selects nothing"


def test_every_test_that_needs_a_gpu_is_in_a_step(driver: ModuleType, tmp_path: Path) -> None:
    asked = " ".join(word for step in driver.steps(tmp_path, 2) for word in step.arguments)
    found = sys.modules["steps"].marked()
    assert {"tests/kernels/test_kda_gpu.py", "tests/test_select.py"} <= {*found}
    assert [path for path in found if path not in asked] == []
    (others,) = [step for step in driver.steps(tmp_path, 2) if step.name == "other tests"]
    assert "tests/test_select.py" in others.arguments
    assert not any(path.startswith("tests/gpu/") for path in others.arguments)


def programme(driver: ModuleType, code: str, **changes: object) -> object:
    name = str(changes.pop("name", "one"))
    command = ("python", "-c", code)
    return driver.Step(
        name, "A", command=command, limit_s=float(changes.pop("limit_s", 60)), **changes
    )


def run(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, out: Path, steps: list[object], *more: str
) -> int:
    monkeypatch.setattr(driver, "steps", lambda folder, gpus: steps)
    if "--pack" not in more:
        monkeypatch.setattr(driver, "describe", lambda run, args: None)
    arguments = ["--rehearse", "--out", str(out), "--group", "A", *more]
    return int(driver.main(arguments))


def test_results_are_kept_whatever_steps_do(
    driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(driver, "SHORTEST_S", 0.5)
    out = tmp_path / "out"
    steps = [
        programme(driver, "print('a.py::test_one PASSED')", name="good"),
        programme(driver, "import sys; sys.exit(3)", name="bad"),
        programme(driver, "import time; time.sleep(60)", name="endless", limit_s=2),
        programme(driver, "print('a.py::test_two SKIPPED (why)')", name="nothing"),
        driver.Step("absent", "A", command=("no-such-program",)),
        driver.Step("other", "B", command=("python", "-c", "raise SystemExit(1)")),
    ]
    pack = tmp_path / "results.tar.gz"
    assert run(driver, monkeypatch, out, steps, "--jobs", "1", "--pack", str(pack)) == 1
    document = json.loads((out / "results.json").read_text())
    codes = {step["step"]: step["code"] for step in document["steps"]}
    assert codes == {
        "good": 0,
        "bad": 3,
        "endless": "time limit",
        "nothing": 0,
        "absent": "no no-such-program here",
    }
    assert document["rehearsal"] is True
    assert document["machine"]["gpus_used"] == 0
    assert document["software"]["torch"]
    one = json.loads((out / "step-A-good.json").read_text())
    assert one["outcomes"] == {"a.py::test_one": "PASSED"}
    with tarfile.open(pack) as archive:
        assert "out/results.json" in archive.getnames()
    said = capsys.readouterr().out
    assert "1 of 5 steps passed" in said


def test_a_failure_beside_others_is_tried_alone_and_told(
    driver: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flag = tmp_path / "tried"
    once = f"import pathlib, sys; p = pathlib.Path({str(flag)!r}); tried = p.exists(); p.touch()"
    steps = [
        programme(driver, f"{once}; sys.exit(0 if tried else 1)", name="crowded"),
        programme(driver, "pass", name="quiet"),
    ]
    assert run(driver, monkeypatch, tmp_path / "out", steps, "--jobs", "2") == 0
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [s["code"] for s in document["steps"] if s["step"] == "crowded"] == [1, 0]
    assert "failed beside others, passed alone: crowded" in capsys.readouterr().out


def test_a_log_of_workers_tells_of_every_test(driver: ModuleType) -> None:
    log = (
        "a.py::test_one PASSED                    [  7%]\n"
        "a.py::test_two[x y] \n"
        "a.py::test_three \n"
        "[gw1] [ 50%] FAILED a.py::test_three \n"
        "a.py::test_four \n"
        "[gw0] [100%] PASSED a.py::test_two[x y] \n"
    )
    found, last = driver.outcomes(log)
    assert found == {
        "a.py::test_one": "PASSED",
        "a.py::test_two[x y]": "PASSED",
        "a.py::test_three": "FAILED",
    }
    assert last == "a.py::test_four"


@pytest.mark.parametrize("installed", [True, False])
def test_workers_are_asked_for_where_they_exist(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: bool
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    one = driver.Run(driver.parse(["--out", str(tmp_path)]), tmp_path)
    many = [step for step in driver.steps(tmp_path, 2) if step.workers > 1]
    assert [step.name for step in many] == ["kda kernels", "ssd kernels", "conv1d kernels"]
    assert all(("-n" in one.command(step)) is installed for step in many)


def test_no_time_is_no_success(
    driver: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    steps = [programme(driver, "pass")]
    assert run(driver, monkeypatch, tmp_path / "out", steps, "--budget-s", "5") == 1
    document = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [step["code"] for step in document["steps"]] == ["no time left"]


def test_an_interrupt_ends_the_steps_and_keeps_the_results(tmp_path: Path) -> None:
    """In a process of its own: pytest has a handler, too."""
    code = (
        f"import sys, os, signal, threading; sys.path.insert(0, {str(ROOT / 'tests' / 'gpu')!r})\n"
        "import run_all as r\n"
        "slow = r.Step('slow', 'A', command=('python', '-c', 'import time; time.sleep(100)'))\n"
        "r.steps, r.describe = lambda out, gpus: [slow, r.Step('next', 'A', command=slow.command)], lambda *_: None\n"
        "threading.Timer(1.5, os.kill, [os.getpid(), signal.SIGINT]).start()\n"
        f"sys.exit(r.main(['--rehearse', '--jobs', '1', '--group', 'A', '--out', {str(tmp_path)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60)
    assert done.returncode == 1
    document = json.loads((tmp_path / "results.json").read_text())
    assert [step["code"] for step in document["steps"]] == [-9, "no time left"]


def test_steps_are_chosen_by_group_and_name(driver: ModuleType, tmp_path: Path) -> None:
    def names(*arguments: str) -> list[str]:
        args = driver.parse(["--out", str(tmp_path), *arguments])
        return [step.name for step in driver.chosen(args)]

    assert names("--group", "B", "--only", "*check*") == [
        f"{tool} {op}" for tool in ("memcheck", "racecheck") for op in ("kda", "ssd", "conv1d")
    ]
    assert all(
        re.match(r"contract|deaths", name)
        for name in names("--only", "contract*,deaths*", "--group", "A")
    )
    assert len(names("--group", "A,B")) == len(names("--group", "A")) + len(names("--group", "B"))


def test_figures_stand_beside_what_is_wanted(driver: ModuleType) -> None:
    shape = {"T_global": 8192, "T_local": 2048, "H": 16, "HV": 16, "K": 128, "V": 128}
    shape |= {"chunk_size": None, "N": 1}

    def kda(
        provider: str, us: float, timer: str = "profiler", **options: object
    ) -> dict[str, object]:
        baseline = provider != "cptransport-cp"
        given = {"gate_mean": -1.0, **options}
        return row(
            [us], case="kda", provider=provider, timer=timer, mode="fwd_bwd", shape=shape,
            options=given, baseline=baseline, kernels=17,
        )  # fmt: skip

    own = {"overlap": False, "engine": "triton", "composition": "gather"}
    made_rows = [
        kda("cptransport-cp", 500.0, **own),
        kda("cptransport-cp", 600.0, "graph_replay", **own),
        kda("cptransport-cp", 450.0, **{**own, "engine": "cudnn"}),
        kda("cptransport", 400.0, engine="triton", cp=False),
        kda("fla", 1000.0),
        kda("fla", 1.0, gate_mean=-2.5),
    ]
    made = document(*made_rows, gate={"passed": 6, "failed": 0})
    table = [line.strip("| ").split(" | ") for line in driver.markdown([made]).splitlines()[2:]]
    found = {(line[0], line[1].split(", ")[3]): (line[4], line[7]) for line in table}
    assert found == {
        ("KDA CP, device / FLA-CP, triton", "engine triton"): ("0.500", "must"),
        ("KDA CP, device / FLA-CP, cudnn, gate -1", "engine cudnn"): ("0.450", "missed"),
        ("KDA CP, device / own without CP", "engine triton"): ("1.250", "missed"),
        ("KDA CP, graph replay / device", "engine triton"): ("1.200", "must"),
        ("KDA CP, kernels", "engine triton"): ("17.0", "must"),
    }
    spoilt = document(*made_rows, gate={"passed": 6, "failed": 1})
    assert driver.markdown([spoilt]).count("\n") == 1
    assert driver.markdown([{"problems": ["some"], **made}]).count("\n") == 1


def test_among_ranks_a_peer_is_paired_with_the_backend_that_it_ran_beside(
    driver: ModuleType,
) -> None:
    shape = {"T_global": 80, "T_local": 40, "H": 2, "HV": 2, "K": 8, "V": 8}
    shape |= {"chunk_size": None, "N": 1}
    merged = {"mode": "merge", "timer": "graph_replay"}
    gather = {"composition": "gather", "direction": "forward"}
    made_rows = []
    for number, backend in enumerate(("gloo", "nccl"), 1):
        for how in ("gather", "scan"):
            options = {"gate_mean": -1.0, "overlap": False, "engine": "torch", "composition": how}
            made_rows.append(
                row(
                    [10.0 * number],
                    case="kda",
                    provider=backend,
                    mode="fwd_bwd",
                    shape=shape,
                    options=options,
                )
            )
        for provider, us, more in (
            (backend, 3.0, {}),
            ("all_gather", 5.0 * number, {"beside": backend}),
        ):
            given = {"provider": provider, "baseline": bool(more), **merged}
            made_rows.append(row([us], options={**gather, **more}, **given))
            back = {**gather, **more, "direction": "backward"}
            made_rows.append(row([1000.0], options=back, **given))
        made_rows.append(
            row(
                [100.0 * number], case="kda", provider="fla", baseline=True, mode="fwd_bwd",
                shape=shape, options={"gate_mean": -1.0, "beside": backend},
            )
        )  # fmt: skip
    made = document(*made_rows, gate={"passed": 14, "failed": 0})
    table = [line.strip("| ").split(" | ") for line in driver.markdown([made]).splitlines()[2:]]
    found = {(line[0].partition(",")[0], line[1].partition(",")[0], *line[2:4]) for line in table}
    assert found == {
        ("boundary", "gloo", "3.0", "5.0"),
        ("boundary", "nccl", "3.0", "10.0"),
        ("KDA among ranks", "gloo", "10.0", "100.0"),
        ("KDA among ranks", "nccl", "20.0", "200.0"),
    }
    assert len(table) == 6  # both compositions among ranks


ANOTHER_ENGINE = """
from cptransport.engines.torch import TorchKDA

class Engine(TorchKDA):
    name = "another"

ENGINE = Engine()
"""


def test_rows_that_a_bench_made_are_paired(
    driver: ModuleType, install_engine: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several engines, gates and shapes in one run, beside a peer that is sharded."""
    install_engine("another", point="another", source=ANOTHER_ENGINE)
    monkeypatch.setitem(baselines.BASELINES["kda"], "fla", sharded_peer)  # type: ignore[index]
    made = bench(
        "kda", "--key-dim", "8", "--value-dim", "4", "--shape", "20x1", "--shape", "12x2",
        "--gate-mean", "-0.01", "--gate-mean", "-1", "--engine", "torch", "--engine", "another",
        "--baseline", "fla", "--overlap",
    )  # fmt: skip

    def times(provider: str, **options: object) -> dict[tuple[object, ...], float]:
        return {
            (r["options"]["gate_mean"], r["shape"]["HV"]): r["median_us"]
            for r in rows(made, provider=provider, mode="fwd_bwd", status="ok")
            if options.items() <= r["options"].items()
        }

    ours, theirs = times("cptransport-cp", engine="torch", overlap=False), times("fla")
    assert len(ours) == 4
    assert ours.keys() == theirs.keys()
    assert ours.keys() == times("cptransport-cp", engine="another", overlap=False).keys()
    table = [line.strip("| ").split(" | ") for line in driver.markdown([made]).splitlines()[2:]]
    found = [
        tuple(line[2:4])
        for line in table
        if line[0] == "KDA CP, eager wall / FLA-CP" and "engine torch" in line[1]
    ]
    assert sorted(found) == sorted((f"{ours[key]:,.1f}", f"{theirs[key]:,.1f}") for key in ours)


def sharded_peer(place: Place) -> list[Peer]:
    """The measured rank's part of the unsharded op, with the gradients that later ranks send back."""
    ranks, rank = range(place.world_size), place.rank
    tokens = place.local(rank)["q"].shape[1]
    plan = build_plan([0, tokens * place.world_size], world_size=1)
    cp = CPContext(plan, LoopbackTransport(place.device, 5.0))

    def call(inputs: Mapping[str, Tensor]) -> Tensor:
        parts = [inputs if other == rank else place.local(other) for other in ranks]
        whole = {name: torch.cat([part[name] for part in parts], 1) for name in inputs}
        outputs = chunk_kda(**whole, cp_context=cp, engine="torch")[0].split(tokens, 1)
        later = sum((outputs[other] * place.grad(other)).sum() for other in ranks if other > rank)
        mine = place.grad(rank)
        # Nothing in value; its gradient, once the output's comes in, is that of the later outputs.
        return outputs[rank] + (later - later.detach()) * mine / (mine * mine).sum()  # type: ignore[union-attr]

    return [Peer("fla", call, cp=True)]
