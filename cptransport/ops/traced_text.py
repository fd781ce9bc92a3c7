# SPDX-License-Identifier: Apache-2.0
"""What ``torch.compile`` works out while it traces, in place of tracing it.

Imported while it traces only: its decorator loads the compiler.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_scalar

__all__ = ["fixed", "text_of"]


def fixed(setting: Any) -> Any:
    """Return a setting as it is now: a number that the compiler holds variable becomes a constant of the graph."""
    if isinstance(setting, (tuple, list)):
        return tuple(fixed(each) for each in setting)
    return guard_scalar(setting) if isinstance(setting, (bool, int, float)) else setting


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def text_of(
    title: str, context: str, given: str, absent: str, tracked: str, settings: str, *values: Any
) -> str:
    """Return all that an op was given but its tensors, as ``traced`` reads it.

    Args:
        title, context: of the op; key of its context.
        given, absent, tracked: names of inputs, by blanks.
        settings: names likewise; ``values`` in their order.
    """
    named = dict(zip(settings.split(), values, strict=True))
    return json.dumps([title, context, given.split(), absent.split(), tracked.split(), named])
