"""The form of a decoding forward, as kernels and CUDA graphs are made for it, and where the committed text lies."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ForwardShape(NamedTuple):
    """The new tokens of each request in a forward: a block to commit, and drafts of the next."""

    commit: int  # places for a block to commit: 0 or the block size
    block: int
    drafts: int

    @property
    def tokens(self) -> int:
        """New tokens of one request."""
        return self.commit + self.block * self.drafts


class BlockTable(NamedTuple):
    """Where the committed text of R requests lies, on the device."""

    table: Tensor  # (R, most pages) int32
    stored: Tensor  # (R,) int32: committed tokens in the pages
    pending: Tensor  # (R,) int32: tokens that the next forward commits: a block or 0
