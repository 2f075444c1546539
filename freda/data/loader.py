"""Batches of packed rows as a pure function of the row number.

Rows are numbered through all epochs: row g is row `order[g % rows]` of the packing, where `order` is the permutation of
epoch g // rows, drawn from (seed, epoch). A run that asks for rows by number needs no loader state to resume, and
many processes that each ask for their own numbers see what one process would have seen.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freda.data.pack import plan
from freda.data.shards import Documents, Manifest
from freda.errors import FredaError

if TYPE_CHECKING:  # training reads ids only: it need not wait for the tokenizer's library
    from freda.data.tokenizer import Tokenizer

Ints = NDArray[np.signedinteger[Any]]
Bools = NDArray[np.bool_]


class Batch(NamedTuple):
    """Packed rows. A document that was cut into pieces counts as several documents."""

    tokens: Tensor  # (R, L) int64; EOS on padding
    document: Tensor  # (R, L) int32: index of the document within its row; -1 on padding
    position: Tensor  # (R, L) int32: position within the document; 0 on padding
    fill: Tensor  # (R, L) bool: EOS behind the EOS that ends a document, up to the next multiple of align


class Loader:
    """The rows of one split, by number."""

    def __init__(self, folder: Path, split: str, *, seq_len: int, seed: int) -> None:
        self.manifest = Manifest.read(folder)
        self._folder = folder
        self._documents = Documents(folder, split, self.manifest)
        self._lengths = self._documents.lengths()
        self._plan = plan(self._lengths, seq_len, self.manifest.align)
        self._seq_len = seq_len
        self._seed = seed
        self._kept_order: tuple[int, Ints] | None = None
        self.rows = self._plan.rows
        if self.rows == 0:
            raise FredaError(f"the {split} split of {folder} holds no document; prepare it with at least one")

    @property
    def fullness(self) -> float:
        """Share of all row positions that hold a document."""
        return int(self._plan.piece_length.sum()) / (self.rows * self._seq_len)

    def batch(self, first_row: int, count: int) -> Batch:
        """Rows `first_row` to `first_row + count`, numbered through all epochs."""
        shape = (count, self._seq_len)
        tokens = np.full(shape, self.manifest.eos_id, np.int64)
        document = np.full(shape, -1, np.int32)
        position = np.zeros(shape, np.int32)
        fill = np.zeros(shape, np.bool_)
        for offset in range(count):
            epoch, place = divmod(first_row + offset, self.rows)
            number = int(self._order(epoch)[place])
            self._read_row(number, tokens[offset], document[offset], position[offset], fill[offset])
        return Batch(*(torch.from_numpy(array) for array in (tokens, document, position, fill)))

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """A model must read the ids as the tokenizer of the shards wrote them."""
        ours, theirs = self.manifest.tokenizer, tokenizer.fingerprint
        if ours != theirs:
            raise FredaError(
                f"{self._folder} was written with tokenizer {ours[:8]}, the model has {theirs[:8]}; "
                "prepare the data with the model's tokenizer"
            )

    def _order(self, epoch: int) -> Ints:
        """The permutation of an epoch. The last one is kept: batches ask for neighbouring rows."""
        if self._kept_order is None or self._kept_order[0] != epoch:
            rng = np.random.default_rng((self._seed % 2**64, epoch))  # numpy takes no negative seed
            self._kept_order = (epoch, rng.permutation(self.rows))
        return self._kept_order[1]

    def _read_row(self, number: int, tokens: Ints, document: Ints, position: Ints, fill: Bools) -> None:
        """Write one row of the packing into vectors that hold padding."""
        begin = 0
        for index, (source, start, length) in enumerate(self._plan.pieces(number)):
            end = begin + length
            tokens[begin:end] = self._documents.document(source)[start : start + length]
            document[begin:end] = index
            position[begin:end] = np.arange(length)
            if start + length == self._lengths[source]:  # only the last piece of a document is filled
                fill[end - self._fill_length(tokens[begin:end]) : end] = True
            begin = end

    def _fill_length(self, tokens: Ints) -> int:
        """How many EOS follow the one that ends the document.

        The closing EOS lies in the last `align` tokens; EOS further left belongs to the text.
        """
        last = tokens[-self.manifest.align :]
        text = np.flatnonzero(last != self.manifest.eos_id)
        closing = int(text[-1]) + 1 if len(text) else 0
        return len(last) - closing - 1
