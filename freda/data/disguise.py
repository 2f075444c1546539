"""Texts in disguise: what decontamination reads as the same words, whatever characters spell them.

`folded` gives the ASCII bytes of a text. Compatibility forms (full-width letters, ligatures, mathematical alphabets)
are resolved, accents and other marks dropped, and so is what is not seen (zero-width spaces, soft hyphens).
Cyrillic and Greek letters that look like Latin ones become those. Every other letter is spelled by its number, so that
any script has words; characters of scripts that write no spaces are a word each.

`other_readings` gives parts of a text that can be read in another way, too: strings of JSON or of a program, whose line
ends are spelled `\\n`; HTML with its tags and entities; words that are hyphenated at the ends of lines; lines that are
numbered. Nearly no text has any.
"""

from __future__ import annotations

import html
import itertools
import re
import unicodedata
from collections.abc import Iterator

import numpy as np

BORDER = " uborderu "  # a word of no text: no n-gram goes from one part to the next
CONTEXT = 300  # characters around a hyphenated line end: more than thirteen words
MANY = 3  # escapes in one line, or tags: fewer are left alone
SHORT = 2048  # bytes: below, a regular expression is faster than numpy
MOST_KNOWN = 100_000  # characters, with the bytes that follow them
MOSTLY = 12  # a text with one character to fold in so many, or more, is folded as a whole

