# SPDX-License-Identifier: Apache-2.0
"""Dependencies point one way, and ops do not know which transport they run on.

Imports are read from the source, also those inside functions; what is only for type checkers is
left out.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = ROOT / "cptransport"

#: the protocol and who implements it, lowest first: nobody reaches what stands after it
PROTOCOL = ("errors", "env", "transport", "backend", "registry", "select")
#: what stands on the protocol, lowest first: nobody reaches upwards, the rest reaches none of it
LEVELS = ("exchange", "ops", "integrations", "testing", "bench", "demo", "cli")
#: plans and summaries know tensors and declarations; no process group and nobody who does
PURE = ("composition", "cost", "describe", "halo", "layouts", "plan", "summary", "volume")
IMPURE = {"backend", "base", "context", "control", "registry", "select", "transports"}

BACKEND_MAY_IMPORT = ("transport", "backend", "errors", "engines")
BACKENDS = sorted(folder.name for folder in ROOT.glob("backends/*"))


def imports(source: str) -> Iterator[str]:
    """Yield the dotted name of everything that a module imports at run time."""
    pending: list[ast.AST] = [ast.parse(source)]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        pending += ast.iter_child_nodes(node)


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def part(path: Path) -> str:
    """Return the module or subpackage of cptransport that a file belongs to."""
    return path.relative_to(CORE).parts[0].removesuffix(".py")


PARTS = {part(path) for path in sources(CORE)} - {"__init__", "__main__"}


def core_parts(path: Path) -> set[str]:
    """Return the modules and subpackages of cptransport that a file imports."""
    names = (name.split(".") for name in imports(path.read_text(encoding="utf-8")))
    return {name[1] for name in names if name[0] == "cptransport" and len(name) > 1} & PARTS


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return what each module and subpackage of cptransport imports directly."""
    graph: dict[str, set[str]] = {name: set() for name in PARTS}
    for path in sources(CORE):
        if part(path) in graph:
            graph[part(path)] |= core_parts(path) - {part(path)}
    return graph


def routes(graph: dict[str, set[str]], start: str) -> dict[str, str]:
    """Return everything that a part reaches, each with the way there."""
    found, pending = {start: start}, [start]
    while pending:
        here = pending.pop()
        for there in graph.get(here, set()) - set(found):
            found[there] = f"{found[here]} -> {there}"
            pending.append(there)
    del found[start]
    return found


def above(name: str) -> set[str]:
    """Return what a part must not reach."""
    forbidden = set(LEVELS[LEVELS.index(name) + 1 :] if name in LEVELS else LEVELS)
    if name in PROTOCOL:
        forbidden |= set(PROTOCOL[PROTOCOL.index(name) + 1 :])
    if name in PURE:
        forbidden |= IMPURE
    return forbidden


def upward(graph: dict[str, set[str]], name: str) -> list[str]:
    """Return the ways by which a part reaches what stands above it."""
    return sorted(way for there, way in routes(graph, name).items() if there in above(name))


def path_id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_imports_are_read_as_python_means_them() -> None:
    source = """
from typing import TYPE_CHECKING
import cptransport.plan as plan
if TYPE_CHECKING:
    from cptransport.ops import kda
else:
    import torch
def late():
    from cptransport.env import a, b
"""
    assert sorted(imports(source)) == [
        "cptransport.env.a",
        "cptransport.env.b",
        "cptransport.plan",
        "torch",
        "typing.TYPE_CHECKING",
    ]


@pytest.mark.parametrize("name", sorted(PARTS))
def test_core_reaches_nothing_above(name: str) -> None:
    assert upward(import_graph(), name) == []


@pytest.mark.parametrize(
    ("low", "high"),
    [
        ("errors", "env"),
        ("transport", "backend"),
        ("backend", "registry"),
        ("registry", "select"),
        ("plan", "select"),
        ("plan", "exchange"),
        ("exchange", "ops"),
        ("transports", "ops"),
        ("ops", "cli"),
    ],
)
def test_the_rules_catch_an_import_from_above(low: str, high: str) -> None:
    graph = {**import_graph(), "between": {high}}
    graph[low] = graph[low] | {"between"}
    assert f"{low} -> between -> {high}" in upward(graph, low)


@pytest.mark.parametrize("name", PURE)
def test_plans_know_no_process_group(name: str) -> None:
    text = (CORE / f"{name}.py").read_text(encoding="utf-8")
    assert "torch.distributed" not in text


@pytest.mark.parametrize("path", sources(CORE), ids=path_id)
def test_core_imports_no_backend_package(path: Path) -> None:
    roots = {name.split(".")[0] for name in imports(path.read_text(encoding="utf-8"))}
    assert not {root for root in roots if root.startswith("cptransport_")} - {"cptransport_kernels"}


@pytest.mark.parametrize("path", sources(ROOT / "kernels"), ids=path_id)
def test_kernels_are_a_leaf(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for name in imports(text):
        assert name.split(".")[0] != "cptransport", name
        assert not name.startswith("torch.distributed"), name
    assert "torch.distributed" not in text


@pytest.mark.parametrize("name", BACKENDS)
def test_backends_import_the_protocol_and_kernels_only(name: str) -> None:
    siblings = {f"cptransport_{name}", "cptransport_kernels"}
    modules = set(BACKEND_MAY_IMPORT)
    if name in ("nvshmem_signal", "nvshmem_barrier"):
        siblings.add("cptransport_nvshmem_runtime")
    if name == "cudnn_summary":  # stands on two transports
        siblings.add("cptransport_nccl")
        modules.add("transports")
    files = sources(ROOT / "backends" / name / f"cptransport_{name}")
    assert files
    for path in files:
        for imported in imports(path.read_text(encoding="utf-8")):
            root, module, *_ = [*imported.split("."), ""]
            if root == "cptransport":
                assert module in modules, f"{path.name}: {imported}"
            elif root.startswith("cptransport_"):
                assert root in siblings, f"{path.name}: {imported}"


@pytest.mark.parametrize("path", sources(CORE / "ops"), ids=path_id)
def test_ops_do_not_know_their_transport(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not core_parts(path) & {"transports", "select"}
    assert not re.findall(r"nccl|nvshmem|cupy|cudnn|gloo", text, flags=re.IGNORECASE)


@pytest.mark.parametrize(
    "folder", [CORE, *sorted(each for each in CORE.rglob("*") if each.is_dir())], ids=path_id
)
def test_every_folder_with_modules_is_a_package(folder: Path) -> None:
    # Only packages are found when wheels are built.
    if any(folder.glob("*.py")):
        assert (folder / "__init__.py").exists()
