"""Packing: whole documents into rows of equal length, with as little space left empty as possible.

A document that fits in a row is never cut; a longer one is cut into full rows and a rest. The pieces then go into rows
longest first: each row takes the longest piece that is left and fills the remaining space exactly where some of the
other pieces can do so. Which lengths can is a subset sum over the distinct lengths, in units of `align`; the set of
reachable sums is one whole number used as a bit set, so that a row costs microseconds. A way of filling a row is
repeated while the pieces for it last: corpora of millions of documents have few distinct lengths.

The plan is a pure function of its arguments. It is made of flat arrays, because a list per row would take more memory
than the tokens of short documents.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freda.errors import FredaError

Ints = NDArray[np.int64]


class Plan(NamedTuple):
    """Which piece of which document lies in which row. Row r holds pieces row_starts[r] to row_starts[r + 1]."""

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
    """Pack documents of these lengths (multiples of `align`) into rows of `seq_len` tokens."""
    check_seq_len(seq_len, align)
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


def check_seq_len(seq_len: int, align: int) -> None:
    """Refuse rows that would not hold whole blocks."""
    if seq_len < 1 or seq_len % align:
        below = seq_len // align * align
        advice = f"{below} or {below + align}" if below > 0 else f"{align}"
        raise FredaError(f"seq_len {seq_len} is not a multiple of the shards' align {align}; use {advice}")


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
        rows = min(int(self._left[length]) // count for length, count in pattern.items())
        columns = [self._pop(length, rows * count).reshape(rows, count) for length, count in pattern.items()]
        return np.concatenate(columns, axis=1)

    def _pop(self, length: int, count: int) -> Ints:
        begin = self._next[length]
        self._next[length] += count
        self._left[length] -= count
        return self._queue[begin : begin + count]

    def _fill(self, space: int) -> dict[int, int]:
        """The pieces that leave least of the space empty: {length: how many}, long pieces preferred.

        Short pieces are the ones that close gaps, so they are looked at last and only when needed.
        """
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
