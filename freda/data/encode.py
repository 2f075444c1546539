"""Text to ids at corpus speed: `tiktoken` where it gives the same ids.

`Tokenizer.encode` defines the right ids. `tiktoken`, given the same vocabulary and split pattern, gives them nine times
faster (measured with Qwen3's tokenizer on one core), but it knows less: no added tokens, no normalization, and no list
of merges, because it merges any two neighbours whose bytes are a token, lowest id first. So a tokenizer is read
(`_recipe`), its merges are checked to mean the same under both rules (`_check_merges`), and both libraries encode a
list of difficult texts with characters of every script. If anything fails, the library `tokenizers` stays in charge,
and the encoder says why. Single texts that need what tiktoken does not know are left to `Tokenizer.encode` as well.
"""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from freda.data.tokenizer import BLANK_TEXT, BYTES, Tokenizer
from freda.errors import FredaError, optional, require

NFC = tokenizers.normalizers.NFC()
# What ByteLevel(use_regex=True) splits by, from the library's source.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

DIFFICULT_TEXTS = (
    "",
    "I'm sure they'll've said it's HERS'S, WE'RE, you'Re, he'D, don'T 'tis 'S 's' ''s '\u017f 'ſt",
    "  two  spaces   three    four \t tab\t\ttabs \n \n\n  \n\r\n\r\r\n trailing   ",
    "def f(x):\n    if x:\n\t\treturn  [x, 'y']  # z\n\n\n\n\nclass A:\n        pass\n",
    "1234567890 12.5e-10 0x1F 3,141,592 ½ ² ٣٤٥ १२३ 一二三 Ⅷ 𝟗𝟘",
    "don’t “quote” … — – ™ © § ¶ \u00ad \ufeff \u200b\u200d \ufffd \ufffe \uffff \U0010ffff \ue000",
    "\x00\x01\x1b\x1c\x1d\x1e\x1f\x7f\x80\x85\x9f a\x1cb \x1c a\x85b\x85\x85",
    "\u00a0a\u00a0\u00a0b\u1680c\u2003\u2003d\u2028e\u2029\u2029f\u202fg\u205fh\u3000\u3000i\u180ej",
    "e\u0301e\u0323\u0301 \u0301 A\u030a \u212b \u2126 \u212a \uf900 ﬁ ŉ ǆ \u1100\u1161\u11a8 한글 \u0958",
    "a\u0898\u0301b\u1abf\u0327\u0301 \u09fe\u0301 \u0344 \u1f71 \U0001d15e",  # marks younger than the library's tables
    "日本語の文章、句読点。中文字符！한국어 문장. ไทยไม่มีช่องว่าง हिन्दी में العربية עברית ελληνικά кириллица",
    "😀😀 👩\u200d👩\u200d👧 🇩🇪🇫🇷 👍🏽 ❤\ufe0f 1\ufe0f\u20e3 🏴\U000e0067\U000e0062\U000e007f",
    "https://example.org/a_b-c?d=e&f=%20#g <a href='x'>y</a> {\"k\": [1, -2.0]} $\\frac{a}{b}$ a@b.c #tag __init__",
    *(unit * count for unit in ("a", " ", "\n", "-", "=", "ab", "0", "中", " \n") for count in (2, 3, 5, 17, 64, 333)),
)


