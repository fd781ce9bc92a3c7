# SPDX-License-Identifier: Apache-2.0
"""A bench, run small on the CPU."""

from __future__ import annotations

import argparse
from typing import Any

from cptransport.bench.cases import add_arguments, load_case, run_case
from cptransport.bench.schema import problems

SHORT = ["--warmup", "1", "--iterations", "2", "--repeats", "2"]
SHORT += ["--device", "cpu", "--timeout-s", "60"]


def bench(name: str, *arguments: str) -> dict[str, Any]:
    """Return the document of a short run, which must be of the schema."""
    case = load_case(name)
    parser = argparse.ArgumentParser()
    add_arguments(parser, case)
    args = parser.parse_args([*arguments, *SHORT])
    made = run_case(case, args, lambda text, done: None, ["cptransport", "bench", name])
    assert problems(made) == []
    return made
