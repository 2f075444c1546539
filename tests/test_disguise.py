"""Disguises: the same words, however they are spelled, and no others."""

from __future__ import annotations

import base64
import html
import json
import random
import re
import textwrap
from collections.abc import Callable

import pytest

from freda.data.decontaminate import Index, split_words
from freda.data.disguise import BY_BYTES, BY_CODE, fold, folded, other_readings

WORDS = re.findall(
    r"\w+",
    """the a of and train apple seven house river count many each gives left price total number how long what speed when
    after before remaining half twice students books marbles minutes hours cost dollars sells buys needs more than less
    average sum product triangle circle radius area water tank pipe fills empties leaves station""",
)
FULL = {chr(code): chr(code + 0xFEE0) for code in range(33, 127)}
CYRILLIC = dict(zip("aeopcxyiABEKMHOPCTX", "аеорсхуіАВЕКМНОРСТХ", strict=True))
GREEK = dict(zip("aoeiktxABEHIKMNOPTXYZ", "αοεικτχΑΒΕΗΙΚΜΝΟΡΤΧΥΖ", strict=True))
ACCENTS = dict(zip("aeouinc", "áéöüïñç", strict=True))


def item(number: int) -> str:
    """A question of some forty words over three lines."""
    rng = random.Random(number)
    words = [rng.choice(WORDS) if rng.random() < 0.9 else str(rng.randrange(500)) for _ in range(40)]
    text = " ".join(words)
    return f"{text[0].upper()}{text[1:90]}.\n{text[90:160]},\n\n{text[160:]}?"


def spelled(letters: dict[str, str]) -> Callable[[str], str]:
    return lambda text: "".join(letters.get(letter, letter) for letter in text)


def hyphenated(text: str) -> str:
    """Lines of forty characters whose last word is cut."""
    lines = textwrap.wrap(text, 40)
    cut = [re.sub(r"(\w{3})(\w{2,})$", r"\1-\n\2", line) for line in lines]
    return " ".join(cut)


def numbered(text: str, first: int, sign: str) -> str:
    return "\n".join(f"{n}{sign} {line}" for n, line in enumerate(textwrap.wrap(text, 40), first))


DISGUISES: dict[str, Callable[[str], str]] = {
    "none": str,
    "capitals": str.upper,
    "full-width": spelled(FULL),
    "zero-width": lambda text: re.sub(r"(\w)", "\\1\u200b", text),
    "soft hyphens": lambda text: re.sub(r"(\w\w)(?=\w)", "\\1\u00ad", text),
    "accents": spelled(ACCENTS),
    "combining marks": lambda text: re.sub(r"(\w)", "\\1\u0301", text),
    "Cyrillic": spelled(CYRILLIC),
    "Greek": spelled(GREEK),
    "mathematical": lambda text: re.sub("[a-z]", lambda found: chr(0x1D41A + ord(found[0]) - 97), text),
    "curly": lambda text: text.replace(" ", "\u00a0").replace(",", " \u2014 ").replace("?", "\u201d"),
    "hyphenated": hyphenated,
    "numbered": lambda text: numbered(text, 12, ":"),
    "numbered from 1": lambda text: numbered(text, 1, "."),
    "JSON": json.dumps,
    "JSON, a line for each word": lambda text: json.dumps(text.replace(" ", "\n")),
    "JSON, accents": lambda text: json.dumps(spelled(ACCENTS)(text)),
    "entities": lambda text: text.replace(" ", "&nbsp;"),
    "tags": lambda text: " ".join(f"<b>{html.escape(word)}</b>" for word in text.split(" ")),
    "tags with attributes": lambda text: text.replace(" ", ' <span class="x y">') + "</b></b></b>",
}


@pytest.fixture(scope="module")
def index() -> Index:
    return Index(("asked", item(number)) for number in range(200))


@pytest.mark.parametrize("name", DISGUISES)
def test_every_disguise_is_seen_through(name: str, index: Index) -> None:
    around = ["Some other text stands before it.\n\n", "\n\nAnd some behind, 12 words or more, that nobody asked."]
    missed = [n for n in range(100) if n not in {h.item for h in index.hits(DISGUISES[name](item(n)).join(around))}]
    assert not missed


