# SPDX-License-Identifier: Apache-2.0
"""Megatron's options, and the mixer-level example on threads and between processes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cptransport import OpInputError, build_plan, env
from cptransport.integrations import megatron

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "mamba_mixer_megatron.py"
USE, MODE = "--use-mamba-state-passing-cp", "--mamba-state-passing-cp-load-balancing"


def parse(*arguments: str) -> argparse.Namespace:
    return megatron.add_arguments(argparse.ArgumentParser()).parse_args(arguments)


def test_options_are_those_of_the_pull_request(capsys: pytest.CaptureFixture[str]) -> None:
    args = parse()
    assert args.use_mamba_state_passing_cp is False
    assert args.mamba_state_passing_cp_load_balancing == "virtual"
    assert parse(USE).use_mamba_state_passing_cp is True
    for mode in ("none", "permute_p2p", "permute_a2a", "virtual"):
        assert parse(MODE, mode).mamba_state_passing_cp_load_balancing == mode
    with pytest.raises(SystemExit):
        parse(MODE, "all_to_all")
    assert "choose from" in capsys.readouterr().err


def test_options_map_onto_our_modes() -> None:
    assert megatron.load_balancing(parse()) == "all_to_all"
    assert megatron.load_balancing(parse(MODE, "permute_p2p")) == "all_to_all"
    assert megatron.load_balancing(argparse.Namespace()) == "all_to_all"
    assert megatron.load_balancing(parse(USE)) == "virtual"
    for mode in ("permute_p2p", "permute_a2a", "virtual"):
        assert megatron.load_balancing(parse(USE, MODE, mode)) == mode
        assert mode in env.MAMBA_LOAD_BALANCING.values
    args = parse(USE)
    args.mamba_state_passing_cp_load_balancing = "fast"
    with pytest.raises(OpInputError, match="'fast' is not valid; choose one of none, permute_p2p"):
        megatron.load_balancing(args)


def test_balanced_shards_reject_none() -> None:
    args = parse(USE, MODE, "none")
    for layout in ("zigzag", "zigzag_per_sequence"):
        with pytest.raises(OpInputError, match=f"this mixer receives {layout} ones"):
            megatron.load_balancing(args, layout=layout)
    assert megatron.load_balancing(args, layout="contiguous") == "none"


def test_options_that_megatron_has_already_stay() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(MODE, default="permute_a2a")
    args = megatron.add_arguments(parser).parse_args([USE])
    assert megatron.load_balancing(args) == "permute_a2a"
    with pytest.raises(TypeError):  # any other trouble is not hidden
        megatron._add(parser.add_argument_group("x"), "--other", nonsense=1)


def test_the_plan_of_balanced_shards() -> None:
    plan = megatron.balanced_plan([0, 16], 2)
    assert plan.runs == build_plan([0, 16], world_size=2, layout="zigzag").runs
    packed = megatron.balanced_plan([0, 3, 8], 2, cu_seqlens_padded=[0, 4, 12])
    assert packed.for_rank(0).index.tolist() == [0, 3, 4, 5, 10, 11]
    assert packed.padded_cu_seqlens == (0, 4, 12)


def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = [os.path.abspath(p) for p in sys.path if p]
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(path), **variables},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_example_equals_the_unsharded_mixer() -> None:
    """Every mode, in one process: documents of odd lengths, dense rows."""
    program = (
        "import sys; sys.path.insert(0, 'examples')\n"
        "import mamba_mixer_megatron as example\n"
        f"use, mode = {USE!r}, {MODE!r}\n"
        "small = ['--small', '--ranks', '4', '--sequence-length', '107']\n"
        "for more in ([], [use], [use, mode, 'permute_p2p'], [use, mode, 'permute_a2a']):\n"
        "    assert example.main([*small, *more]) == 0\n"
        "assert example.main([*small, '--batch', '2', use]) == 0\n"
        "example.LIMIT = 0.0\n"
        "assert example.main(small) == 1\n"
        "m = example.MixerConfig()  # Nemotron 3 Nano\n"
        "sizes = (m.nheads, m.headdim, m.ngroups, m.dstate, m.d_conv, m.chunk_size)\n"
        "assert sizes == (64, 64, 8, 128, 4, 128)\n"
        "try:\n"
        "    example.main([*small, use, mode, 'none'])\n"
        "except SystemExit as refused:\n"
        "    assert refused.code == 2\n"
        "else:\n"
        "    raise AssertionError('balanced shards must reject none')\n"
    )
    done = run("-c", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 ranks, load balancing") == 6
    for mode in ("all_to_all", "virtual", "permute_p2p", "permute_a2a"):
        assert f"load balancing {mode}" in done.stdout
    assert "WRONG" in done.stdout
    assert "none expects contiguous shards" in done.stderr
    assert "use virtual" in done.stderr


def test_the_example_between_processes() -> None:
    launch = ["-m", "cptransport", "launch", "--nproc", "2", str(EXAMPLE)]
    done = run(*launch, "--small", "--sequence-length", "61", USE, CULA_CP_COMM_BACKEND="gloo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "output, rank 0" in done.stdout
    assert "output, rank 1" in done.stdout
