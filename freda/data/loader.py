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
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from freda.data.shards import Documents, Manifest
from freda.errors import FredaError, require

if TYPE_CHECKING:  # training only reads ids: it need not import the tokenizer library
    from freda.data.tokenizer import Tokenizer

Ints = NDArray[np.signedinteger[Any]]
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
        self._kept_order: tuple[int, Ints] = (-1, np.empty(0, np.int64))
        self.rows = self._plan.rows
        key = "prepare.validation_share (of a generator: validation_problems, validation_documents)"
        advice = f"raise {key}" if split == "validation" else "look at its sources"
        problem = f"the {split} split of {folder} holds no document"
        require(self.rows > 0, f"{problem}; {advice} and freda prepare --replace")

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
        least, most = (
            int(arrays[0].min(initial=0)),
            int(arrays[0].max(initial=0)),
        )  # nothing else would notice a changed file
        odd = f"{self._folder} holds the id {least if least < 0 else most}, which no text has: its files have changed"
        require(least >= 0 and most < self.manifest.blank_id, f"{odd}; run freda inspect {self._folder} --verify")
        return Batch._make([*map(torch.from_numpy, arrays), bool((arrays[1] <= 0).all())])

    def check_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Refuse a model whose tokenizer is not the one that the shards were written with."""
        ours, theirs, folder = self.manifest, tokenizer, self._folder
        seen = f"{folder} was written with tokenizer {ours.tokenizer[:8]}, the model has {theirs.fingerprint[:8]}"
        require(ours.tokenizer == theirs.fingerprint, f"{seen}; prepare the data with the model's tokenizer")
        seen = f"{folder} ends documents with id {ours.eos_id}, the model with {theirs.eos_id}"
        require(ours.eos_id == theirs.eos_id, f"{seen}; prepare the data with prepare.eos set to the model's token")

    def _order(self, epoch: int) -> Ints:
        """The permutation of an epoch. The last one is kept: batches ask for neighbouring rows."""
        kept = self._kept_order  # read once: another thread may replace it
        if kept[0] != epoch:
            rng = np.random.default_rng((self._seed % 2**64, epoch))  # numpy takes no negative seed
            kept = self._kept_order = (epoch, rng.permutation(self.rows))
        return kept[1]

    def _read_row(self, number: int, tokens: Ints, document: Ints, position: Ints, fill: NDArray[np.bool_]) -> None:
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
    """The rows of a step that a rank processes, group by group, numbered within the whole step. Every group is cut
    among all ranks: at any time they are in the same group, hence in the same number of passes."""
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
    """The batches of the coming steps, built in order by a thread up to `ahead` steps ahead; a context manager. An
    error in the thread is raised by the `take` of its step."""

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


# -- packing -----------------------------------------------------------------------------------------------------------


class Plan(NamedTuple):
    """Which piece of which document lies in which row: row r holds pieces row_starts[r] to row_starts[r + 1]. Flat
    arrays, because a list per row would take more memory than the tokens of short documents."""

    row_starts: Ints  # (rows + 1,)
    piece_document: Ints  # (pieces,)
    piece_start: Ints  # (pieces,) first token within the document, a multiple of align
    piece_length: Ints  # (pieces,)

    @property
    def rows(self) -> int:
        """How many rows the plan has."""
        return len(self.row_starts) - 1

    def pieces(self, row: int) -> list[tuple[int, int, int]]:
        """(document, start, length) of each piece of a row, in order."""
        here = slice(self.row_starts[row], self.row_starts[row + 1])
        columns = (self.piece_document[here], self.piece_start[here], self.piece_length[here])
        return list(zip(*(column.tolist() for column in columns), strict=True))


def plan(lengths: ArrayLike, seq_len: int, align: int) -> Plan:
    """Pack documents of these lengths (multiples of `align`) into rows of `seq_len` tokens, leaving little empty.

    A document that fits in a row is never cut; a longer one is cut into full rows and a rest. The pieces then go into
    rows longest first: each row takes the longest piece that is left and fills the remaining space exactly where some
    of the other pieces can do so. Which lengths can is a subset sum over the distinct lengths, in units of `align`; the
    set of reachable sums is one whole number used as a bit set, so that a row costs microseconds. A way of filling a
    row is repeated while the pieces for it last: corpora of millions of documents have few distinct lengths.
    """
    below = seq_len // align * align
    advice = f"{below} or {below + align}" if below > 0 else f"{align}"
    whole = seq_len > 0 and seq_len == below
    require(whole, f"seq_len {seq_len} is not a multiple of the shards' align {align}; use {advice}")
    lengths = np.asarray(lengths, np.int64)
    if (lengths <= 0).any() or (lengths % align).any():
        raise ValueError(f"document lengths must be positive multiples of {align}")
    document, start, length = _cut(lengths, seq_len)
    left = _ByLength(length // align, seq_len // align)
    groups: list[Ints] = []  # each (rows, pieces per row): rows that are filled alike
    while pattern := left.best_pattern():
        groups.append(left.take(pattern))
    order = np.concatenate([np.empty(0, np.int64), *(group.ravel() for group in groups)])
    per_row = np.repeat([group.shape[1] for group in groups], [len(group) for group in groups])
    row_starts = np.concatenate([[0], np.cumsum(per_row)]).astype(np.int64)
    return Plan(row_starts, document[order], start[order], length[order])


def _cut(lengths: Ints, seq_len: int) -> tuple[Ints, Ints, Ints]:
    """Document, start and length of every piece: full rows, then the rest."""
    counts = -(-lengths // seq_len)
    document = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the piece in its document
    start = number * seq_len
    return document, start, np.minimum(lengths[document] - start, seq_len)


class _ByLength:
    """The pieces not yet placed, by length. Lengths are in units of `align`; pieces of one length leave in order."""

    def __init__(self, length: Ints, row: int) -> None:
        self._row = row
        self._queue = np.argsort(length, kind="stable")  # pieces of equal length lie side by side
        self._left = np.bincount(length, minlength=row + 1)
        self._next = np.cumsum(self._left) - self._left  # where in the queue the pieces of a length begin

    def best_pattern(self) -> dict[int, int]:
        """How to fill the next row: {length: how many}; empty when nothing is left."""
        lengths = np.flatnonzero(self._left)
        if not len(lengths):
            return {}
        longest = int(lengths[-1])
        self._left[longest] -= 1  # it is in the row: only the others can fill the space
        others = self._fill(self._row - longest)
        self._left[longest] += 1
        return {longest: 1 + others.pop(longest, 0), **others}

    def take(self, pattern: dict[int, int]) -> Ints:
        """Fill rows by the pattern while its pieces last: (rows, pieces per row)."""
        rows, columns = min(int(self._left[length]) // count for length, count in pattern.items()), []
        for length, count in pattern.items():
            begin = self._next[length]
            self._next[length] += rows * count
            self._left[length] -= rows * count
            columns.append(self._queue[begin : self._next[length]].reshape(rows, count))
        return np.concatenate(columns, axis=1)

    def _fill(self, space: int) -> dict[int, int]:
        """The pieces that leave least of the space empty: {length: how many}, long pieces preferred. Short pieces are
        the ones that close gaps, so they are looked at last and only when needed."""
        within = (1 << space + 1) - 1
        reachable = 1  # bit s: some of the pieces looked at sum to s
        looked_at: list[tuple[int, int, int]] = []  # (length, count, sums that were reachable without them)
        lengths = np.flatnonzero(self._left[: space + 1])[::-1]
        for length, left in zip(lengths.tolist(), self._left[lengths].tolist(), strict=True):
            for count in _powers(min(left, space // length)):
                looked_at.append((length, count, reachable))
                reachable |= reachable << length * count & within
                if reachable >> space:
                    return _subset(space, looked_at)
        return _subset(reachable.bit_length() - 1, looked_at)


def _powers(count: int) -> list[int]:
    """Group sizes 1, 2, 4, ... and a rest, whose partial sums are all numbers up to `count`."""
    return [min(1 << bit, count + 1 - (1 << bit)) for bit in range(count.bit_length())]


def _subset(total: int, looked_at: list[tuple[int, int, int]]) -> dict[int, int]:
    """The pieces that sum to `total`, found by going back: those without which it was not reachable."""
    subset: dict[int, int] = {}
    for length, count, without in reversed(looked_at):
        if not without >> total & 1:
            subset[length] = subset.get(length, 0) + count
            total -= length * count
    return subset
