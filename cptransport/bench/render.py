# SPDX-License-Identifier: Apache-2.0
"""Writes reports: Markdown, plots, and one self-contained HTML page."""

from __future__ import annotations

import base64
import html as escape
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cptransport.bench.plots import Figure, figures
from cptransport.bench.report import Banner, Block, Code, Heading, Table, Text, blocks

__all__ = ["html", "markdown", "write_report"]

_TITLE = Heading(1, "cptransport benchmarks")

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; max-width: 84rem; margin: 2rem auto;
       padding: 0 1rem; }
h2 { margin-top: 3rem; border-bottom: 1px solid #ccc; }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; font-size: 13px; }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #e2e2e2; text-align: left;
         vertical-align: top; }
th { background: #f4f4f4; }
td:first-child, th { white-space: nowrap; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.wide { overflow-x: auto; }
.banner { background: #b00020; color: #fff; font-weight: 600; padding: .6rem 1rem; }
pre { background: #f4f4f4; padding: .6rem 1rem; overflow-x: auto; font-size: 13px; }
img { max-width: 100%; display: block; margin: .5rem 0 1.5rem; }
"""


def markdown(content: Sequence[Block | Figure]) -> str:
    """Write blocks as Markdown; figures are links to PNG files beside it."""
    return "\n\n".join(_markdown(block) for block in content) + "\n"


def html(content: Sequence[Block | Figure]) -> str:
    """Write blocks as one page that needs nothing else."""
    body = "\n".join(_html(block) for block in content)
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape.escape(_TITLE.text)}</title>\n<style>{_STYLE}</style></head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def write_report(documents: Sequence[Mapping[str, Any]], out: Path) -> list[Path]:
    """Write ``report.md``, ``report.html`` and the plots of documents into a folder.

    Args:
        documents: that passed ``schema.validate``.
        out: made if it does not exist.

    Returns:
        The files, the page first.
    """
    content: list[Block | Figure] = [_TITLE]
    drawn: list[Figure] = []
    for document in documents:
        content += blocks(document)
        own = figures(document)
        if own:
            content += [Heading(3, "Plots"), *own]
        drawn += own
    out.mkdir(parents=True, exist_ok=True)
    page, text = out / "report.html", out / "report.md"
    page.write_text(html(content), encoding="utf-8")
    text.write_text(markdown(content), encoding="utf-8")
    pictures = []
    for figure in drawn:
        picture = out / f"{figure.name}.png"
        picture.write_bytes(figure.png)
        pictures.append(picture)
    return [page, text, *pictures]


def _markdown(block: Block | Figure) -> str:
    if isinstance(block, Heading):
        return f"{'#' * block.level} {block.text}"
    if isinstance(block, Banner):
        return f"> **WARNING: {block.text}**"
    if isinstance(block, Code):
        return f"```\n{block.text}\n```"
    if isinstance(block, Figure):
        return f"![{block.title}]({block.name}.png)"
    if isinstance(block, Table):
        rule = ["---:" if i in block.numeric else "---" for i in range(len(block.header))]
        lines = [block.header, rule, *block.rows]
        return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
    assert isinstance(block, Text)
    return block.text


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def _html(block: Block | Figure) -> str:
    if isinstance(block, Heading):
        return f"<h{block.level}>{escape.escape(block.text)}</h{block.level}>"
    if isinstance(block, Banner):
        return f'<p class="banner">{escape.escape(block.text)}</p>'
    if isinstance(block, Code):
        return f"<pre>{escape.escape(block.text)}</pre>"
    if isinstance(block, Figure):
        data = base64.b64encode(block.png).decode()
        return f'<img alt="{escape.escape(block.title)}" src="data:image/png;base64,{data}">'
    if isinstance(block, Table):
        lines = [_html_line(block, "th", block.header)] if any(block.header) else []
        lines += [_html_line(block, "td", row) for row in block.rows]
        return '<div class="wide"><table>\n' + "\n".join(lines) + "\n</table></div>"
    assert isinstance(block, Text)
    return f"<p>{escape.escape(block.text)}</p>"


def _html_line(table: Table, tag: str, cells: Sequence[str]) -> str:
    return (
        "<tr>"
        + "".join(
            f"<{tag}{' class=number' if i in table.numeric else ''}>{escape.escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        )
        + "</tr>"
    )