class Encoder:
    """Text to ids. `library` is the one in use; `reason` says why it is not tiktoken, and is empty where it is.

    `tiktoken` is its encoding for measurements, or None: alone it is wrong for the texts that `quick` skips. Worker
    processes that get a pickled encoder build it again from `tokenizer.json`, without the checks.
    """

    def __init__(self, tokenizer: Tokenizer, reason: str = "") -> None:
        """Use `make_encoder`, which checks that both libraries give the same ids."""
        self._tokenizer, self.reason = tokenizer, reason
        self.library = "tokenizers" if reason else "tiktoken"
        self.tiktoken: Any = None
        if not reason:
            values = json.loads(tokenizer.json_text)
            self._nfc, self._added = bool(values.get("normalizer")), _added_tokens(values)
            self.tiktoken = _encoding(values, tokenizer.blank_id)

    def encode(self, text: str) -> NDArray[np.int32]:
        """Exactly the ids of `Tokenizer.encode`, and exactly its errors."""
        ids = self.quick(text)
        return np.array(self._tokenizer.encode(text), dtype=np.int32) if ids is None else ids

    def quick(self, text: str) -> NDArray[np.int32] | None:
        """The ids by tiktoken, or None for a text that only `Tokenizer.encode` can handle.

        Such a text contains an added token (BLANK is an error there), lone surrogates (an error too), or a million
        spaces in a row, for which the stack of tiktoken's regex engine is too small. Without tiktoken it is any text.
        """
        if self.tiktoken is None or self._added.search(text):
            return None
        try:
            # The library's own NFC, 40 MB/s, for the few texts that change: its tables are those of Unicode 9, and
            # Python 3.11 orders 98 marks that are younger. What Python calls normal is normal to both.
            if self._nfc and not unicodedata.is_normalized("NFC", text):
                text = NFC.normalize_str(text)
                if self._added.search(text):
                    return None
            # Not encode_ordinary, which makes a list (4.2 against 4.7 million tokens a second) and panics where its
            # stack is too small. The copy is there because the buffer cannot be written to.
            ids: NDArray[np.int32] = self.tiktoken.encode_to_numpy(text, disallowed_special=()).astype(np.int32)
        except ValueError:  # surrogates (a UnicodeEncodeError), or the stack
            return None
        return ids

    def __str__(self) -> str:
        return f"{self.library} ({self.reason})" if self.reason else self.library

    def __reduce__(self) -> tuple[Any, ...]:
        return Encoder, (self._tokenizer, self.reason)


def make_encoder(tokenizer: Tokenizer, sample: Iterable[str] = ()) -> Encoder:
    """The fastest encoder with the ids of `tokenizer.encode`. tiktoken is used where it can be built and gives the very
    same ids on a list of difficult texts and on `sample`."""
    try:
        encoder = Encoder(tokenizer)
        _check_merges(json.loads(tokenizer.json_text)["model"])
        for text in itertools.chain(DIFFICULT_TEXTS, _every_script(), sample):
            _compare(encoder, tokenizer, text)
    except FredaError as error:
        return Encoder(tokenizer, str(error))
    return encoder


