"""The mini suite: mathematics, code and logic of adjustable difficulty, in any amount and without a download.

What an item is about (its content: a calculation, a function, a little world) and how it is worded are drawn
separately. A content always belongs to the same split, by a hash of its key, so that no training document has the
content of a test question in any wording. Item n of a split is a function of (kind, split, seed, n) alone: any part of
the stream can be skipped at no cost.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Protocol

from freda.data import mini_code, mini_logic, mini_math
from freda.data.config import MiniConfig
from freda.data.shards import generator_settings
from freda.data.synthetic import PATIENCE, Item, Split, split_of
from freda.errors import FredaError, require

SECTION = "mini"  # of the prepare file, and of the manifest of shards made from it
VERSION = 10  # of the texts: the same seed gives the same texts as long as this stays
OPTIONS = "\nA. "  # marks a question with answers to choose from
MiniKind = Literal["mini_math", "mini_code", "mini_logic"]


class Contents(Protocol):
    """The functions of a kind's module. A content has a `key`; contents that mean the same have the same key."""

    def draw(self, rng: random.Random, config: MiniConfig) -> Any:
        """Draw a content of any split."""

    def told(self, content: Any, rng: random.Random, config: MiniConfig) -> Item:
        """Put the content into words, with its solution."""


KINDS: dict[MiniKind, Contents] = {"mini_math": mini_math, "mini_code": mini_code, "mini_logic": mini_logic}


def item(kind: MiniKind, config: MiniConfig, split: Split, number: int) -> Item:
    """Item `number` of a split."""
    rng = random.Random(f"{kind} {split} {config.seed} {number}")  # seeded by a string: the same in every process
    for _ in range(PATIENCE):
        content = KINDS[kind].draw(rng, config)
        if split_of(content.key) != split:
            continue
        made = KINDS[kind].told(content, rng, config)
        if split != "test" or not made.lesson:
            return made
    raise FredaError(f"no {kind} item of these settings is in the {split} split; raise the difficulty in [mini]")


def documents(kind: MiniKind, config: MiniConfig, part: int, parts: int) -> Iterator[tuple[Split, int, str]]:
    """One part of the corpus: split, number and text. Held-out ones come first, before a token budget ends it."""
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
    return MiniConfig(**generator_settings(folder, SECTION, VERSION))


def prompt_of(message: str) -> tuple[str, tuple[str, ...]]:
    """Turn a typed message into the beginning of a training document, and name the strings that end its answer.

    A message is a word problem unless it has the form of a function, a deduction or a question with options. Documents
    of deductions continue with further conclusions, so there the answer ends with its sentence.
    """
    text = message.strip()
    stop = (".",) if text.startswith((mini_logic.WALK, mini_logic.FACTS)) else ()
    if text.startswith(("def ", mini_logic.WALK)) or "\nAnswer:" in text:
        return text, stop
    if OPTIONS in text or text.startswith(mini_logic.FACTS):
        return f"{text}\nAnswer:", stop
    return f"Q: {text.removeprefix('Q:').removesuffix('A:').strip()}\nA:", stop
