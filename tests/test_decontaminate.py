"""Decontamination: the fast index agrees with the plain rule, at every border, and whatever the hashes do."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from freda.data import decontaminate
from freda.data.config import DecontaminateConfig
from freda.data.decontaminate import BenchmarkInfo, Hit, Index, ngrams, split_words
from freda.data.disguise import BORDER, folded, other_readings
from freda.errors import FredaError

# Few words, so that n-grams repeat; the last two have one length, one beginning and one end, and so equal hashes.
LONG = ["abcdefgh", "abcdefghi", "q" * 9, "q" * 10, "aaaaaaaabcccccccc", "aaaaaaaadcccccccc"]
WORDS = ["a", "b", "the", "2", "10", *LONG]
BREAKS = list(" \n,-_@[`{/:\0\x10\x19\x1a\u00a0\u00d7\u2014\u2192\U0001f600\ud800")  # near letters and digits, and far
ALPHABET = [f"word{letter}" for letter in "abcdefghijklmnop"]


def index_of(items: Iterable[tuple[str, str]], **limits: Any) -> Index:
    return Index(items, DecontaminateConfig(**limits))


def plain_hits(
    text: str, items: Iterable[tuple[str, str]], ngram: int = 13, shortest: int = 8, threshold: float = 0.0
) -> list[Hit]:
    """The rule in plain code: what `hits` of an index of these items must return."""
    document = split_words(f"{text}{BORDER}{other_readings(text, folded(text))}")
    texts: dict[str, list[str]] = {}
    for benchmark, item in items:
        texts.setdefault(benchmark, []).append(item)
    hits: list[Hit] = []
    for benchmark in texts:
        for number, words in enumerate(map(split_words, texts[benchmark])):
            length = min(ngram, len(words))
            if length < shortest:
                continue
            wanted = set(ngrams(words, length))
            found = [gram for gram in ngrams(document, length) if gram in wanted]
            share = len(set(found)) / len(wanted)
            if found and share >= threshold:
                hits.append(Hit(benchmark, number, found[0].decode("ascii"), share))
    return hits


def numbered(count: int) -> str:
    return " ".join(ALPHABET[:count])


def styled(words: list[str], seed: int) -> str:
    """The words in mixed case, with all kinds of bytes between them."""
    rng = random.Random(seed)
    cases = (str, str.upper, str.title)
    return "".join(rng.choice(cases)(word) + rng.choice(BREAKS) * rng.randint(1, 2) for word in words)


@st.composite
def corpora(draw: st.DrawFn) -> tuple[str, list[tuple[str, str]]]:
    """A document, and items of which parts are planted in it."""
    some_words = st.lists(st.sampled_from(WORDS), max_size=9)
    items = draw(st.lists(st.tuples(st.sampled_from("xyz"), some_words), max_size=6))
    document: list[str] = []
    for own, item, begin, count in draw(st.lists(st.tuples(some_words, *[st.integers(0, 8)] * 3), max_size=5)):
        document += own
        if items:
            document += items[item % len(items)][1][begin : begin + count]
    seed = draw(st.integers(0, 1 << 16))
    texts = [(benchmark, styled(words, seed + number)) for number, (benchmark, words) in enumerate(items, 1)]
    return styled(document, seed), texts


@given(
    corpus=corpora(), lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)), threshold=st.sampled_from([0, 0.3, 1])
)
@settings(max_examples=100, deadline=None)
@pytest.mark.parametrize("piece", [1, 7, 1 << 16])
def test_agrees_with_the_plain_rule(
    piece: int, corpus: tuple[str, list[tuple[str, str]]], lengths: tuple[int, int], threshold: float
) -> None:
    (document, items), (shortest, ngram) = corpus, sorted(lengths)
    with mock.patch.object(decontaminate, "PIECE", piece):
        hits = index_of(items, ngram=ngram, shortest=shortest, threshold=threshold).hits(document)
    assert hits == plain_hits(document, items, ngram, shortest, threshold)


@given(corpus=corpora(), lengths=st.tuples(st.integers(1, 6), st.integers(1, 6)))
@settings(max_examples=100, deadline=None)
def test_collisions_neither_drop_nor_hide_a_document(
    corpus: tuple[str, list[tuple[str, str]]], lengths: tuple[int, int]
) -> None:
    (document, items), (shortest, ngram) = corpus, sorted(lengths)
    with mock.patch.object(decontaminate, "_hash_words", lambda lower, starts, ends: np.zeros(len(starts), np.uint64)):
        hits = index_of(items, ngram=ngram, shortest=shortest).hits(document)
    assert hits == plain_hits(document, items, ngram, shortest)


def test_thirteen_words_hit_and_twelve_do_not() -> None:
    index = index_of([("b", numbered(15))])
    for begin in range(3):
        words = ALPHABET[begin : begin + 13]
        text = " ".join(words)
        assert index.hits(f"Well: {text}, it said.") == [Hit("b", 0, text, 1 / 3)]
        assert index.hits(" ".join(words[1:])) == index.hits(" ".join(words[:-1])) == []
        assert index.hits(" ".join([*words[:6], "and", *words[6:]])) == []
        assert index.hits(f"x{text}") == index.hits(f"{text}x") == []  # other words


def test_a_document_that_ends_within_an_ngram() -> None:
    text = numbered(12) + " twelve"
    assert index_of([("b", text)]).hits(numbered(12)) == []  # what lies behind the last word is not the last word again
    assert len(index_of([("b", text)]).hits(text)) == 1


def test_digits_count() -> None:
    item = "Tom has 2 + 3 pens and Ann has 4 cards. How many things do they have?"
    assert len(index_of([("b", item)]).hits(item)) == 1
    assert index_of([("b", item)], ngram=16, shortest=15).hits(item.replace("2 + 3", "2 + 4")) == []


def test_case_and_what_separates_words_do_not_count() -> None:
    index = index_of([("b", "Na\u00efve caf\u00e9: 'it's' 3.14, a_b <C>\n")], ngram=9, shortest=9)
    assert index.benchmarks["b"].indexed == 1
    assert index.hits("naIVE Cafe\u0301 it\x11S\u20143\u00d714\ta@B[c")[0].words == "naive cafe it s 3 14 a b c"
    assert index.hits("naive cafe it s 3 14 a b \u2603 c") != []  # a snowman is no word
    assert index.hits("naive cafe it s 3 14 a b \u212a c") == []  # the Kelvin sign is a k


@pytest.mark.parametrize("count", range(8, 13))
def test_a_short_item_is_found_as_a_whole(count: int) -> None:
    index = index_of([("b", numbered(count))])
    assert index.hits(f"zero {numbered(13)}") == [Hit("b", 0, numbered(count), 1.0)]
    assert index.hits(numbered(count - 1)) == []


def test_items_too_short_are_counted() -> None:
    index = index_of([("b", numbered(7)), ("b", numbered(8)), ("c", ""), ("b", "?!")])
    assert index.benchmarks == {"b": BenchmarkInfo(3, 1, 2), "c": BenchmarkInfo(1, 0, 1)}
    assert [hit.item for hit in index.hits(numbered(9))] == [1]
    assert index_of([("c", numbered(7))]).hits(numbered(9)) == index_of([]).hits("text") == []
    assert index_of([]).benchmarks == {}


def test_a_benchmark_may_ask_for_longer_texts() -> None:
    index = Index([("a", numbered(9)), ("b", numbered(9)), ("b", numbered(10))], shortest={"b": 10, "a": 0})
    assert [(hit.benchmark, hit.item) for hit in index.hits(numbered(13))] == [("a", 0), ("b", 1)]
    assert index.benchmarks["b"] == BenchmarkInfo(2, 1, 1)


def test_thresholds_count_distinct_ngrams() -> None:
    items = [("b", numbered(15)), ("b", " ".join(["a"] * 30 + ["b"]))]  # three n-grams, and two: 18 times a's, then b
    two_thirds, half = numbered(14), " ".join(["a"] * 13)
    for text, item, share in ((two_thirds, 0, 2 / 3), (half, 1, 0.5), (f"{half} {half}", 1, 0.5)):
        for threshold in (0, share / 2, share):
            hits = index_of(items, threshold=threshold).hits(text)
            assert [(hit.item, hit.share) for hit in hits] == [(item, share)]
        assert index_of(items, threshold=share + 0.01).hits(text) == []
    assert index_of(items, threshold=1).hits(numbered(15))[0].share == 1


def test_hits_come_in_the_order_of_benchmarks_and_items() -> None:
    items = [("z", numbered(13)), ("a", numbered(12)), ("z", "other"), ("a", numbered(8)), ("z", numbered(16))]
    hits = index_of(items).hits(f"{numbered(16)} {numbered(16)}")
    assert [(hit.benchmark, hit.item) for hit in hits] == [("z", 0), ("z", 2), ("a", 0), ("a", 1)]
    assert hits[1] == Hit("z", 2, numbered(13), 1.0)  # of four n-grams, the first


@pytest.mark.parametrize("piece", range(1, 140))
def test_ngrams_across_the_borders_of_pieces(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decontaminate, "PIECE", piece)
    text = f"\u00e9t\u00e9 {numbered(16)} zero {numbered(10)}. {ALPHABET[-1]}"
    items = [("b", numbered(15)), ("b", numbered(10)), ("b", numbered(16) + " zero")]
    assert index_of(items, threshold=1).hits(text) == plain_hits(text, items, threshold=1)
    assert len(index_of(items, threshold=1).hits(text)) == 3


def test_long_words_are_not_read_once_for_each_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decontaminate, "PIECE", 100)
    item = " ".join(letter * 5_000 for letter in "abcdefgh")
    index, find = index_of([("b", item)]), decontaminate._words_between
    read: list[int] = []
    monkeypatch.setattr(
        decontaminate, "_words_between", lambda data, begin, end: (read.append(end - begin), find(data, begin, end))[1]
    )
    assert len(index.hits(f"{item} {'x' * 100_000} {item}")) == 1
    assert index.hits(f"{item[:22_500]}z{item[22_501:]}") == []  # of equal hash
    assert sum(read) < 4 * (100_000 + 3 * len(item))


def test_no_text() -> None:
    index = index_of([("b", numbered(13))])
    assert index.hits("") == index.hits(" ") == index.hits("?" * 100) == index.hits("\ud800") == []


def test_hashes_tell_words_apart_in_their_upper_and_lower_bits() -> None:
    numbers = range(10_000)
    words = [f"{n:08}" for n in numbers] + [f"n{n}suffixes" for n in numbers] + [f"prefixes{n}" for n in numbers]
    words += ["q" * length for length in range(1, 60)]
    hashes = decontaminate._find_words(" ".join(words).encode()).hashes
    assert len(set(hashes.tolist())) == len(words)
    for some in (hashes >> np.uint64(48), hashes & np.uint64(0xFFFF)):
        assert len(np.unique(some)) > 23_000  # random numbers: 24,100 of 65,536


def test_the_filter_stops_nearly_all_that_does_not_occur() -> None:
    rng = np.random.default_rng(0)
    vocabulary = [f"{word}{number}" for word in ALPHABET for number in range(60)]
    text, other = (" ".join(rng.choice(vocabulary, 100_000)) for _ in range(2))
    index = index_of([("b", text)])
    words = decontaminate._find_words(other.encode())
    beginnings = decontaminate._hash_windows(words.hashes, index._beginning, index._powers)
    assert len(index._filter.passing(beginnings)) < len(beginnings) / 1_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ngram": 0}, r"decontaminate\.ngram is 0; use 1 to 1000"),
        ({"shortest": 14}, r"decontaminate\.shortest is 14; use 1 to 13"),
        ({"shortest": 0}, r"decontaminate\.shortest is 0; use 1 to 13"),
        ({"ngram": 5}, r"decontaminate\.shortest is 8; use 1 to 5"),
        ({"threshold": -0.1}, r"decontaminate\.threshold is -0\.1; use 0 to 1"),
        ({"threshold": 1.5}, r"decontaminate\.threshold is 1\.5; use 0 to 1"),
        ({"threshold": float("nan")}, r"decontaminate\.threshold is nan; use 0 to 1"),
    ],
)
def test_settings_out_of_range(settings: dict[str, float], message: str) -> None:
    with pytest.raises(FredaError, match=message):
        index_of([], **settings)
