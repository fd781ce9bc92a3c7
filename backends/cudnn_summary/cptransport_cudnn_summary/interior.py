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
from cptransport_cudnn_summary.packing import Layout

__all__ = ["SAVED", "Delegated"]

#: Places for what the triton engine saves, filled up with None: every rank saves equally many.
SAVED = 24


def _engine() -> Any:
    from cptransport.engines.triton import KDA_ENGINE

    return KDA_ENGINE


@dataclass
class Delegated:
    """Interior segments between the halves of a forward.

    Attributes:
        rows: int64, rows of state tables that belong to the segments, ``segment * B + b``.
        segments, need: of these segments.
        local: the triton engine's.
        saved: what it saved, after ``finish``.
    """

    rows: Tensor
    segments: tuple[LocalSegment, ...]
    need: tuple[Need, ...]
    local: Any = None
    saved: Saved | None = None

    @classmethod
    def of(cls, chosen: frozenset[int], lay: Layout) -> Delegated:
        """Take some of the rank's segments."""
        segments = tuple(lay.segments[i] for i in sorted(chosen))
        need = (Need(state=True, transition=True),) * len(segments)
        return cls(lay.state_rows(chosen), segments, need)

    def forward_local(self, inputs: KDAInputs, out: Mapping[str, Tensor]) -> None:
        """Run the pass over the segments and write their E and M."""
        tables = self._tables(inputs.v.shape, inputs.k.shape[3], out)
        given = replace(inputs, seed=None)
        self.local = _engine().forward_local(given, self.segments, self.need, tables)
        self._write(tables, out)

    def forward_finish(self, entering: Tensor) -> Tensor:
        """Return o ``[B, T, HV, V]``, right in the segments' rows; ``entering`` is the rank's V-major table."""
        table = entering.index_select(0, self.rows).mT.contiguous()
        finished = _engine().forward_finish(self.local, lambda: table)
        self.local, self.saved = None, finished.saved
        return finished.output  # type: ignore[no-any-return]

    def backward_local(self, do: Tensor, keys: int, out: Mapping[str, Tensor]) -> None:
        """Write dE and M of the segments."""
        assert self.saved is not None
        tables = self._tables(do.shape, keys, out)
        _engine().backward_local(self.saved, OutputGrads(do, None), self.need, tables)
        self._write(tables, out)

    def _tables(
        self, shape: Sequence[int], keys: int, out: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        heads, values = shape[2:]
        columns = {"state": values, "transition": keys}
        return {
            name: table.new_empty(len(self.rows), heads, keys, columns[name])
            for name, table in out.items()
        }

    def _write(self, tables: Mapping[str, Tensor], out: Mapping[str, Tensor]) -> None:
        for name, table in tables.items():
            out[name].index_copy_(0, self.rows, table.mT)
