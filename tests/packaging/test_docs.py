# SPDX-License-Identifier: Apache-2.0
"""Every Python example in the documentation runs.

Blocks marked ``python`` of one file run in order in one namespace, as a reader would type them;
``python no-run`` is for what needs several processes or hardware.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("backends/*/*.md")])

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)$")


def program(page: str) -> str:
    """Return the page's runnable blocks, each on the lines where the page has it."""
    lines: list[str] = []
    inside, runs, indent = False, False, 0
    for line in page.splitlines():
        fence = FENCE.match(line)
        if fence and not inside:
            inside, indent = True, len(fence["indent"])
            runs = fence["info"].strip() == "python"
        elif fence and not fence["info"].strip():
            inside = runs = False
        elif runs:
            lines.append(line[indent:])
            continue
        lines.append("")
    return "\n".join(lines)


def test_program_keeps_lines_and_leaves_out_what_does_not_run() -> None:
    page = """
```python
x = 1
```
```python no-run
y
```
* b
  ```python
  if x:
    z
  ```
"""
    kept = [(number, line) for number, line in enumerate(program(page).splitlines()) if line]
    assert kept == [(2, "x = 1"), (9, "if x:"), (10, "  z")]


def test_the_readme_has_an_example() -> None:
    assert program((ROOT / "README.md").read_text(encoding="utf-8")).strip()


@pytest.mark.parametrize(
    "page", [page for page in PAGES if program(page.read_text(encoding="utf-8")).strip()], ids=str
)
def test_examples_run(page: Path, tmp_path: Path) -> None:
    script = tmp_path / page.with_suffix(".py").name
    script.write_text(program(page.read_text(encoding="utf-8")), encoding="utf-8")
    # Relative entries, as on a machine without installs, must survive the change of folder.
    path = [
        os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(":") if entry
    ]
    result = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, f"{page.relative_to(ROOT)}:\n{result.stderr}"
