"""Keys and values of committed text, one slot per position: what decoding writes and every forward sees.

`write` puts the committed tokens of a forward into their slots, `past` and `tokens` show what is stored. Requests of a
batch may have different lengths; unused slots belong to document -1, which no text sees.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from freda.model.masks import Tokens, stored_tokens
from freda.model.transformer import KeysValues, Transformer


class Cache:
    """Storage for `rows` texts of at most `length` tokens each."""

    def __init__(self, model: Transformer, rows: int, length: int) -> None:
        config, weight = model.config, model.embed_tokens.weight
        # One slot more than asked for: padding is written there, so that every row writes the same number of tokens.
        shape = (rows, config.kv_heads, length + 1, config.head_dim)
        self._layers = [KeysValues(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.layers)]
        self._spare = length
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=weight.device)  # (R,) tokens stored

    def write(self, new: Sequence[KeysValues], position: Tensor, real: Tensor) -> None:
        """Store keys and values of a forward's first tokens. `position`, `real` (R, W): slots, and which are text."""
        slot = torch.where(real, position.long(), self._spare)[:, None, :, None]
        for stored, fresh in zip(self._layers, new, strict=True):
            for target, source in zip(stored, fresh, strict=True):
                source = source[:, :, : slot.shape[2]].to(target.dtype)
                target.scatter_(2, slot.expand_as(source), source)
        self.lengths = self.lengths + real.sum(-1)

    def past(self) -> list[KeysValues]:
        """Every layer's keys and values up to the longest text, each (R, Hkv, K, C)."""
        used = int(self.lengths.max())
        return [KeysValues(keys[:, :, :used], values[:, :, :used]) for keys, values in self._layers]

    def tokens(self, block_size: int) -> Tokens:
        """The mask vectors of what `past` returns, each (R, K)."""
        return stored_tokens(self.lengths, block_size)

    def keep(self, rows: Tensor) -> None:
        """Drop all texts but `rows`."""
        self._layers = [KeysValues(keys[rows], values[rows]) for keys, values in self._layers]
        self.lengths = self.lengths[rows]
