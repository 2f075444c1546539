"""Documents that are generated, not read: the mini suite (mathematics, code, logic), and the sums of `synthetic`.

What an item of the suite is about (its content: a calculation, a function, a little world) and how it is worded are
drawn separately. A content always belongs to the same split, by a hash of its key, so that no training document has the
content of a test question in any wording. Item n of a split is a function of (kind, split, seed, n) alone: any part of
the stream can be skipped at no cost.

The manifest of the shards keeps the section of the prepare file with the version of the texts, so that an evaluation
can ask held-out questions of the very kind that a model was trained on.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from freda.data import mini_code, mini_logic, mini_math, synthetic
from freda.data.config import CorpusConfig, MiniConfig
from freda.data.shards import Manifest
from freda.data.synthetic import PATIENCE, Item, Split, split_of
from freda.errors import FredaError, require

VERSION = 10  # of the texts: the same seed gives the same texts as long as this stays
OPTIONS = "\nA. "  # marks a question with answers to choose from
MiniKind = Literal["mini_math", "mini_code", "mini_logic"]
Made = Iterator[tuple[Split, int, str]]  # split, number within the split, text

# Each module has draw(rng, config), a content of any split, and told(content, rng, config), its `Item`. A content has a
# `key`; contents that mean the same have the same key.
KINDS: dict[MiniKind, Any] = {"mini_math": mini_math, "mini_code": mini_code, "mini_logic": mini_logic}


def item(kind: MiniKind, config: MiniConfig, split: Split, number: int) -> Item:
    """Item `number` of a split."""
    rng = random.Random(f"{kind} {split} {config.seed} {number}")  # seeded by a string: the same in every process
    for _ in range(PATIENCE):
        content = KINDS[kind].draw(rng, config)
        if split_of(content.key) != split:
            continue
        made: Item = KINDS[kind].told(content, rng, config)
        if split != "test" or not made.lesson:
            return made
    raise FredaError(f"no {kind} item of these settings is in the {split} split; raise the difficulty in [mini]")


def documents(kind: MiniKind, config: MiniConfig, part: int, parts: int) -> Made:
    """One part of the corpus. Held-out ones come first, before a token budget ends it."""
    held_out = config.validation_documents
    for place in range(part, held_out + config.documents, parts):
        split: Split = "validation" if place < held_out else "train"
        number = place if place < held_out else place - held_out
        yield split, number, item(kind, config, split, number).document


def questions(kind: MiniKind, config: MiniConfig, split: Split, count: int) -> list[Item]:
    """The first items of a split with distinct contents: a question that is asked twice measures nothing."""
    found: dict[str, Item] = {}
    repeats = number = 0
    while len(found) < count:
        new = item(kind, config, split, number)
        repeats = repeats + 1 if new.key in found else 0
        found.setdefault(new.key, new)
        number += 1
        seen = f"{kind} has about {len(found)} contents in the {split} split, not {count}"
        advice = "raise the difficulty in [mini] before you prepare the documents"
        require(repeats < PATIENCE, f"{seen}; {advice}")
    return list(found.values())


def questions_of(kind: MiniKind, folder: Path, count: int) -> list[Item]:
    """The first test questions, as difficult as the documents in a folder of shards."""
    return questions(kind, settings_of(folder), "test", count)


def held_out(folder: Path) -> list[str]:
    """The first test question of each kind, as difficult as the documents in a folder of shards."""
    config = settings_of(folder)
    return [item(kind, config, "test", 0).prompt for kind in KINDS]


def settings_of(folder: Path) -> MiniConfig:
    """The settings that a folder of shards was generated with; its manifest has them."""
    return MiniConfig(**settings_in(folder, "mini_math"))


def prompt_of(message: str) -> tuple[str, tuple[str, ...]]:
    """Turn a typed message into the beginning of a training document, and name the strings that end its answer: of a
    deduction the end of its sentence, because the documents continue with further conclusions."""
    text = message.strip()
    stop = (".",) if text.startswith((mini_logic.WALK, mini_logic.FACTS)) else ()
    if text.startswith(("def ", mini_logic.WALK)) or "\nAnswer:" in text:
        return text, stop
    if OPTIONS in text or text.startswith(mini_logic.FACTS):
        return f"{text}\nAnswer:", stop
    return f"Q: {text.removeprefix('Q:').removesuffix('A:').strip()}\nA:", stop


class Generator(NamedTuple):
    """How the documents of one kind are made."""

    section: str  # of the prepare file, and of the manifest of shards made from it
    version: int  # of the texts
    documents: Callable[[Any, int, int], Made]  # of one part, from (section, part, parts)
    training: str  # the key of the section that counts the training documents


def _sums(corpus: CorpusConfig, part: int, parts: int) -> Made:
    """The embedded word problems, training first, then those held out."""
    counts: dict[Split, int] = {"train": corpus.problems, "validation": corpus.validation_problems}
    firsts = {split: itertools.islice(synthetic.problems_of(corpus, split), count) for split, count in counts.items()}
    whole = ((split, number, one.document) for split, first in firsts.items() for number, one in enumerate(first))
    return itertools.islice(whole, part, None, parts)


GENERATORS: dict[str, Generator] = {"sums": Generator("corpus", synthetic.VERSION, _sums, "problems")}
GENERATORS |= {kind: Generator("mini", VERSION, functools.partial(documents, kind), "documents") for kind in KINDS}


def settings_in(folder: Path, kind: str) -> dict[str, Any]:
    """The section of the prepare file that the documents in a folder of shards were generated from."""
    section, version, *_ = GENERATORS[kind]
    values = dict(Manifest.read(folder).source.get(section, {}))
    require(bool(values), f"{folder} holds no documents generated from [{section}]; name shards that do with --data")
    found = values.pop("generator")
    why = f"{folder} was made by version {found} of the generator, this is {version}; prepare it again"
    require(found == version, why)
    return values
