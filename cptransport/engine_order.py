# SPDX-License-Identifier: Apache-2.0
"""Which engines ``auto`` tries, in which order: a rule on what every rank knows alike, and a table.

1. What the transport's backend prefers.
2. Blackwell, KDA: cuDNN. Hopper, KDA, a gate that is known to be bounded: cuDNN where the table says
   that it is faster on this GPU for such a shape.
3. ``triton`` on CUDA.
4. ``torch``.

An engine that declines a call is passed over, so this says only what is best where it serves.

The table is ``data/engines.json``. Only measurements fill it::

    python -m cptransport.engine_order report.json ... --out cptransport/data/engines.json

takes documents of ``cptransport bench kda`` with both engines. cuDNN is listed for a shape where
its forward and backward were faster, by the sum of kernel times, at every mean gate that was
measured there: on Hopper its forward is up to nine times slower for weak gates, and a bound says
nothing of the mean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from cptransport.engines import KDAOptions, OpFacts

__all__ = ["SCHEMA_ID", "automatic", "table_of"]

SCHEMA_ID = "cptransport.engines/1"
_CUDNN, _TRITON, _TORCH = "cudnn", "triton", "torch"
_HOPPER, _BLACKWELL = 9, 10

#: GPU name, H, HV, K, V of a row of the table.
_Key = tuple[str, int, int, int, int]


def automatic(facts: OpFacts, preferred: str | None) -> tuple[str, ...]:
    """Return the candidates in order.

    Args:
        facts: of the call.
        preferred: by the transport's backend.
    """
    order = [preferred] if preferred else []
    if facts.device_type == "cuda":
        if facts.op == "kda" and _prefers_cudnn(facts):
            order.append(_CUDNN)
        order.append(_TRITON)
    order.append(_TORCH)
    return tuple(dict.fromkeys(order))


def _prefers_cudnn(facts: OpFacts) -> bool:
    major, _ = torch.cuda.get_device_capability()
    if major == _BLACKWELL:
        return True
    return major == _HOPPER and _bounded(facts) and _faster(facts, torch.cuda.get_device_name())


def _bounded(facts: OpFacts) -> bool:
    options = facts.options
    assert isinstance(options, KDAOptions)
    return options.safe_gate or (options.use_gate_in_kernel and options.lower_bound is not None)


def _faster(facts: OpFacts, gpu: str) -> bool:
    """Whether the row of the shape whose length is nearest, within a factor of two, lists cuDNN."""
    key = (gpu, facts.heads, facts.value_heads, facts.key_dim, facts.value_dim)
    tokens = facts.batch * facts.max_tokens
    near = [
        (max(tokens, length) / max(1, min(tokens, length)), engine)
        for length, engine in _table().get(key, {}).items()
    ]
    ratio, engine = min(near, default=(float("inf"), ""))
    return ratio <= 2 and engine == _CUDNN


@lru_cache(maxsize=1)
def _table() -> Mapping[_Key, Mapping[int, str]]:
    """Return the table: shape -> tokens -> the faster engine."""
    text = (files("cptransport") / "data" / "engines.json").read_text(encoding="utf-8")
    found: dict[_Key, dict[int, str]] = {}
    for row in json.loads(text)["rows"]:
        key = (row["gpu"], *(row[name] for name in ("H", "HV", "K", "V")))
        found.setdefault(key, {})[row["tokens"]] = row["engine"]
    return found


def table_of(documents: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the table that benchmark documents make.

    Args:
        documents: of the schema ``cptransport.bench/1``; rows other than verified forwards and
            backwards of our own KDA as it runs by default, timed by the profiler, are left out.
    """
    times: dict[tuple[Any, ...], dict[Any, dict[str, float]]] = {}
    for document in documents:
        for row in document["rows"]:
            options, shape = row["options"], row["shape"]
            engine = options.get("engine")
            mine = row["provider"].startswith("cptransport") and engine in (_CUDNN, _TRITON)
            mine = mine and not any(name.startswith("CULA_") for name in options)
            what = (row["op"], row["mode"], row["timer"])
            if not (mine and row["verified"] and what == ("kda", "fwd_bwd", "profiler")):
                continue
            heads = shape["H"]
            key = (
                document["machine"]["gpu_name"],
                heads,
                shape.get("HV") or heads,
                shape["K"],
                shape["V"],
                (shape.get("B") or 1) * shape["T_local"],
            )
            setting = (row["provider"].partition("+")[0], options.get("gate_mean"))
            best = times.setdefault(key, {}).setdefault(setting, {})
            best[engine] = min(row["median_us"], best.get(engine, float("inf")))
    rows = []
    for key, settings in sorted(times.items()):
        both = [best for best in settings.values() if len(best) == 2]
        if not both:
            continue
        wins = all(best[_CUDNN] < best[_TRITON] for best in both)
        rows.append(
            {
                **dict(zip(("gpu", "H", "HV", "K", "V", "tokens"), key, strict=True)),
                "engine": _CUDNN if wins else _TRITON,
                "median_us": {e: [best[e] for best in both] for e in (_CUDNN, _TRITON)},
            }
        )
    return {"schema": SCHEMA_ID, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description="Make the table of engines from bench documents.")
    parser.add_argument("reports", nargs="+", type=Path, help="JSON of `cptransport bench kda`")
    parser.add_argument("--out", type=Path, required=True, help="where to write the table")
    given = parser.parse_args(arguments)
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in given.reports]
    given.out.write_text(json.dumps(table_of(documents), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
