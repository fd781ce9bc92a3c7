# SPDX-License-Identifier: Apache-2.0
"""Head sizes that the kernels are not written for: inputs padded with zeros, results cropped.

A padded channel of k or v adds nothing to any state, and one of the gate decays a row that is zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional

from cptransport.engines import Need

__all__ = ["Padding"]


@dataclass(frozen=True)
class Padding:
    """Head sizes K, V as the caller sees them; the kernels see the next ones they serve.

    Attributes:
        dims: sizes that the kernels serve, ascending.
    """

    key_dim: int
    value_dim: int
    dims: tuple[int, ...]

    @cached_property
    def padded(self) -> tuple[int, int]:
        """The sizes that the kernels see."""
        keys, values = (
            next(dim for dim in self.dims if dim >= size) for size in (self.key_dim, self.value_dim)
        )
        return keys, values

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Input name -> how many channels are added."""
        keys, values = self.padded[0] - self.key_dim, self.padded[1] - self.value_dim
        return {"q": keys, "k": keys, "g": keys, "dt_bias": keys, "v": values, "o": values}

    @cached_property
    def needed(self) -> bool:
        """Whether anything is padded at all."""
        return any(self.sizes.values())

    def pad(self, name: str, tensor: Tensor) -> Tensor:
        """Pad the channels of an input or of the output's gradient (``"o"``)."""
        extra = self.sizes.get(name, 0)
        return functional.pad(tensor, (0, extra)) if extra else tensor

    def crop(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Undo ``pad`` on a gradient or on the output."""
        if tensor is None or not self.sizes.get(name, 0):
            return tensor
        return tensor[..., : tensor.shape[-1] - self.sizes[name]].contiguous()

    def pad_states(self, table: Tensor) -> Tensor:
        """Pad ``[rows, HV, K, V]``."""
        if not self.needed:
            return table
        return functional.pad(table, (0, self.sizes["v"], 0, self.sizes["k"]))

    def crop_states(self, table: Tensor) -> Tensor:
        """Undo ``pad_states``."""
        if not self.needed:
            return table
        return table[:, :, : self.key_dim, : self.value_dim].contiguous()

    def summaries(self, out: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tables for the kernels to write: ``out`` itself if nothing is padded."""
        if not self.needed:
            return out
        keys, values = self.padded
        columns = {"state": values, "transition": keys}
        return {
            name: torch.empty(
                *table.shape[:2], keys, columns[name], dtype=table.dtype, device=table.device
            )
            for name, table in out.items()
        }

    def publish(
        self,
        tables: Mapping[str, Tensor],
        out: Mapping[str, Tensor],
        need: Sequence[Need],
        batch: int,
    ) -> None:
        """Copy what ``need`` asks for from ``tables`` to ``out``."""
        if tables is out:
            return
        for i, wanted in enumerate(need):
            rows = slice(i * batch, (i + 1) * batch)
            for name, table in out.items():
                if getattr(wanted, name):
                    table[rows].copy_(tables[name][rows, :, : table.shape[2], : table.shape[3]])
