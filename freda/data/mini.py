"""The mini suite: mathematics, code and logic of adjustable difficulty, without end and without a download.

What an item is about (its content: a calculation, a function, a little world) and how it is told are drawn apart. A
content belongs to one split for ever, by a hash of its key, so that no training document has the content of a test
question, in no wording. Item n of a split is a function of (kind, split, seed, n) alone: parts of the stream cost
nothing to leave out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal, Protocol

from freda.data import mini_code, mini_logic, mini_math
from freda.data.config import MiniConfig
from freda.data.mini_item import Item
from freda.data.synthetic import PATIENCE, Split, split_of
from freda.errors import FredaError

VERSION = 10  # of the texts: the same seed gives the same texts as long as this stays
MiniKind = Literal["mini_math", "mini_code", "mini_logic"]


class Contents(Protocol):
    """The names of a kind's module. A content has a `key`: two that mean the same have the same."""

    def draw(self, rng: random.Random, config: MiniConfig) -> Any:
        """A content of any split."""

    def told(self, content: Any, rng: random.Random, config: MiniConfig) -> Item:
        """The content in words, with its solution."""


KINDS: dict[MiniKind, Contents] = {"mini_math": mini_math, "mini_code": mini_code, "mini_logic": mini_logic}


def item(kind: MiniKind, config: MiniConfig, split: Split, number: int) -> Item:
    """One item of a split."""
    rng = random.Random(f"{kind} {split} {config.seed} {number}")  # of a string: the same in every process
    for _ in range(PATIENCE):
        content = KINDS[kind].draw(rng, config)
        if split_of(content.key) != split:
            continue
        made = KINDS[kind].told(content, rng, config)
        if split != "test" or not made.lesson:
            return made
    raise FredaError(f"no {kind} item of these settings is in the {split} split; raise the difficulty in [mini]")


def documents(kind: MiniKind, config: MiniConfig, part: int, parts: int) -> Iterator[tuple[Split, int, str]]:
    """One part of the corpus: split, number and text. What is held out comes first: a budget of tokens may end it."""
    held_out = config.validation_documents
    for place in range(part, held_out + config.documents, parts):
        split: Split = "validation" if place < held_out else "train"
        number = place if place < held_out else place - held_out
        yield split, number, item(kind, config, split, number).document


def questions(kind: MiniKind, config: MiniConfig, split: Split, count: int) -> list[Item]:
    """The first items of a split with a content of their own: a question that is asked twice measures nothing."""
    found: dict[str, Item] = {}
    repeats = number = 0
    while len(found) < count:
        new = item(kind, config, split, number)
        repeats = repeats + 1 if new.key in found else 0
        found.setdefault(new.key, new)
        number += 1
        if repeats >= PATIENCE:
            raise FredaError(
                f"{kind} has about {len(found)} contents in the {split} split, not {count}; "
                "raise the difficulty in [mini] before you prepare the documents"
            )
    return list(found.values())
