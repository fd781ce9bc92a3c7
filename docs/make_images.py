# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of ``plans-and-layouts.md``: ``python docs/make_images.py`` (needs matplotlib)."""

from __future__ import annotations

import os
from pathlib import Path

from cptransport import build_plan
from cptransport.cli.plan import draw

IMAGES = Path(__file__).parent / "images"

#: The example of the page: three documents, one of them longer than the other two together.
CU_SEQLENS = [0, 10, 31, 37]
WORLD_SIZE = 3

LAYOUTS = {
    "contiguous": None,
    "contiguous_per_sequence": None,
    "zigzag": None,
    "zigzag_per_sequence": None,
    "custom": [(0, 0, 5), (2, 5, 20), (1, 20, 29), (0, 29, 37)],
}


def main() -> None:
    """Write one picture per layout, the same bytes in every run."""
    os.environ["SOURCE_DATE_EPOCH"] = "0"
    import matplotlib

    matplotlib.rcParams.update({"svg.hashsalt": "cptransport", "svg.fonttype": "none"})
    IMAGES.mkdir(exist_ok=True)
    for layout, boundaries in LAYOUTS.items():
        plan = build_plan(CU_SEQLENS, world_size=WORLD_SIZE, layout=layout, boundaries=boundaries)
        draw(plan, IMAGES / f"{layout}.svg")


if __name__ == "__main__":
    main()
