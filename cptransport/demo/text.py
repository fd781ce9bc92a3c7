# SPDX-License-Identifier: Apache-2.0
"""The demo's data: paragraphs of a book as documents, packed into streams of fixed length.

The text is in the public domain; ``data/SOURCE.txt`` says where it comes from.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import torch
from torch import Tensor

__all__ = ["Batch", "load_documents", "pack"]


@dataclass(frozen=True)
class Batch:
    """One packed stream.

    Attributes:
        tokens (int64, [T]): bytes of the documents, one after the other.
        targets (int64, [T]): the byte that follows each; a document's last one is followed by 0.
        cu_seqlens: N+1 offsets of the documents.
    """

    tokens: Tensor
    targets: Tensor
    cu_seqlens: tuple[int, ...]


@lru_cache(maxsize=1)
def load_documents() -> tuple[bytes, ...]:
    """Return the paragraphs of the text, in order, none empty."""
    text = files("cptransport.demo").joinpath("data/alice.txt").read_bytes()
    return tuple(paragraph for paragraph in text.strip().split(b"\n\n") if paragraph)


def pack(documents: tuple[bytes, ...], total: int, generator: torch.Generator) -> Batch:
    """Pack consecutive documents from a random one on, the last cut off where the stream is full.

    Args:
        documents: what to draw from; the first follows the last.
        total: length T of the stream, at least 1.
        generator: decides where to start.
    """
    position = int(torch.randint(len(documents), (), generator=generator))
    tokens, targets, offsets = bytearray(), bytearray(), [0]
    while len(tokens) < total:
        document = documents[position % len(documents)][: total - len(tokens)]
        tokens += document
        targets += document[1:] + b"\0"
        offsets.append(len(tokens))
        position += 1
    return Batch(torch.tensor(list(tokens)), torch.tensor(list(targets)), tuple(offsets))