def test_what_is_not_read() -> None:
    """Text in another encoding stays hidden: a page says so."""
    index = Index([("asked", item(1))])
    assert not index.hits(base64.b64encode(item(1).encode()).decode())


@pytest.mark.parametrize("name", DISGUISES)
def test_no_other_text_is_taken_for_an_item(name: str, index: Index) -> None:
    """Clean texts of the same words, twelve words of an item, and its words in another order."""
    for number in range(200, 260):
        words = re.findall(r"\w+", item(number - 200))
        shuffled = random.Random(number).sample(words, len(words))
        for text in (item(number), " ".join(words[5:17]), " ".join(shuffled)):
            assert not index.hits(DISGUISES[name](text))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Straße ﬁnden", ["strasse", "finden"]),
        ("x² + ½", ["x2", "1", "2"]),
        ("naïve café", ["naive", "cafe"]),
        ("中文字", ["u4e2d", "u6587", "u5b57"]),
        ("жук зебра", [split_words("жук")[0].decode(), split_words("зебра")[0].decode()]),
        ("한국 말", [split_words("한국")[0].decode(), split_words("말")[0].decode()]),
        ("a\u200bb\u00adc\ufeffd", ["abcd"]),
        ("— “quoted” … 5°", ["quoted", "5"]),
        ("\ud800a\udfffb", ["a", "b"]),
        ("", []),
    ],
)
def test_words(text: str, words: list[str]) -> None:
    assert [word.decode() for word in split_words(text)] == words


def test_other_scripts_are_found() -> None:
    russian = "Сколько яблок осталось у Маши, если она отдала половину из двенадцати яблок своему брату вчера вечером"
    chinese = "小明有十二个苹果他给了弟弟一半请问他现在还剩下多少个苹果呢"
    index = Index([("ru", russian), ("zh", chinese)])
    assert [info.too_short for info in index.benchmarks.values()] == [0, 0]
    assert [hit.benchmark for hit in index.hits(f"Text. {russian.upper()} Text.")] == ["ru"]
    assert [hit.benchmark for hit in index.hits(f"Text{chinese}Text")] == ["zh"]


def test_both_ways_of_folding_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few characters are replaced one by one, many by a table."""
    rng = random.Random(0)
    alphabet = [*"abc 12.-\n", *"éßжλ中한²½—“\u200b\u00ad\u0301ﬁ😀"]
    for _ in range(200):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randrange(40)))
        monkeypatch.setattr("freda.data.disguise.MOSTLY", 0)
        one_by_one = folded(text)
        monkeypatch.setattr("freda.data.disguise.MOSTLY", 10**9)
        assert re.findall(rb"\w+", one_by_one) == re.findall(rb"\w+", folded(text)), text
    assert all(fold(chr(code)) == found for code, found in BY_CODE.items() if code > 127) and BY_BYTES


def test_plain_text_has_no_other_reading() -> None:
    texts = [
        "A sentence - and more.\n\n- a list\n- goes on\n",
        "x = 1\nprint('a\\n', 5 < 6 & 7)\n",
        "1. one\n7. seven\n",
        "",
    ]
    assert [other_readings(text, folded(text)) for text in texts] == [""] * len(texts)


def test_screening_says_what_the_hits_say(index: Index) -> None:
    """Long and short texts, clean and not, some without a text; all in order."""
    texts: list[str | None] = []
    for number in range(300):
        text = item(number) if number % 7 else DISGUISES["JSON, a line for each word"](item(number))
        texts.append(None if number % 11 == 0 else text * (200 if number % 50 == 0 else 1))
    found = list(index.screened(texts, lambda text: text))
    assert [text for text, _ in found] == texts
    assert [clean for _, clean in found] == [text is not None and not index.hits(text) for text in texts]
    assert list(Index([]).screened(["a"], str)) == [("a", True)] and list(index.screened([], str)) == []
