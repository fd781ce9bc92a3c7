# SPDX-License-Identifier: Apache-2.0
"""Random op calls: any layout, edges of sequences near the cuts of ranks, any mix of options."""

from __future__ import annotations

import math
import random
from typing import Any

from cptransport.composition import COMPOSITIONS
from cptransport.testing.op_cases import OPTIONAL, OpSpec

__all__ = ["random_spec"]


def random_spec(rng: random.Random, op: str, **fixed: Any) -> OpSpec:
    """Return a random call; packed or dense, any layout, any mix of options and optional inputs.

    Args:
        rng: the source of all choices.
        op: one of ``OPS``.
        fixed: attributes of the spec that are not drawn.
    """
    world_size = fixed.get("world_size", rng.randint(1, 5))
    heads = rng.randint(1, 3)
    drawn: dict[str, Any] = {
        "world_size": world_size,
        "batch": 1,
        "heads": heads,
        # One number is badly conditioned where it cancels; the largest of three rarely is.
        "value_heads": heads * rng.choice([n for n in (1, 2, 3) if heads * n >= 3]),
        "key_dim": rng.choice((4, 7, 8)),
        "value_dim": rng.choice((5, 6, 12)),
        "width": rng.randint(1, 6),
        "optional": [name for name in OPTIONAL[op] if rng.random() < 0.6],
        "composition": rng.choice(COMPOSITIONS),
        "overlap": rng.random() < 0.3,
        "strided": rng.random() < 0.4,
        "alternate": rng.random() < 0.5,
        "padding": rng.choice((math.nan, 1e4)),
        "loss": rng.choice((("output", "final"), ("output", "final"), ("output",), ("final",))),
        "seed": rng.randrange(1 << 30),
    }
    drawn["options"] = _OPTIONS[op](rng, drawn)
    drawn.update(_random_plan(rng, world_size))
    if "cu_seqlens" in fixed:
        for name in ("boundaries", "padded_cu_seqlens", "batch"):
            drawn.pop(name)
        if drawn["layout"] == "custom":
            drawn["layout"] = "zigzag"
    drawn.update(fixed)
    return OpSpec(op, **drawn)


def _random_plan(rng: random.Random, world_size: int) -> dict[str, Any]:
    """Draw offsets with edges close to the cuts of the stream, empty sequences, padding, layout."""
    total = rng.choice((rng.randint(0, 9), rng.randint(10, 40), rng.randint(41, 90)))
    near = [max(0, min(total, total * r // world_size + rng.randint(-3, 3))) for r in range(1, 5)]
    edges = [edge for edge in near if rng.random() < 0.5]
    edges += [rng.randint(0, total) for _ in range(rng.randint(0, 2))]
    if edges and rng.random() < 0.4:
        edges.append(rng.choice(edges))  # an empty sequence
    offsets = [0, *sorted(edges), total]
    batch = 1
    if rng.random() < 0.25:
        offsets, batch = [0, total], rng.randint(2, 3)
    padded = None
    if rng.random() < 0.3:
        padded = [0]
        for start, stop in zip(offsets, offsets[1:], strict=False):
            padded.append(padded[-1] + stop - start + rng.choice((0, 0, 1, 3, 8)))
    rows = total if padded is None else padded[-1]
    layouts = ("contiguous", "contiguous_per_sequence", "zigzag", "zigzag_per_sequence", "custom")
    layout = rng.choice(layouts)
    boundaries: Any = None
    if layout == "custom":
        cuts = sorted(rng.randint(0, rows) for _ in range(2 * world_size))
        pieces = zip([0, *cuts], [*cuts, rows], strict=True)
        boundaries = [(rng.randrange(world_size), a, b) for a, b in pieces if a < b]
    elif layout == "contiguous" and rng.random() < 0.4:
        boundaries = [0, *sorted(rng.randint(0, rows) for _ in range(world_size - 1)), rows]
    return {
        "cu_seqlens": offsets,
        "batch": batch,
        "padded_cu_seqlens": padded,
        "layout": layout,
        "boundaries": boundaries,
    }


def _kda_options(rng: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if rng.random() < 0.6:
        options["use_gate_in_kernel"] = True
        if rng.random() < 0.5:
            options["lower_bound"] = rng.choice((-5.0, -0.5))
            options["safe_gate"] = rng.random() < 0.5
    else:
        drawn["optional"] = [name for name in drawn["optional"] if name == "initial_state"]
    if rng.random() < 0.5:
        options["use_beta_sigmoid_in_kernel"] = True
        options["allow_neg_eigval"] = rng.random() < 0.5
    for name in ("use_qk_l2norm_in_kernel", "state_v_first"):
        if rng.random() < 0.5:
            options[name] = True
    if rng.random() < 0.4:
        options["scale"] = rng.choice((0.3, 1.7))
    return options


def _ssd_options(rng: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"chunk_size": rng.choice((16, 64))}
    if rng.random() < 0.6:
        options["dt_softplus"] = True
    elif "dt_bias" in drawn["optional"]:
        drawn["optional"] = [name for name in drawn["optional"] if name != "dt_bias"]
    if rng.random() < 0.4:
        options["dt_limit"] = (0.1, rng.choice((1.0, math.inf)))
    return options


def _conv1d_options(rng: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    return {"activation": rng.choice((None, "silu", "swish"))}


def _mixer_options(rng: random.Random, drawn: dict[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {"chunk_size": 16, "activation": rng.choice((None, "silu", "swish"))}
    if rng.random() < 0.4:
        options["dt_limit"] = (0.1, rng.choice((1.0, math.inf)))
    return options


_OPTIONS = {
    "kda": _kda_options,
    "ssd": _ssd_options,
    "conv1d": _conv1d_options,
    "mixer": _mixer_options,
}
