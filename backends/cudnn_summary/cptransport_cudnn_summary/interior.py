# SPDX-License-Identifier: Apache-2.0
"""Forward of interior segments by the ``triton`` engine, on behalf of the engine ``cudnn``.

The triton engine is driven through the engine protocol on those segments alone; its states are
K-major, those here V-major. Its backward is not run: cuDNN's is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        segments, need: of these segments.
    """

    rows: Rows
    segments: tuple[LocalSegment, ...]
    need: tuple[Need, ...]

    @classmethod
    def of(cls, chosen: frozenset[int], lay: Layout) -> Share:
        """Take some of the rank's segments."""
        segments = tuple(lay.segments[i] for i in sorted(chosen))
        need = (Need(state=True, transition=True),) * len(segments)
        return cls(lay.state_rows(chosen), segments, need)


@dataclass
class Delegated:
    """Interior segments on their way through a forward and a backward.

    Attributes:
        share: which.
        local: the triton engine's, between the halves of a forward.
        saved: what it saved.
    """

    share: Share
    local: Any = None
    saved: Saved | None = None

    def forward_local(self, inputs: KDAInputs, out: Mapping[str, Tensor]) -> None:
        """Run the pass over the segments and write their E and M."""
        share = self.share
        tables = self._tables(inputs.v.shape, inputs.k.shape[3], out)
        given = inputs if inputs.seed is None else replace(inputs, seed=None)
        self.local = _engine().forward_local(given, share.segments, share.need, tables)
        self._write(tables, out)

    def forward_finish(self, entering: Tensor) -> Tensor:
        """Return o ``[B, T, HV, V]``, right in the segments' rows, zeros in those of no segment.

        ``entering`` is the rank's V-major table.
        """
        table = self.share.rows.take(entering).mT.contiguous()
        finished = _engine().forward_finish(self.local, lambda: table)
        self.local, self.saved = None, finished.saved
        return finished.output  # type: ignore[no-any-return]

    def backward_local(self, do: Tensor, keys: int, out: Mapping[str, Tensor]) -> None:
        """Write dE and M of the segments."""
        assert self.saved is not None
        tables = self._tables(do.shape, keys, out)
        _engine().backward_local(self.saved, OutputGrads(do, None), self.share.need, tables)
        self._write(tables, out)

    def _tables(
        self, shape: Sequence[int], keys: int, out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        heads, values = shape[2:]
        columns = {"state": values, "transition": keys}
        return {
            name: table.new_empty(self.share.rows.count, heads, keys, columns[name])
            for name, table in out.items()
        }

    def _write(self, tables: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        for name, table in tables.items():
            self.share.rows.put(table.mT, out[name])
