"""Decontamination: finds training documents that contain text of a benchmark.

A text becomes words: runs of letters and digits in lower case, as `disguise.folded` spells them; all else separates.
Parts of a document that can be read in another way (`disguise.other_readings`) are read in both. A benchmark item is
known by all its n-grams of 13 words, a short one by its 8 to 12 words as a whole; a shorter one says too little and is
only counted. A document is contaminated by an item if it holds one of the item's n-grams, or, with a threshold, at
least that share of the distinct ones.

`Index` does this at 140 MB per second and core (textbook modules of 17 kB against a million n-grams; a call takes at
least 40 microseconds, so that documents of 0.7 kB go at 16 MB per second). Nearly no document is contaminated, so the
work is in saying no: words and then n-grams become 64-bit hashes in a few passes of numpy, and a filter of the hashes
that occur rejects nearly every place. Hashes only propose. What they propose is compared word by word, so that a
collision costs microseconds, never a document. The tests state the rule in plain code and compare.
"""

from __future__ import annotations

import bisect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from freda.data.config import DecontaminateConfig
from freda.data.disguise import BORDER, folded, other_readings

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

R = TypeVar("R")
BORDER_BYTES = BORDER.encode("ascii")

DEFAULT = DecontaminateConfig()
WORD = re.compile(rb"[a-z0-9]+")
GAP = re.compile(rb"[^a-zA-Z0-9]")
PIECE = 1 << 16  # bytes processed at once: as fast as a million, with a sixteenth of the memory
LOAD = 8  # bytes of a word that are read as one number
SPACE = b" " * LOAD  # put around texts, so that reading from any place stays within them
MIX, BASE = np.uint64(0x9E3779B97F4A7C15), 0xD6E8FEB86659FD93  # odd, so that multiplying loses nothing
HALF = np.uint64(32)
FIRST_MASKS = np.array([(1 << 8 * length) - 1 for length in range(LOAD + 1)], np.uint64)  # a word's part of 8 bytes
# The last 8 bytes count in words of more than 8, differently for each length; there are few of 64 and more.
LAST_FACTORS = np.array([(length > LOAD) * BASE**length % (1 << 64) for length in range(64)], np.uint64)
FILTER_BITS = 32  # of the filter for each n-gram, which sets 5 of them
PATTERNS = np.bitwise_or.reduce(np.uint64(1) << np.random.default_rng(0).integers(0, 64, (1 << 14, 5), np.uint64), 1)
PATTERN_MASK = np.uint64(len(PATTERNS) - 1)


class Hit(NamedTuple):
    """An item of a benchmark that contaminates a document."""

    benchmark: str
    item: int  # number of the item within its benchmark, from 0
    words: str  # the first of its n-grams in the document, as words joined by spaces
    share: float  # share of the item's distinct n-grams that the document contains


class BenchmarkInfo(NamedTuple):
    """How many items a benchmark has, and how many of them can be found."""

    items: int
    indexed: int
    too_short: int


def split_words(text: str) -> list[bytes]:
    """The words of a text."""
    return WORD.findall(folded(text).lower())


def ngrams(words: list[bytes], length: int) -> list[bytes]:
    """All n-grams of this length, in order, as words joined by spaces."""
    return [b" ".join(words[at : at + length]) for at in range(len(words) - length + 1)]


class _Words(NamedTuple):
    """The words of some bytes: where they start and end, and their hashes."""

    data: bytes
    starts: Ints
    ends: Ints
    hashes: Hashes

    def joined(self, first: int, count: int) -> bytes:
        """`count` words from the word `first` on, in lower case, joined by spaces."""
        return b" ".join(WORD.findall(self.data[self.starts[first] : self.ends[first + count - 1]].lower()))


def _find_words(data: bytes) -> _Words:
    """The words of some bytes, found PIECE bytes at a time; a piece ends where a word does."""
    cuts = [0]
    while cuts[-1] < len(data) or len(cuts) == 1:
        gap = GAP.search(data, cuts[-1] + PIECE)
        cuts.append(gap.start() if gap else len(data))
    found = [_words_between(data, begin, end) for begin, end in itertools.pairwise(cuts)]
    return _Words(data, *(found[0] if len(found) == 1 else map(np.concatenate, zip(*found, strict=True))))


