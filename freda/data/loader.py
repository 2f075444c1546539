"""Batches of packed rows as a pure function of the row number."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Batch(NamedTuple):
    """Packed rows. A document that was cut into pieces counts as several documents."""

    tokens: Tensor  # (R, L) int64; EOS on padding
    document: Tensor  # (R, L) int32: index of the document within its row; -1 on padding
    position: Tensor  # (R, L) int32: position within the document; 0 on padding
    fill: Tensor  # (R, L) bool: EOS behind the EOS that ends a document, up to the next multiple of align
