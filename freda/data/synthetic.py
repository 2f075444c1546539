"""Word problems with worked solutions: a corpus that needs no download, and its exact-match grader.

A problem is a chain of additions and subtractions told as a little story. What is computed (`Sum`) and how it is worded
are drawn separately: a sum always belongs to the same split, by a hash of its key, so a model that answers held-out
problems has learned to calculate, not memorized. Sums that differ only in the order of their parts share a key, or
5 + 12 in the training split would give away 12 + 5 in the test split.

Unless `varied` is false, a question has several correct solutions that differ in wording and in the order of the
summands. Drafts made in parallel can then mix two of them.

All numbers lie in 2..max_number, results included.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar

from freda.data.config import CorpusConfig
from freda.errors import FredaError

T = TypeVar("T")
Split = Literal["train", "validation", "test"]

VERSION = 1  # of the texts: the same seed gives the same texts as long as this stays; the order of words counts
LEAST = 2  # smallest number: "1 shells" would need other words
PATIENCE = 10_000  # unsuccessful draws in a row after which there is nothing (new) to find


class Person(NamedTuple):
    """A name with its pronoun."""

    name: str
    she: str

    @property
    def words(self) -> dict[str, str]:
        """The fields of a sentence about this person."""
        return {"name": self.name, "she": self.she, "She": self.she.capitalize()}


PEOPLE = (
    *(Person(name, "she") for name in ("Mia", "Ana", "Zoe", "Eva", "Ida", "Lea")),
    *(Person(name, "he") for name in ("Tom", "Ben", "Sam", "Leo", "Max", "Jon")),
)
THINGS = (
    *("shells", "apples", "coins", "books", "pens", "cards"),
    *("eggs", "stamps", "marbles", "stones", "beads", "cups"),
)
OPENINGS = tuple("{name} " + verb + " {n} {things}." for verb in ("has", "starts with", "owns", "keeps"))
ADDITIONS = ("{She} finds {n} more.", "{She} buys {n} more.", "{She} gets {n} more.", "A friend brings {n} more.")
SUBTRACTIONS = ("{She} gives away {n}.", "{She} loses {n}.", "{She} sells {n}.", "A friend takes {n}.")
QUESTIONS = ("How many {things} does {name} have now?", "How many does {she} have?", "How many {things} now?")
WORKED_ADDITIONS = ("{equation}.", "{name} has {equation} {things}.", "That makes {equation}.")
WORKED_SUBTRACTIONS = ("{equation}.", "{name} has {equation} {things}.", "That leaves {equation}.")
ANSWER = "The answer is"
# At most 15 digits, with or without commas between thousands; no decimals, and no letters after it.
WHOLE_NUMBER = re.compile(r"\s*(-?(?:[0-9]{1,3}(?:,[0-9]{3}){1,4}|[0-9]{1,15}))(?![.,]?\w)")


class Sum(NamedTuple):
    """A start and signed changes; all totals on the way are in range."""

    start: int
    changes: tuple[int, ...]

    @property
    def key(self) -> str:
        """The sum regardless of order: 12+5-3 and 5-3+12 are both `5+12-3`."""
        added = sorted([self.start, *(change for change in self.changes if change > 0)])
        taken = sorted(-change for change in self.changes if change < 0)
        return "+".join(map(str, added)) + "".join(f"-{number}" for number in taken)

    @property
    def carries(self) -> bool:
        """Whether any step carries or borrows from one digit to the next."""
        total = self.start
        for change in self.changes:
            before, total = total, total + change
            # Without a carry, the digits of the two smaller numbers add up to the digits of the larger one.
            *smaller, larger = (sum(map(int, str(number))) for number in sorted((before, abs(change), total)))
            if sum(smaller) != larger:
                return True
        return False


class Item(NamedTuple):
    """A generated task with a correct solution."""

    prompt: str
    solution: str  # follows the prompt immediately
    answer: str  # what is graded: a number, a letter, or for code the solution itself
    key: str  # that of its content
    level: int  # steps of a calculation, transformations of a function, hops of a deduction
    family: str = ""  # a subdivision of its kind: which puzzle, or what a function works on
    entry_point: str = ""  # name of the function to write
    lesson: bool = False  # easier than what is tested: for training only

    @property
    def document(self) -> str:
        """The text that a model is trained on."""
        return self.prompt + self.solution


def problems_of(config: CorpusConfig, split: Split) -> Iterator[Item]:
    """The problems of a split, without end. Held-out questions come once each, as long as there are new ones; training
    questions are repeated with other solutions, which is how a model learns that there are several."""
    rng = random.Random(f"{split} {config.seed}")  # seeded by a string: the same in every process, unlike by a tuple
    asked, repeats = set[str](), 0
    while True:
        problem = _word(_draw_sum(rng, config, split), rng, config.varied)
        repeats = repeats + 1 if problem.prompt in asked else 0
        if not 0 < repeats <= PATIENCE:
            yield problem
        if split != "train":
            asked.add(problem.prompt)


def split_of(key: str) -> Split:
    """The split a sum belongs to: 80% train, 10% validation, 10% test, whatever the seed."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 10
    return "train" if bucket < 8 else "validation" if bucket == 8 else "test"


