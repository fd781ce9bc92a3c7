# SPDX-License-Identifier: Apache-2.0
"""A small document that is of the schema, for tests to spoil."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cptransport.bench.rows import Outcome, Subject
from cptransport.bench.rows import row as make_row


def row(
    samples: Sequence[float] = (14.0, 10.0, 12.0), error: str | None = None, **fields: Any
) -> dict[str, Any]:
    subject = {
        "case": "boundary",
        "op": "kda",
        "mode": "merge",
        "provider": "gloo",
        "timer": "perf_counter",
        "world_size": 4,
        "dtype": "float32",
        "shape": {
            "T_global": None,
            "T_local": None,
            "H": 2,
            "K": 8,
            "V": 8,
            "chunk_size": None,
            "N": 1,
        },
        "options": {"composition": "gather"},
    }
    subject |= {name: value for name, value in fields.items() if name in Subject.__annotations__}
    rest = {name: value for name, value in fields.items() if name not in Subject.__annotations__}
    outcome = Outcome(samples_us=[] if error else list(samples), error=error)
    outcome.max_abs_err = rest.pop("max_abs_err", 1e-7)
    for name, value in rest.items():
        setattr(outcome, name, value)
    return make_row(Subject(**subject), [outcome])


def document(*rows: dict[str, Any], **blocks: Any) -> dict[str, Any]:
    made = {
        "schema": "cptransport.bench/1",
        "run_id": "0123456789abcdef",
        "started_utc": "2026-11-29T12:00:00Z",
        "command": ["/usr/bin/cptransport", "bench", "boundary", "--op", "k d a"],
        "git": {"commit": "f" * 40, "dirty": False},
        "gate": {"suite": "checks", "passed": 1, "failed": 1, "report_path": None},
        "machine": {
            "gpu_name": None,
            "gpu_count": 0,
            "gpus_used": 0,
            "ranks_per_device": 4,
            "interconnect": "host memory",
            "driver": None,
            "cpu": "Some CPU",
            "cpu_cores": 2,
            "hostname_hash": "0123456789ab",
            "clocks": {"sm_mhz_before": None, "sm_mhz_after": None},
            "shared_node": False,
        },
        "software": {
            "python": "3.11",
            "torch": "2.13",
            "cptransport": "0.1.0",
            **dict.fromkeys(
                ("cuda", "triton", "nccl", "nvshmem", "cudnn", "cupy", "fla", "mamba_ssm")
            ),
            "backends": {"cptransport-nccl": "0.1.0"},
        },
        "method": {
            "warmup": 1,
            "iterations": 3,
            "repeats": 1,
            "interleaving": "none",
            "l2": "warm",
            "launch_guard": "barrier",
            "statistic_across_ranks": "max",
            "input_distribution": "N(0, 1)",
            "verification": "by hand",
            "peak_memory": None,
            "bound": None,
        },
        "rows": list(rows) or [row(), row(provider="threads", error="RuntimeError: it broke")],
    }
    for name, values in blocks.items():
        made[name] = {**made[name], **values}
    return made