LOOK_ALIKES = dict(
    zip(
        "авеґгдзікмнорстухѕјһԁԛԝѵӏёєї" + "αβγεζηικμνορτυχωϲϳ" + "ıłøđħŧƒɑɡɩʏ",
        "abeggd3ikmhopctyxsjhdqwvleei" + "abyezhikmnoptyxwcj" + "ilodhtfagiy",
        strict=True,
    )
)
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\U00020000-\U0003ffff]"
)

ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|["\\/bfnrt])')
ENTITY = re.compile(r"&(?:[a-zA-Z]{2,8}|#\d{1,7}|#x[0-9a-fA-F]{1,6});")
TAG = re.compile(r"</?[a-zA-Z][^<>]{0,200}>")
HYPHEN = re.compile(r"-\r?\n[ \t]*")
NUMBERED = re.compile(r"\n[ \t]*\d{1,6}[:.)\]|]?[ \t]")
IS_ESCAPE = np.isin(np.arange(256), list(b"nu"))  # what follows a backslash
NUMBER, DIGIT = re.compile(rb"\n(\d{1,6})[:.)\]|]?[ \t]"), re.compile(rb"\n\d")


# -- characters --------------------------------------------------------------------------------------------------------


def fold(character: str) -> str:
    """What a character counts as: ASCII letters and digits, a space, or nothing."""
    found = ""
    for one in unicodedata.normalize("NFKD", character.casefold()):
        if one.isascii():
            found += one
        elif one in LOOK_ALIKES:
            found += LOOK_ALIKES[one]
        elif unicodedata.category(one) in ("Mn", "Mc", "Me", "Cf"):
            continue
        elif one.isalnum():
            found += f" u{ord(one):x} " if UNSPACED.match(one) else f"u{ord(one):x}"
        else:
            found += " "
    return found


class _ByCode(dict[int, str]):
    """`fold` by code point, for `str.translate`."""

    def __missing__(self, code: int) -> str:
        self[code] = chr(code) if code < 128 else fold(chr(code))
        return self[code]


class _ByBytes(dict[bytes, tuple[bytes, int] | None]):
    """What replaces the character at the beginning of four bytes of UTF-8, and its width; None for one that separates
    words as it is."""

    def __missing__(self, data: bytes) -> tuple[bytes, int] | None:
        width = 4 if data[0] >= 0xF0 else 3 if data[0] >= 0xE0 else 2
        found = fold(data[:width].decode("utf-8")).encode("ascii", "replace")
        if len(self) > MOST_KNOWN:
            self.clear()
        self[data] = None if found == b" " else (found, width)
        return self[data]


BY_CODE, BY_BYTES = _ByCode(), _ByBytes()


def folded(text: str) -> bytes:
    """The text in bytes of which only ASCII letters and digits are words; lone surrogates are question marks."""
    if text.isascii():
        return text.encode("ascii")
    data = text.encode("utf-8", "replace")
    leads = (np.frombuffer(data, np.uint8) > 0xC1).nonzero()[0].tolist()  # where characters of several bytes begin
    if len(leads) * MOSTLY > len(text):
        return text.translate(BY_CODE).encode("ascii", "replace")
    pieces, end = list[bytes](), 0
    replaced = [BY_BYTES[data[begin : begin + 4]] for begin in leads]
    for begin, found in zip(leads, replaced, strict=True) if any(replaced) else ():
        if found is not None:
            pieces += (data[end:begin], found[0])
            end = begin + found[1]
    return b"".join((*pieces, data[end:])) if pieces else data


# -- readings ----------------------------------------------------------------------------------------------------------


def other_readings(text: str, data: bytes) -> str:
    """The parts of a text that can be read in another way, as they are then, with `BORDER` between them. `data` is the
    text folded, in which what they begin with is found fastest."""
    parts = list[str]()
    if b"\\" in data:
        parts += (ESCAPE.sub(_unescaped, line) for line in _spelled_lines(data))
    if (b"<" in data and data.count(b"<") > MANY and data.count(b"</") >= MANY) or (
        b"&" in data and ENTITY.search(text)
    ):
        parts.append(html.unescape(TAG.sub(" ", text)))
    hyphenated, numbered = _line_ends(data)
    if hyphenated:
        parts += _rejoined(text)
    if numbered:
        parts.append(NUMBERED.sub("\n", "\n" + text))
    return BORDER.join(parts)


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else " "


def _spelled_lines(data: bytes) -> Iterator[str]:
    """The lines that spell several line ends, or characters by their numbers."""
    raw = np.frombuffer(data, np.uint8)
    escapes = (raw[:-1] == 0x5C).nonzero()[0]
    places = escapes[IS_ESCAPE[raw[escapes + 1]]].tolist()
    end = -1
    for first, last in zip(places, places[MANY - 1 :], strict=False):
        if first > end and data.find(b"\n", first, last) < 0:
            end = data.find(b"\n", last)
            end = len(data) if end < 0 else end
            yield data[data.rfind(b"\n", 0, first) + 1 : end].decode("utf-8", "replace")


def _line_ends(data: bytes) -> tuple[bool, bool]:
    """Whether a line may end in a hyphen, and whether a numbered line counts on from the one before it."""
    if len(data) < SHORT:
        hyphenated, digits = b"-\n" in data or b"-\r" in data, [found.start() for found in DIGIT.finditer(data)]
    else:
        raw = np.frombuffer(data, np.uint8)
        ends = (raw[:-1] == 0x0A).nonzero()[0]
        before, after = raw[ends - 1].tobytes(), raw[ends + 1].tobytes()
        hyphenated = b"-" in before or (b"\r" in before and b"-\r" in data)
        digits = [int(ends[found.start()]) for found in re.finditer(rb"\d", after)]
    if len(digits) < 2:
        return hyphenated, False
    counted = [int(found[1]) for place in digits if (found := NUMBER.match(data, place))]
    return hyphenated, any(after == before + 1 for before, after in itertools.pairwise(counted))


def _rejoined(text: str) -> Iterator[str]:
    """What is around hyphenated line ends, with their words made whole; neighbours in one part."""
    begin = end = 0
    for found in HYPHEN.finditer(text):
        whole = text[found.start() - 1 : found.start()].isalpha() and text[found.end() : found.end() + 1].isalpha()
        if not whole:
            continue
        if end < found.start() - CONTEXT:
            if end:
                yield HYPHEN.sub("", text[begin:end])
            begin = max(0, found.start() - CONTEXT)
        end = found.end() + CONTEXT
    if end:
        yield HYPHEN.sub("", text[begin:end])