def _encoding(values: Mapping[str, Any], blank_id: int) -> Any:
    """The tiktoken encoding of a byte-level BPE; an error says why there is none."""
    tiktoken = optional("tiktoken", "data")
    _check_model(values["model"])
    normalizer = values.get("normalizer") or {"type": "NFC"}
    require(normalizer == {"type": "NFC"}, f"its normalizer is {normalizer.get('type')}, not NFC or none")
    pattern, ranks = _pattern(values.get("pre_tokenizer")), _ranks(values["model"])
    # A special token, though it never occurs: with none tiktoken looks for the empty text, at half the speed.
    special = {BLANK_TEXT: blank_id}
    try:
        return tiktoken.Encoding("freda", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
    except ValueError as error:
        raise FredaError(f"tiktoken cannot read its split pattern: {' '.join(str(error).split())}") from None


def _added_tokens(values: Mapping[str, Any]) -> re.Pattern[str]:
    """A pattern that finds the texts of added tokens, BLANK's among them."""
    texts = {token["content"] for token in values.get("added_tokens", ())} | {BLANK_TEXT}
    # An added token with `normalized` is looked for in its normal form.
    forms = {form for text in texts for form in (text, NFC.normalize_str(text)) if form}
    # One alternation costs 0.7% of the encoding for Qwen's 27 texts, 27 tests with `in` would cost 17%.
    return re.compile("|".join(map(re.escape, sorted(forms))))


def _check_model(model: Mapping[str, Any]) -> None:
    """Accept a byte-level BPE and nothing else."""
    kind = model.get("type", "BPE" if "merges" in model else "unknown")  # GPT-2's file does not say
    require(kind == "BPE", f"its model is {kind}, not BPE")
    for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        require(not model.get(option), f"its model has {option} = {model.get(option)!r}")
    missing = sum(character not in model["vocab"] for character in _byte_characters())
    require(not missing, f"its vocabulary lacks {missing} of the {BYTES} bytes")
    distinct = len(set(model["vocab"].values())) == len(model["vocab"])
    require(distinct, "two entries of its vocabulary have the same id")


def _pattern(pre_tokenizer: Mapping[str, Any] | None) -> str:
    """The split pattern of Split + ByteLevel (Qwen, Llama 3) or of ByteLevel alone (GPT-2)."""
    pre_tokenizer = pre_tokenizer or {"type": "none"}
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    names = [step["type"] for step in steps]
    known = names in (["Split", "ByteLevel"], ["ByteLevel"])
    require(known, f"its pre-tokenizer is {' + '.join(names)}, not Split + ByteLevel or ByteLevel")
    first, last = steps[0], steps[-1]
    require(not last.get("add_prefix_space", True), "its pre-tokenizer adds a space in front of the text")
    own_pattern = last.get("use_regex", True)  # older files do not say
    if len(steps) == 1 and own_pattern:
        return GPT2_PATTERN
    pattern = first.get("pattern", {}).get("Regex")
    alone = pattern is not None and not own_pattern and not first.get("invert")
    plain = alone and first.get("behavior") == "Isolated"
    require(plain, "its pre-tokenizer does not split by one regular expression and nothing else")
    return str(pattern)


def _byte_characters() -> str:
    """The characters that GPT-2 and its successors write for the bytes 0 to 255: the same one where it is visible."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(BYTES, 2 * BYTES))
    return "".join(chr(byte) if byte in visible else chr(next(others)) for byte in range(BYTES))


def _ranks(model: Mapping[str, Any]) -> dict[bytes, int]:
    """The bytes of every token that a text can contain, with its id, which is its rank."""
    to_latin = str.maketrans({character: chr(byte) for byte, character in enumerate(_byte_characters())})
    return {entry.translate(to_latin).encode("latin-1"): model["vocab"][entry] for entry in _reachable(model)}


def _reachable(model: Mapping[str, Any]) -> set[str]:
    """The bytes and everything merges make of them; with `ignore_merges`, any entry of the vocabulary."""
    alphabet = frozenset(_byte_characters())
    entries = model["vocab"] if model.get("ignore_merges") else {left + right for left, right in _merges(model)}
    return {entry for entry in entries if alphabet.issuperset(entry)} | alphabet


def _merges(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The pairs to merge, in order. Older files write a pair as one string; no byte is written as a space."""
    return [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]


def _check_merges(model: Mapping[str, Any]) -> None:
    """Check that "merge the first pair of the list" and "merge the neighbours whose bytes have the lowest id" agree.

    They do if the list is in the order of the ids, and no text of a token ends as two tokens. Proof: between two cuts
    of a longer text, merges happen in the order they would in that stretch alone. So where two neighbours spell a
    token, they are the pair that its own text is reduced to, one pair per token, and that pair is in the list, or the
    text would stay split: both rules choose among the same pairs, in the same order. This holds for lists with one pair
    per token (Qwen, GPT-2, whatever `tokenizers` trains) and with all pairs that spell it (Llama 3).

    tiktoken looks up a whole piece of text first. `ignore_merges` does the same; 588 tokens of Llama 3 exist only that
    way, their merges leaving three parts or more. Without `ignore_merges`, merges must make every token.
    """
    ids = [model["vocab"][left + right] for left, right in _merges(model)]
    for before, after in itertools.pairwise(ids):
        if after < before:
            raise FredaError(f"the ids are not in the order of the merges (id {after} is made after id {before})")
    bpe = tokenizers.models.BPE(vocab=model["vocab"], merges=_merges(model))
    for entry in _reachable(model):
        parts = len(bpe.tokenize(entry))
        if parts == 2 or (parts > 2 and not model.get("ignore_merges")):
            raise FredaError(f"tiktoken would make the token {entry!r} where its merges do not")


def _compare(encoder: Encoder, tokenizer: Tokenizer, text: str) -> None:
    """Encode a text with both libraries; one that is left to the tokenizer anyway needs no check."""
    ids = encoder.quick(text)
    if ids is not None and ids.tolist() != tokenizer.encode(text):
        shown = repr(text if len(text) <= 60 else text[:60] + "…")
        raise FredaError(f"it gives other ids than the library tokenizers for the text {shown}")


def _every_script() -> Iterator[str]:
    """Each character below U+10000 after a letter, a digit and spaces, because two regex libraries may have the tables
    of two versions of Unicode; only some of CJK, Hangul, private use and the next plane: 0.3 s instead of 1.5."""
    sparse = {code for start, end in ((0x3400, 0xA000), (0xAC00, 0xF900)) for code in range(start, end) if code % 64}
    codes = [code for code in (*range(0x10000), *range(0x10000, 0x20000, 16)) if code not in sparse]
    characters = [chr(code) for code in codes if not 0xD800 <= code < 0xE000]
    for start in range(0, len(characters), 512):
        yield "".join(f"a{character}1{character}  {character}.\n" for character in characters[start : start + 512])
