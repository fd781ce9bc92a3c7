# SPDX-License-Identifier: Apache-2.0
"""Forward of interior segments by the ``triton`` engine, on behalf of the engine ``cudnn``.

The triton engine is driven through the engine protocol on those segments alone; its states are
K-major, those here V-major. Its backward is not run: cuDNN's is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from cptransport.engines import KDAInputs, LocalSegment, Need, OutputGrads, Saved
from cptransport_cudnn_summary.packing import Layout, Rows

__all__ = ["SAVED", "Delegated", "Share"]

#: Places for what the triton engine saves, filled up with None: every rank saves equally many.
SAVED = 24


def _engine() -> Any:
    from cptransport.engines.triton import KDA_ENGINE

    return KDA_ENGINE


@dataclass(frozen=True, eq=False)
class Share:
    """Interior segments; the same objects at every call, by which the triton engine knows them again.

    Attributes:
        rows: of state tables that belong to the segments.
        segments: themselves. need, grad_need: of them, in the forward and in the backward.
    """

    rows: Rows
    segments: tuple[LocalSegment, ...]
    need: tuple[Need, ...]
    grad_need: tuple[Need, ...]

    @classmethod
    def of(cls, chosen: frozenset[int], lay: Layout) -> Share:
        """Take some of the rank's segments."""
        segments = tuple(lay.segments[i] for i in sorted(chosen))
        need = (Need(state=True, transition=True),) * len(segments)
        grad_need = (Need(state=True, transition=False),) * len(segments)
        return cls(lay.state_rows(chosen), segments, need, grad_need)


@dataclass
class Delegated:
    """Interior segments on their way through a forward and a backward.

    Attributes:
        share: which.
        local: the triton engine's, between the halves of a forward.
        m: transitions of the segments, K-major.
        saved: what the engine saved.
    """

    share: Share
    local: Any = None
    m: Tensor | None = None
    saved: Saved | None = None

    def forward_local(self, inputs: KDAInputs, out: Mapping[str, Tensor]) -> None:
        """Run the pass over the segments and write their E and M."""
        share = self.share
        tables = {name: self._table(table) for name, table in out.items()}
        given = inputs if inputs.seed is None else replace(inputs, seed=None)
        self.local = _engine().forward_local(given, share.segments, share.need, tables)
        self.m = tables["transition"]
        share.rows.put(tables["state"].mT, out["state"])
        share.rows.put(self.m.mT, out["transition"])

    def forward_finish(self, entering: Tensor) -> Tensor:
        """Return o ``[B, T, HV, V]``, right in the segments' rows, zeros in those of no segment.

        ``entering`` is the rank's V-major table.
        """
        table = self.share.rows.take(entering).mT.contiguous()
        finished = _engine().forward_finish(self.local, lambda: table)
        self.local, self.saved = None, finished.saved
        return finished.output  # type: ignore[no-any-return]

    def backward_local(self, do: Tensor, out: Mapping[str, Tensor]) -> None:
        """Write dE and M of the segments."""
        share = self.share
        assert self.saved is not None
        assert self.m is not None
        table = self._table(out["state"])
        given = OutputGrads(do, None)
        _engine().backward_local(self.saved, given, share.grad_need, {"state": table})
        share.rows.put(table.mT, out["state"])
        share.rows.put(self.m.mT, out["transition"])

    def _table(self, like: Tensor) -> Tensor:
        """Make a K-major table of the segments, for what ``like`` has V-major."""
        heads, rows, columns = like.shape[1:]
        return like.new_empty(self.share.rows.count, heads, columns, rows)