def _draw_sum(rng: random.Random, config: CorpusConfig, split: Split) -> Sum:
    """A random sum of the split."""
    for _ in range(PATIENCE):
        start = total = between(rng, LEAST, config.max_number)
        changes = []
        for _ in range(config.steps):
            changes.append(_draw_change(rng, total, config.max_number, config.max_change or config.max_number))
            total += changes[-1]
        drawn = Sum(start, tuple(changes))
        if split_of(drawn.key) == split and (config.carry or not drawn.carries):
            return drawn
    seen = f"no sum of {config.steps} steps with numbers up to {config.max_number} is in the {split} split"
    raise FredaError(f"{seen}; use a larger max_number")


def _draw_change(rng: random.Random, total: int, max_number: int, max_change: int) -> int:
    """Draw a signed change that keeps the total in range; the sign is a coin toss where both are possible."""
    can_add, can_take = total + LEAST <= max_number, total - LEAST >= LEAST
    heads = rng.random() < 0.5  # tossed in any case: the texts of VERSION 1 depend on it
    if can_add and (heads or not can_take):
        return between(rng, LEAST, min(max_change, max_number - total))
    return -between(rng, LEAST, min(max_change, total - LEAST))


def between(rng: random.Random, least: int, most: int) -> int:
    """Draw a whole number from a closed range. Only `random()` is the same in every version of Python."""
    return least + int(rng.random() * (most - least + 1))


def pick(rng: random.Random, options: Sequence[T]) -> T:
    """Draw one of the options."""
    return options[between(rng, 0, len(options) - 1)]


def _word(drawn: Sum, rng: random.Random, varied: bool) -> Item:
    """Tell a sum as a story, and solve it."""
    words = {**pick(rng, PEOPLE).words, "things": pick(rng, THINGS)}
    question = [pick(rng, OPENINGS).format(n=drawn.start, **words)]
    solution = []
    total = drawn.start
    for change in drawn.changes:
        told, worked = (ADDITIONS, WORKED_ADDITIONS) if change > 0 else (SUBTRACTIONS, WORKED_SUBTRACTIONS)
        question.append(pick(rng, told).format(n=abs(change), **words))
        wording = pick(rng, worked) if varied else worked[0]
        left, sign, right = (total, "+", change) if change > 0 else (total, "-", -change)
        if varied and change > 0 and rng.random() >= 0.5:
            left, right = right, left
        total += change
        solution.append(wording.format(equation=f"{left} {sign} {right} = {total}", **words))
    question.append(pick(rng, QUESTIONS).format(**words))
    solution.append(f"{ANSWER} {total}.")
    prompt, solved = f"Q: {' '.join(question)}\nA:", f" {' '.join(solution)}"
    return Item(prompt, solved, str(total), drawn.key, len(drawn.changes))


def final_answer(text: str) -> int | None:
    """The whole number after the last `The answer is`, if there is one."""
    _, found, rest = text.rpartition(ANSWER)
    number = WHOLE_NUMBER.match(rest) if found else None
    return int(number[1].replace(",", "")) if number else None


def grade(problem: Item, text: str) -> bool:
    """Whether the last answer in the text is correct."""
    return str(final_answer(text)) == problem.answer
