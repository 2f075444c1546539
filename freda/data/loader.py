"""Batches of packed rows as a pure function of the row number.

Rows are numbered through all epochs: row g is row `order[g % rows]` of the packing, where `order` is the permutation of
epoch g // rows, drawn from (seed, epoch). A run that asks for rows by number needs no loader state to resume, and
many processes that each ask for their own numbers (`rank_rows`) see what one process would have seen. A `Prefetcher`
reads the rows of the coming steps in a thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freda.data.pack import plan
from freda.data.shards import Documents, Manifest
from freda.errors import FredaError, require

if TYPE_CHECKING:  # training only reads ids: it need not import the tokenizer library
    from freda.data.tokenizer import Tokenizer

Ints = NDArray[np.signedinteger[Any]]
Bools = NDArray[np.bool_]

STEPS_AHEAD = 4  # costs little (a step of 64 rows of 4,096 tokens is 4.5 MB) and hides a read as long as four steps


class Batch(NamedTuple):
    """Packed rows. A document that was cut into pieces counts as several documents."""

    tokens: Tensor  # (R, L) int64; EOS on padding
    document: Tensor  # (R, L) int32: index of the document within its row; -1 on padding
    position: Tensor  # (R, L) int32: position within the document; 0 on padding
    fill: Tensor  # (R, L) bool: EOS behind the EOS that ends a document, up to the next multiple of align
    one_document: bool = False  # every row is one document from its first place on; kept on the host, for the masks

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with `function` applied to every tensor."""
        return Batch._make([*map(function, self[:4]), self.one_document])

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        """One batch with the rows of several."""
        columns = zip(*(batch[:4] for batch in batches), strict=True)
        return Batch._make([*map(torch.cat, columns), all(batch.one_document for batch in batches)])


