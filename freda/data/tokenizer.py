"""Text to ids and back, with the two tokens the method needs: BLANK for an empty slot, EOS for the end of a document.

BLANK is always the highest id: the model's logits are cut to the ids below it, so a draft can never contain it. It has
no meaning in text, and text that spells it is refused instead of becoming an empty slot.

A tokenizer is two files, `tokenizer.json` (kept byte for byte as it was read, because another version of the library
may write the same tokenizer differently and the fingerprint would change) and `tokenizer_config.json`, which names EOS.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from freda.errors import FredaError, require
from freda.files import located, parse_json, read_json, read_text

BLANK_TEXT = "<|blank|>"
EOS_TEXT = "<|endoftext|>"

BYTES = 256
KEPT_SETTINGS = ("bos_token", "chat_template", "model_max_length")  # of a source checkpoint's tokenizer_config.json

UNKNOWN_PIECE = "�"


class Tokenizer:
    """A `tokenizers.Tokenizer` that knows which ids are BLANK and EOS.

    Attributes: `blank_id`; `eos_id`, which ends documents in training; `stop_ids`, all ids that end generation, with
    `eos_id` first; `size`, the number of ids, BLANK included; `json_text` and `settings`, its two files.
    """

    def __init__(self, json_text: str, settings: Mapping[str, Any]) -> None:
        """From the text of `tokenizer.json` and settings with `eos_token` and, optionally, `stop_tokens`."""
        self.json_text = json_text
        self._tokenizer = _parse(json_text)
        self.settings = dict(settings)
        blank: Any = self._tokenizer.token_to_id(BLANK_TEXT)
        require(blank is not None, f"the tokenizer has no {BLANK_TEXT} token; run: freda convert SOURCE TARGET")
        last = first_free_id(self._tokenizer) - 1
        require(blank == last, f"{BLANK_TEXT} has id {blank}, but it must be the last one, {last}; convert it again")
        self.blank_id, self.size = last, last + 1
        self.eos_id = self._named_id("eos_token", token_text(settings.get("eos_token")))
        texts = settings.get("stop_tokens", ())
        listed = isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts)
        require(listed, f"stop_tokens of tokenizer_config.json is {texts!r}; make it a list of tokens")
        stops = [self._named_id("stop_tokens", text) for text in texts]
        self.stop_ids: tuple[int, ...] = tuple(dict.fromkeys([self.eos_id, *stops]))

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model or data folder."""
        with located(folder):
            return cls(read_text(folder / "tokenizer.json"), read_settings(folder))

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`; `transformers.AutoTokenizer` reads them too."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokenizer.json").write_text(self.json_text, encoding="utf-8", newline="")
        text = json.dumps(self.settings, indent=2, ensure_ascii=False) + "\n"
        (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.json_text, self.settings)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of `tokenizer.json` without regard to its spacing: equal fingerprints give equal ids."""
        canonical = json.dumps(json.loads(self.json_text), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    @functools.cached_property
    def vocabulary(self) -> str:
        """SHA-256 of all tokens with their ids; whatever version of the library has written the files."""
        ids = sorted(_parse(self.json_text).get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps(ids).encode()).hexdigest()

    @property
    def bos_id(self) -> int | None:
        """The token that begins a text, where the settings name one."""
        text = token_text(self.settings.get("bos_token"))
        return None if text is None else self._named_id("bos_token", text)

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, with nothing added in front or behind. Text that spells BLANK is an error."""
        if not isinstance(text, str):
            raise FredaError(f"a text is {text!r:.80} ({type(text).__name__}); use a string")
        offset = text.find(BLANK_TEXT)
        reserved = "which is reserved for empty slots of a draft; remove it from the text"
        require(offset < 0, f"the text contains {BLANK_TEXT} at character {offset}, {reserved}")
        try:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        except TypeError:  # lone surrogates: what Python makes of broken bytes when it reads a command line
            offset = next(index for index, character in enumerate(text) if "\ud800" <= character <= "\udfff")
            raise FredaError(f"the text is not valid Unicode at character {offset}; write it as UTF-8") from None
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens (BLANK and EOS among them) are omitted."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each token by itself as printable text, to draw drafts: BLANK is ░, EOS ■, a part of a character �."""
        return [{self.blank_id: "░", self.eos_id: "■"}.get(index) or self._piece(index) for index in ids]

    def _piece(self, index: int) -> str:
        token = self._tokenizer.id_to_token(index)
        if token is None:
            return UNKNOWN_PIECE
        # SentencePiece tokens write a space as ▁, and their decoder drops it in front of a text: here it must stay.
        text = token.replace("▁", " ") if "▁" in token else self._tokenizer.decode([index], skip_special_tokens=False)
        return "".join(_drawn(character) for character in text)

    def _named_id(self, setting: str, text: str | None) -> int:
        """The id of a token named in the settings, below BLANK so that the model can predict it."""
        if text is None:
            raise FredaError(f"tokenizer_config.json names no {setting}; add it, for example {EOS_TEXT!r}")
        index = self._tokenizer.token_to_id(text)
        if index is None or index >= self.blank_id:
            raise FredaError(f"the {setting} {text!r} of tokenizer_config.json is not a token of tokenizer.json")
        return int(index)


def open_tokenizer(folder: Path, eos: str = "") -> Tokenizer:
    """The tokenizer of a freda folder, or of another checkpoint, with BLANK added as `freda convert` does. `eos` names
    another token to end documents. `tokenizer.json` may be compressed with xz."""
    require(folder.is_dir(), f"there is no folder {folder}; name one that holds a tokenizer.json")
    with located(folder):
        packed = folder / "tokenizer.json.xz"
        text = read_text(packed if packed.is_file() else folder / "tokenizer.json")
        settings, parsed = read_settings(folder), _parse(text)
        end = eos or token_text(settings.get("eos_token"))
        if end is None:
            raise FredaError("tokenizer_config.json names no eos_token")
        known = parsed.token_to_id(end) is not None
        require(known, f"the tokenizer has no token {end!r}, which should end documents; set prepare.eos")
        if parsed.token_to_id(BLANK_TEXT) is None:
            return with_blank(text, [end], settings)
        return Tokenizer(text, {**settings, "eos_token": end})


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most `vocab_size` ids: any text encodes, and every digit is a token of its own. The last
    two ids are EOS and BLANK. A corpus with too few distinct words gives a smaller table."""
    least = f"{BYTES + 2} or more (all bytes, EOS, BLANK)"
    require(vocab_size >= BYTES + 2, f"a vocabulary of {vocab_size} is too small; use {least}")
    splits = tokenizers.pre_tokenizers
    byte_level = splits.ByteLevel(add_prefix_space=False)
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = splits.Sequence([splits.Digits(individual_digits=True), byte_level])
    trained.decoder = tokenizers.decoders.ByteLevel()
    alphabet = splits.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size - 2, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    eos_id = first_free_id(trained)
    trained.add_special_tokens([EOS_TEXT])
    return with_blank(trained.to_str(), [eos_id], {})


def with_blank(json_text: str, stops: Sequence[int | str], settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of another checkpoint with BLANK at its first free id (kept if it already has one).

    `stops` are the tokens that end generation, as ids or texts; the first one ends documents. Of `settings` (its
    `tokenizer_config.json`) only values that do not depend on the tokenizer class are kept.
    """
    source = _parse(json_text)
    if source.token_to_id(BLANK_TEXT) is None:
        free = first_free_id(source)
        source.add_special_tokens([tokenizers.AddedToken(BLANK_TEXT, special=True, normalized=False)])
        behind = source.token_to_id(BLANK_TEXT) == free
        require(behind, f"the tokenizer's ids have gaps below {free}; {BLANK_TEXT} cannot be added behind them")
        json_text = source.to_str()
    texts = [source.id_to_token(stop) if isinstance(stop, int) else stop for stop in stops]
    known = bool(texts) and None not in texts
    require(known, f"the end-of-text ids {list(stops)} are not tokens of the tokenizer; set eos_token_id")
    kept = {key: settings[key] for key in KEPT_SETTINGS if settings.get(key) is not None}
    names = {"eos_token": texts[0], "pad_token": texts[0], "stop_tokens": list(dict.fromkeys(texts))}
    # The plain class reads tokenizer.json as it is; family classes of `transformers` would build their own splitting.
    return Tokenizer(json_text, {"tokenizer_class": "PreTrainedTokenizerFast", **kept, **names})


def first_free_id(tokenizer: tokenizers.Tokenizer) -> int:
    """The id behind the last one in use. Gaps do not count: logits are cut at BLANK, so all ids must lie below it."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def read_settings(folder: Path) -> dict[str, Any]:
    """`tokenizer_config.json`, with the chat template that newer checkpoints keep in a file of its own."""
    settings = read_json(folder / "tokenizer_config.json")
    template = folder / "chat_template.jinja"
    if template.is_file():
        settings["chat_template"] = read_text(template)
    return settings


def token_text(token: Any) -> str | None:
    """A token as Hugging Face files name it: a string, or an object with its `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _parse(json_text: str) -> tokenizers.Tokenizer:
    try:
        parse_json(json_text)  # the library has no limit on depth
        parsed = tokenizers.Tokenizer.from_str(json_text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises nothing narrower, and a panic of Rust is no Exception
        raise FredaError(f"tokenizer.json is not a valid tokenizer: {str(error)[:300]}") from None
    parsed.no_truncation()  # a checkpoint may contain the limits of the script that saved it
    parsed.no_padding()
    return parsed


def _drawn(character: str) -> str:
    """A character as a single cell of a terminal shows it."""
    shown = " " if character.isspace() else character if character.isprintable() else UNKNOWN_PIECE
    return {"\n": "⏎", "\r": "␍", "\t": "⇥"}.get(character, shown)