def _words_between(data: bytes, begin: int, end: int) -> tuple[Ints, Ints, Hashes]:
    """Starts, ends and hashes of the words in a piece."""
    raw = np.frombuffer(b"".join((SPACE, data[begin:end], SPACE)), np.uint8)
    # Capitals become small letters, but control bytes become digits: digits are looked for in `raw`.
    lower = raw | np.uint8(0x20)
    inside = lower[LOAD - 1 :] - np.uint8(ord("a")) < 26  # differences wrap around: smaller bytes become large
    inside |= raw[LOAD - 1 :] - np.uint8(ord("0")) < 10
    edges = np.flatnonzero(inside[1:] != inside[:-1])  # starts and ends in turn, counted in the piece
    starts, ends = edges[0::2], edges[1::2]
    return starts + begin, ends + begin, _hash_words(lower, starts, ends)


def _hash_words(lower: NDArray[np.uint8], starts: Ints, ends: Ints) -> Hashes:
    """A number for each word, from its length, its first and its last 8 bytes. Few words differ elsewhere."""
    loads: Hashes = np.ndarray((len(lower) - LOAD + 1,), "<u8", lower, strides=(1,))  # 8 bytes from each place on
    if len(loads) <= 4 * PIECE:
        loads = loads.copy()  # aligned: 8 times the memory, but reads three times as fast
    lengths = ends - starts
    hashes = loads[LOAD:][starts]
    hashes &= FIRST_MASKS.take(lengths, mode="clip")
    hashes += loads[ends] * LAST_FACTORS.take(lengths, mode="clip")
    hashes ^= hashes >> HALF  # multiplying carries bits upwards only, so the upper half must come down before and after
    hashes *= MIX
    hashes ^= hashes >> HALF
    return hashes


def _hash_windows(hashes: Hashes, length: int, powers: Hashes) -> Hashes:
    """For each i, the sum of hashes[i + j] * powers[j] over j < length: a power of two, reached by doubling."""
    step = 1
    while step < length:
        hashes = hashes[:-step] + hashes[step:] * powers[step]
        step *= 2
    return hashes


