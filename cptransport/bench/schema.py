# SPDX-License-Identifier: Apache-2.0
"""The schema ``cptransport.bench/1`` of a benchmark document, its check, reading and writing.

``SCHEMA`` is plain JSON Schema, so any validator takes it; ``problems`` understands the keywords
that it uses, and adds what a schema cannot say: figures are those of the raw samples, a number was
verified, a row without a number says why, no row is there twice. Machines that measure are often
cut off from package indexes, hence no library here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cptransport.bench.samples import STATISTICS, quantile, summarise

__all__ = [
    "IDENTITY",
    "MODES",
    "SCHEMA",
    "SCHEMA_ID",
    "SchemaError",
    "identity",
    "problems",
    "read",
    "validate",
    "write",
]

SCHEMA_ID = "cptransport.bench/1"

#: What a row times. ``publish_fetch``: summaries published until those of the peers are here;
#: ``fold``: what an exchange computes, without waiting; ``merge``: both, until the states that
#: enter this rank's segments are complete.
MODES = ("fwd", "bwd", "fwd_bwd", "publish_fetch", "fold", "merge", "gather", "barrier")
#: ``perf_counter``: host clock, the device synchronised at both ends. ``cuda_event``: events around
#: an eager call. ``graph_replay``: events around the replay of a captured call. ``profiler``: sum of
#: the times of its kernels.
TIMERS = ("perf_counter", "cuda_event", "graph_replay", "profiler")

_TEXT = {"type": "string", "minLength": 1}
_TEXT_OR_NULL = {"type": ["string", "null"], "minLength": 1}
_FLAG = {"type": "boolean"}
_COUNT = {"type": "integer", "minimum": 0}
_COUNT_OR_NULL = {"type": ["integer", "null"], "minimum": 0}
_POSITIVE = {"type": "integer", "minimum": 1}
_AMOUNT = {"type": "number", "minimum": 0}
_AMOUNT_OR_NULL = {"type": ["number", "null"], "minimum": 0}
_SCALARS = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number", "boolean", "null"]},
}


def _object(optional: frozenset[str] = frozenset(), /, **properties: Any) -> dict[str, Any]:
    """An object that has exactly these members; the optional ones may be missing."""
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


_SHAPE = {
    "type": "object",
    "properties": dict.fromkeys(
        ("T_global", "T_local", "B", "H", "HV", "K", "V", "chunk_size", "N"), _COUNT_OR_NULL
    ),
    "required": ["T_global", "T_local", "H", "K", "V", "chunk_size", "N"],
    "additionalProperties": False,
}

_IDENTITY = {
    "case": _TEXT,
    "op": _TEXT,
    "mode": {"enum": list(MODES)},
    "provider": _TEXT,
    "baseline": _FLAG,
    "timer": {"enum": list(TIMERS)},
    "world_size": _POSITIVE,
    "dtype": _TEXT,
    "shape": _SHAPE,
    "message_bytes": _COUNT_OR_NULL,
    "options": _SCALARS,
}

#: Fields that say which measurement a row is.
IDENTITY = tuple(_IDENTITY)

_RESULT = {
    "status": {"enum": ["ok", "error", "skipped"]},
    "reason": _TEXT_OR_NULL,
    "verified": _FLAG,
    "max_abs_err": _AMOUNT_OR_NULL,
    "samples_us": {"type": "array", "items": _AMOUNT},
    **dict.fromkeys(STATISTICS, _AMOUNT_OR_NULL),
    "bytes_received": _COUNT_OR_NULL,
    "bytes_expected": _COUNT_OR_NULL,
    "bus_bw_gbytes_s": _AMOUNT_OR_NULL,
    "tokens_s": _AMOUNT_OR_NULL,
    "peak_mem_bytes": _COUNT_OR_NULL,
    "kernels": _COUNT_OR_NULL,
    "sms_used": _COUNT_OR_NULL,
    "bound_us": _AMOUNT_OR_NULL,
    "percent_of_bound": _AMOUNT_OR_NULL,
}

#: Documents of before have none. Of ranks that measured repeat by repeat: the largest of the ranks'
#: medians in every repeat, and the median of those. Of the profiler: times by kernel in one iteration.
_LATER = {
    "repeat_medians_us": {"type": "array", "items": _AMOUNT},
    "median_of_repeats_us": _AMOUNT_OR_NULL,
    "kernel_us": {"type": "object", "additionalProperties": _AMOUNT},
}

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "$id": SCHEMA_ID,
    **_object(
        schema={"const": SCHEMA_ID},
        run_id=_TEXT,
        started_utc={"type": "string", "pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
        command={"type": "array", "items": {"type": "string"}},
        git=_object(commit=_TEXT_OR_NULL, dirty={"type": ["boolean", "null"]}),
        gate=_object(suite=_TEXT, passed=_COUNT, failed=_COUNT, report_path=_TEXT_OR_NULL),
        machine=_object(
            gpu_name=_TEXT_OR_NULL,
            gpu_count=_COUNT,
            gpus_used=_COUNT,
            ranks_per_device=_POSITIVE,
            interconnect=_TEXT,
            driver=_TEXT_OR_NULL,
            cpu=_TEXT,
            cpu_cores=_POSITIVE,
            hostname_hash={"type": "string", "pattern": "^[0-9a-f]{12}$"},
            clocks=_object(sm_mhz_before=_COUNT_OR_NULL, sm_mhz_after=_COUNT_OR_NULL),
            shared_node=_FLAG,
        ),
        software=_object(
            **dict.fromkeys(("python", "torch", "cptransport"), _TEXT),
            **dict.fromkeys(
                ("cuda", "triton", "nccl", "nvshmem", "cudnn", "cupy", "fla", "mamba_ssm"),
                _TEXT_OR_NULL,
            ),
            backends={"type": "object", "additionalProperties": _TEXT},
        ),
        method=_object(
            warmup=_COUNT,
            iterations=_POSITIVE,
            repeats=_POSITIVE,
            interleaving=_TEXT,
            l2={"enum": ["cold", "warm"]},
            launch_guard={"enum": ["none", "barrier", "sleep+barrier"]},
            statistic_across_ranks={"const": "max"},
            input_distribution=_TEXT,
            verification=_TEXT,
            peak_memory=_TEXT_OR_NULL,
            bound=_TEXT_OR_NULL,
        ),
        rows={
            "type": "array",
            "items": _object(frozenset(_LATER), **_IDENTITY, **_RESULT, **_LATER),
        },
    ),
}


class SchemaError(ValueError):
    """A document is not of the schema.

    Attributes:
        problems: every one that was found, each with the path where it is.
    """

    def __init__(self, problems: Sequence[str], where: str = "document") -> None:
        listed = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        super().__init__(f"{where} is not of schema {SCHEMA_ID}:\n  {listed}{more}")
        self.problems = list(problems)


def identity(row: Mapping[str, Any]) -> str:
    """Return a text that is the same for rows of the same measurement, and for no others."""
    return json.dumps({name: row[name] for name in IDENTITY}, sort_keys=True)


def validate(document: Any, where: str = "document") -> None:
    """Check a document.

    Raises:
        SchemaError: it is not of the schema; lists everything that is wrong.
    """
    found = problems(document)
    if found:
        raise SchemaError(found, where)


def problems(document: Any) -> list[str]:
    """Return everything that is wrong with a document, each with its path."""
    found = list(_mismatches(document, SCHEMA, ""))
    return found or list(_contradictions(document))


def write(document: Mapping[str, Any], path: Path) -> None:
    """Check a document and write it.

    Raises:
        SchemaError: it is not of the schema; what was measured is in ``*.invalid.json`` beside the
            path, with its ``problems`` as one more member, and nothing is written to the path.
    """
    found = problems(document)
    path.parent.mkdir(parents=True, exist_ok=True)
    if found:
        kept = path.with_suffix(".invalid.json")
        spoilt = {"problems": found, **document}
        kept.write_text(json.dumps(spoilt, indent=1, default=repr) + "\n", encoding="utf-8")
        raise SchemaError(found, f"what was measured is kept in {kept}: the document")
    path.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """Read a document and check it.

    Raises:
        SchemaError: it is no JSON or not of the schema.
        OSError: it cannot be read.
    """
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SchemaError([f"no JSON: {error}"], str(path)) from error
    validate(document, str(path))
    return document


_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def _is(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, _TYPES[name]) and not (
        isinstance(value, float) and not math.isfinite(value)
    )


def _mismatches(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    """Yield where a value is not of a schema; the keywords are those that ``SCHEMA`` uses."""
    where = path or "top"
    if "const" in schema and value != schema["const"]:
        yield f"{where}: must be {schema['const']!r}, is {value!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where}: must be one of {schema['enum']}, is {value!r}"
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is(value, kind) for kind in kinds):
        yield f"{where}: must be {' or '.join(kinds)}, is {value!r}"
        return
    yield from _outside(value, schema, where)
    if isinstance(value, dict):
        members = schema.get("properties", {})
        for name in schema.get("required", []):
            if name not in value:
                yield f"{where}: {name!r} is missing"
        others = schema.get("additionalProperties", True)
        for name, member in value.items():
            if name in members:
                yield from _mismatches(member, members[name], f"{path}/{name}")
            elif others is False:
                yield f"{where}: {name!r} is unknown"
            elif others is not True:
                yield from _mismatches(member, others, f"{path}/{name}")
    if isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _mismatches(item, schema["items"], f"{path}/{index}")


def _outside(value: Any, schema: Mapping[str, Any], where: str) -> Iterator[str]:
    if "minimum" in schema and value is not None and value < schema["minimum"]:
        yield f"{where}: must be at least {schema['minimum']}, is {value!r}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{where}: must not be empty"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where}: must match {schema['pattern']}, is {value!r}"


def _contradictions(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what a schema cannot say."""
    seen: dict[str, int] = {}
    for index, row in enumerate(document["rows"]):
        where = f"/rows/{index}"
        first = seen.setdefault(identity(row), index)
        if first != index:
            yield f"{where}: the same measurement as /rows/{first}"
        if row["status"] != "ok":
            if row["reason"] is None:
                yield f"{where}: status {row['status']} without a reason"
            if row["samples_us"]:
                yield f"{where}: status {row['status']} with samples"
        elif not row["verified"]:
            yield f"{where}: a number that was not verified"
        elif not row["samples_us"]:
            yield f"{where}: status ok without samples"
        medians = row.get("repeat_medians_us", [])
        expected = quantile(medians, 0.5) if medians else None
        if row.get("median_of_repeats_us") != expected:
            yield f"{where}/median_of_repeats_us: the repeats say {expected}"
        for name, figure in summarise(row["samples_us"]).items():
            given = row[name]
            if given != figure and (None in (given, figure) or not math.isclose(given, figure)):  # type: ignore[arg-type]
                yield f"{where}/{name}: the samples say {figure}, the row {given}"