class Loader:
    """The rows of one split, by number."""

    def __init__(self, folder: Path, split: str, *, seq_len: int, seed: int) -> None:
        self.manifest = Manifest.read(folder)
        self._folder = folder
        self._documents = Documents(folder, split, self.manifest)
        self._lengths = self._documents.lengths()
        self._plan = plan(self._lengths, seq_len, self.manifest.align)
        self._seq_len, self._seed = seq_len, seed
        self._kept_order: tuple[int, Ints] | None = None
        self.rows = self._plan.rows
        if self.rows == 0:
            key = "prepare.validation_share (of a generator: validation_problems, validation_documents)"
            advice = f"raise {key}" if split == "validation" else "look at its sources"
            raise FredaError(f"the {split} split of {folder} holds no document; {advice} and freda prepare --replace")

    @property
    def fullness(self) -> float:
        """Share of all row positions that hold a document."""
        return int(self._plan.piece_length.sum()) / (self.rows * self._seq_len)

    def batch(self, first_row: int, count: int) -> Batch:
        """Rows `first_row` to `first_row + count`, numbered through all epochs."""
        padding = ((self.manifest.eos_id, np.int64), (-1, np.int32), (0, np.int32), (False, np.bool_))
        arrays = [np.full((count, self._seq_len), value, dtype) for value, dtype in padding]
        for row, columns in enumerate(zip(*arrays, strict=True), start=first_row):
            epoch, place = divmod(row, self.rows)
            self._read_row(int(self._order(epoch)[place]), *columns)
        return Batch._make([*map(torch.from_numpy, arrays), bool((arrays[1] <= 0).all())])

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a model whose tokenizer is not the one that the shards were written with."""
        ours, theirs = self.manifest, tokenizer
        require(
            ours.tokenizer == theirs.fingerprint,
            f"{self._folder} was written with tokenizer {ours.tokenizer[:8]}, the model has {theirs.fingerprint[:8]}; "
            "prepare the data with the model's tokenizer",
        )
        require(
            ours.eos_id == theirs.eos_id,
            f"{self._folder} ends documents with id {ours.eos_id}, the model with {theirs.eos_id}; "
            "prepare the data with prepare.eos set to the model's token",
        )

    def _order(self, epoch: int) -> Ints:
        """The permutation of an epoch. The last one is kept: batches ask for neighbouring rows."""
        kept = self._kept_order  # read once: another thread may replace it
        if kept is None or kept[0] != epoch:
            rng = np.random.default_rng((self._seed % 2**64, epoch))  # numpy takes no negative seed
            kept = self._kept_order = (epoch, rng.permutation(self.rows))
        return kept[1]

    def _read_row(self, number: int, tokens: Ints, document: Ints, position: Ints, fill: Bools) -> None:
        """Write one row of the packing into vectors that hold padding."""
        begin = 0
        for index, (source, start, length) in enumerate(self._plan.pieces(number)):
            end = begin + length
            tokens[begin:end] = self._documents.document(source)[start : start + length]
            document[begin:end] = index
            position[begin:end] = np.arange(length)
            if start + length == self._lengths[source]:  # only the last piece of a document is filled
                # The closing EOS is among the last `align` tokens; EOS further left belongs to the text.
                last = tokens[end - self.manifest.align : end]
                text = np.flatnonzero(last != self.manifest.eos_id)
                closing = end - len(last) + (int(text[-1]) + 1 if len(text) else 0)
                fill[closing + 1 : end] = True
            begin = end


def rank_rows(batch_rows: int, group_rows: int, *, rank: int, world: int) -> list[range]:
    """The rows of a step that a rank processes, group by group, numbered within the whole step.

    Every group is cut among all ranks: at any time they are in the same group, hence in the same number of passes.
    """
    if batch_rows % group_rows or not 0 <= rank < world:
        raise ValueError(f"rank {rank} of {world} in groups of {group_rows} of {batch_rows} rows")
    if group_rows % world:
        sizes = [size for size in range(world, batch_rows + 1, world) if batch_rows % size == 0]
        nearest = min(sizes, key=lambda size: abs(size - group_rows), default=0)
        advice = f"use {nearest}" if nearest else f"make train.batch_rows {batch_rows} a multiple of {world} too"
        raise FredaError(f"train.group_rows {group_rows} is not a multiple of the {world} processes; {advice}")
    share = group_rows // world
    return [range(first, first + share) for first in range(rank * share, batch_rows, group_rows)]


def pinned(batch: Batch, device: torch.device) -> Batch:
    """The batch in pinned memory, from which a GPU (`device`, with its index) copies while the program continues."""
    if device.type != "cuda":
        return batch
    with torch.cuda.device(device):  # a new thread is on GPU 0, and pinning there would open a context on it
        return batch.map(Tensor.pin_memory)


class Prefetcher:
    """The batches of the coming steps, built in order by a thread up to `ahead` steps ahead; a context manager.

    An error in the thread is raised by the `take` of its step.
    """

    def __init__(self, build: Callable[[int], list[Batch]], steps: range, *, ahead: int = STEPS_AHEAD) -> None:
        self._build, self._steps, self._ahead = build, steps, ahead
        self._next = steps.start  # the step that is taken next
        self._pool = ThreadPoolExecutor(1, "prefetch")  # it starts its thread with the first step
        self._ready: deque[Future[list[Batch]]] = deque()

    def __enter__(self) -> Self:
        self._ready.extend(self._pool.submit(self._build, step) for step in self._steps[: self._ahead])
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._ready.clear()

    def take(self, step: int) -> list[Batch]:
        """Wait for the batches of the next step."""
        if step != self._next or step not in self._steps:
            raise ValueError(f"asked for step {step}, next is {self._next} of {self._steps}")
        if not self._ready:
            raise RuntimeError(f"asked for step {step} outside of the context")
        batches = self._ready[0].result()
        self._ready.popleft()
        self._next += 1
        if step + self._ahead in self._steps:
            self._ready.append(self._pool.submit(self._build, step + self._ahead))
        return batches