class _Filter:
    """A Bloom filter of hashes with one false positive in 3,000.

    The upper bits of a hash choose one of many 64-bit numbers, its lower bits the 5 bits that must be set there: one
    access decides. A million n-grams take 4 MB, which stay in the cache. With half of that, 7 times as many pass; a
    table with one bit per hash took 16 MB, and every seventh passed.
    """

    def __init__(self, hashes: Hashes) -> None:
        bits = (len(hashes) * FILTER_BITS // 64).bit_length()
        self._shift = np.uint64(64 - bits)
        self._table = np.zeros(1 << bits, np.uint64)
        np.bitwise_or.at(self._table, *self._places(hashes))

    def passing(self, hashes: Hashes) -> Ints:
        """Indices of the hashes that may be known."""
        places, patterns = self._places(hashes)
        found = self._table.take(places, mode="clip")
        found &= patterns
        return np.flatnonzero(found == patterns)

    def _places(self, hashes: Hashes) -> tuple[Ints, Hashes]:
        patterns = PATTERNS.take((hashes & PATTERN_MASK).view(np.int64), mode="clip")
        return (hashes >> self._shift).view(np.int64), patterns


class _Item(NamedTuple):
    """An item that is long enough to be found."""

    benchmark: str
    number: int
    words: list[bytes]


class Index:
    """The n-grams of benchmarks, to be looked for in documents. Items are (benchmark, text), in order."""

    def __init__(
        self,
        items: Iterable[tuple[str, str]],
        limits: DecontaminateConfig = DEFAULT,
        shortest: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """`shortest` are the fewest words of an item, by benchmark, where it is not 0."""
        self._threshold, self._ngram = limits.threshold, limits.ngram
        texts: dict[str, list[list[bytes]]] = {}
        for benchmark, text in items:
            texts.setdefault(benchmark, []).append(split_words(text))
        self._items, self.benchmarks = list[_Item](), dict[str, BenchmarkInfo]()
        for name, own in texts.items():
            least = shortest.get(name) or limits.shortest
            long = [_Item(name, number, words) for number, words in enumerate(own) if len(words) >= least]
            self._items += long
            self.benchmarks[name] = BenchmarkInfo(len(own), len(long), len(own) - len(long))
        if self._items:
            self._build()

    def hits(self, text: str) -> list[Hit]:
        """The items that contaminate a document, in order; nearly always none."""
        found: dict[int, list[bytes]] = {}  # distinct n-grams of an item, in the order of the document
        seen: set[bytes] = set()
        for gram, hash_, _ in self._proposals(self._all_readings(text)) if self._items else ():
            if gram not in seen:
                seen.add(gram)
                for item in self._owners(gram, hash_):
                    found.setdefault(item, []).append(gram)
        hits = [self._hit(self._items[item], found[item]) for item in sorted(found)]
        return [hit for hit in hits if hit.share >= self._threshold]

    def screened(self, records: Iterable[R], text_of: Callable[[R], str | None]) -> Iterator[tuple[R, bool]]:
        """Every record, in order, with True where its text is known to be clean; texts that `text_of` does not give are
        not known. Many are asked about at once, which takes half the time where they are short."""
        waiting, size = list[tuple[R, bytes | None]](), 0
        for record in records:
            text = text_of(record)
            waiting.append((record, None if text is None else self._all_readings(text)))
            size += 0 if text is None else len(text)
            if size >= PIECE:
                yield from self._screen(waiting)
                waiting, size = [], 0
        yield from self._screen(waiting)

    def _screen(self, waiting: list[tuple[R, bytes | None]]) -> Iterator[tuple[R, bool]]:
        """Ask about all at once; where an n-gram is known, the place tells in which of them."""
        known = [data for _, data in waiting if data is not None]
        ends = list(itertools.accumulate(len(data) + len(BORDER_BYTES) for data in known))
        proposed = self._proposals(BORDER_BYTES.join(known)) if self._items else ()
        unclean = {bisect.bisect(ends, place) for _, _, place in proposed}
        number = -1
        for record, data in waiting:
            number += data is not None
            yield record, data is not None and number not in unclean

    def _all_readings(self, text: str) -> bytes:
        data = folded(text)
        other = other_readings(text, data)
        return data + BORDER_BYTES + folded(other) if other else data

    def _build(self) -> None:
        """Hash the n-grams of all items, one that an item repeats as often, and sort them by their hashes.

        A document is asked first where an n-gram may begin: one question for all lengths, about as many words as the
        shortest has, rounded down to a power of two so that doubling hashes them.
        """
        counts = np.array([len(item.words) for item in self._items])
        lengths = np.minimum(counts, self._ngram)
        self._lengths = np.unique(lengths)
        self._beginning = 1 << int(self._lengths[0]).bit_length() - 1
        self._powers = np.array([pow(BASE, step, 1 << 64) for step in range(self._lengths[-1])], np.uint64)
        words = _find_words(b" ".join(itertools.chain.from_iterable(item.words for item in self._items)))
        per_item = counts - lengths + 1
        item = np.repeat(np.arange(len(counts)), per_item)
        number = np.arange(len(item)) - np.repeat(np.cumsum(per_item) - per_item, per_item)  # of the n-gram in its item
        first = (np.cumsum(counts) - counts)[item] + number
        length = lengths[item]
        hashes = np.zeros(len(item), np.uint64)
        for step, power in enumerate(self._powers):
            hashes += np.where(step < length, words.hashes.take(first + step, mode="clip") * power, np.uint64(0))
        self._filter = _Filter(_hash_windows(words.hashes, self._beginning, self._powers)[first])
        order = np.argsort(hashes)
        self._text, self._hashes, self._item = words.data, hashes[order], item[order]
        self._begin, self._end = words.starts[first][order], words.ends[first + length - 1][order]

    def _proposals(self, data: bytes) -> Iterator[tuple[bytes, np.uint64, int]]:
        """The n-grams of folded bytes whose hash is known, with it and their place, in order."""
        words = _find_words(data)
        at = self._filter.passing(_hash_windows(words.hashes, self._beginning, self._powers))
        if not len(at):
            return
        parts = words.hashes.take(at[:, None] + np.arange(len(self._powers)), mode="clip") * self._powers
        hashes = parts.cumsum(axis=1)[:, self._lengths - 1].ravel()  # (places, lengths)
        known = self._hashes.take(self._hashes.searchsorted(hashes), mode="clip") == hashes
        for where in np.flatnonzero(known).tolist():
            place, which = divmod(where, len(self._lengths))
            first, length = int(at[place]), int(self._lengths[which])
            if first + length <= len(words.starts):
                yield words.joined(first, length), hashes[where], int(words.starts[first])

    def _owners(self, gram: bytes, hash_: np.uint64) -> set[int]:
        """The items that have this n-gram, compared word by word."""
        here = slice(self._hashes.searchsorted(hash_), self._hashes.searchsorted(hash_, "right"))
        places = zip(self._item[here].tolist(), self._begin[here].tolist(), self._end[here].tolist(), strict=True)
        return {item for item, begin, end in places if self._text[begin:end] == gram}

    def _hit(self, item: _Item, found: list[bytes]) -> Hit:
        """An item and the distinct n-grams of it that were found."""
        distinct = set(ngrams(item.words, min(len(item.words), self._ngram)))
        return Hit(item.benchmark, item.number, found[0].decode("ascii"), len(found) / len(distinct))
