# SPDX-License-Identifier: Apache-2.0
"""Documents that are not of the schema are refused, with the place and the reason."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from documents import document, row

from cptransport.bench.schema import SchemaError, identity, problems, read, validate, write


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return a good document with one member replaced; the path is like ``rows/0/mode``."""
    made: Any = copy.deepcopy(document())
    *parents, last = (int(name) if name.isdigit() else name for name in path.split("/"))
    place = made
    for name in parents:
        place = place[name]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return made  # type: ignore[no-any-return]


def test_a_good_document_is_accepted_and_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    write(document(), path)
    assert read(path) == document()


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("schema", "cptransport.bench/2", "schema: must be 'cptransport.bench/1'"),
        ("started_utc", "yesterday", "started_utc: must match"),
        ("git", KeyError, "'git' is missing"),
        ("gate/passed", -1, "/gate/passed: must be at least 0"),
        ("gate/passed", True, "/gate/passed: must be integer, is True"),
        ("machine/hostname_hash", "node17", "/machine/hostname_hash: must match"),
        ("machine/ranks_per_device", None, "/machine/ranks_per_device: must be integer"),
        ("software/backends", {"x": 1}, "/software/backends/x: must be string"),
        ("method/statistic_across_ranks", "mean", "must be 'max'"),
        ("method/colour", "red", "/method: 'colour' is unknown"),
        ("rows/0/mode", "sideways", "/rows/0/mode: must be one of"),
        ("rows/0/timer", "sundial", "/rows/0/timer: must be one of"),
        ("rows/0/shape/T_local", "long", "/rows/0/shape/T_local: must be integer or null"),
        ("rows/0/options", {"deep": {}}, "/rows/0/options/deep: must be string or number"),
        ("rows/0/samples_us", [1.0, "2"], "/rows/0/samples_us/1: must be number"),
        ("rows/0/samples_us", [1.0, float("nan")], "/rows/0/samples_us/1: must be number"),
        ("rows/0/provider", "", "/rows/0/provider: must not be empty"),
        ("rows/0/verified", False, "/rows/0: a number that was not verified"),
        ("rows/0/median_us", 1.0, "/rows/0/median_us: the samples say 12"),
        ("rows/0/min_us", None, "/rows/0/min_us: the samples say 10"),
        ("rows/0/samples_us", [], "/rows/0: status ok without samples"),
        ("rows/1/reason", None, "/rows/1: status error without a reason"),
        ("rows/1/samples_us", [1.0], "/rows/1: status error with samples"),
        ("rows/1", row(), "/rows/1: the same measurement as /rows/0"),
    ],
)
def test_what_is_wrong_is_found_and_named(path: str, value: Any, says: str) -> None:
    made = changed(path, value)
    assert any(says in problem for problem in problems(made)), problems(made)
    with pytest.raises(SchemaError, match="is not of schema cptransport.bench/1"):
        validate(made)


@pytest.mark.parametrize(
    ("where", "value"), [("verified", False), ("max_abs_err", float("inf")), ("options", {1, 2})]
)
def test_what_is_not_of_the_schema_is_kept_beside_its_path(
    tmp_path: Path, where: str, value: Any
) -> None:
    path, kept = tmp_path / "new" / "run.json", tmp_path / "new" / "run.invalid.json"
    spoilt = changed(f"rows/0/{where}", value)
    with pytest.raises(SchemaError, match=r"kept in .*run\.invalid\.json: the document is not of"):
        write(spoilt, path)
    assert not path.exists()
    found = json.loads(kept.read_text(encoding="utf-8"))
    assert found.pop("problems") == problems(spoilt) != []
    assert found["rows"][0]["samples_us"] == spoilt["rows"][0]["samples_us"] != []
    assert found["rows"][1:] == spoilt["rows"][1:]
    with pytest.raises(SchemaError):
        read(kept)


def test_what_is_no_json_or_another_schema_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(SchemaError, match=r"(?s)run\.json.*no JSON"):
        read(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(SchemaError, match="top: must be object"):
        read(path)
    path.write_text(json.dumps(changed("schema", "other")), encoding="utf-8")
    with pytest.raises(SchemaError, match=r"run\.json"):
        read(path)


def test_identity_is_every_identity_field_and_no_other() -> None:
    assert identity(row()) == identity(row(samples=(1.0,), max_abs_err=9.0))
    for name, value in (("timer", "cuda_event"), ("world_size", 8), ("options", {"a": 1})):
        assert identity(row()) != identity(row(**{name: value}))
