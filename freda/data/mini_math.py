"""Word problems of several steps with all four operations, about one person or comparing several.

The question determines every token of the solution, one equation after the other. The content is the calculation:
summands in another order are the same calculation, or 12 + 5 in training would give away 5 + 12 in the test.
Irrelevant sentences of a story (`math_distractors`) are not part of it.
"""

from __future__ import annotations

import itertools
import random
from typing import Literal, NamedTuple

from freda.data.config import MiniConfig
from freda.data.synthetic import ANSWER, LEAST, Item, Person, between, pick
from freda.data.synthetic import PEOPLE as FIRST_PEOPLE
from freda.data.synthetic import THINGS as FIRST_THINGS

COMPARED = 0.3  # share of problems that compare people
Change = Literal["add", "take", "parcels", "times", "share"]
CHANGES: tuple[Change, ...] = ("add", "add", "take", "take", "parcels", "times", "share")
COMPARISONS: tuple[Change, ...] = ("add", "take", "times")
SIGNS: dict[Change, str] = {"add": "+", "take": "-", "times": "*", "share": "/"}

PEOPLE = (
    *FIRST_PEOPLE,
    *(Person(name, "she") for name in ("Nora", "Ella", "Ruth", "Kate", "Lily", "Rosa", "Anna", "Vera")),
    *(Person(name, "he") for name in ("Paul", "Nick", "Adam", "Finn", "Carl", "Luis", "Otto", "Hugo")),
)
THINGS = (
    *FIRST_THINGS,
    *("pencils", "stickers", "tickets", "buttons", "cookies", "flowers", "toys", "nuts", "candles", "photos"),
)
OPENINGS = (
    *("{name} has {n} {things}.", "{name} starts with {n} {things}.", "{name} owns {n} {things}."),
    *("In the morning {name} has {n} {things}.", "There are {n} {things} in the bag of {name}."),
    "{name} counts {n} {things}.",
)
TOLD: dict[Change, tuple[str, ...]] = {
    "add": (
        *("{She} finds {n} more.", "{She} buys {n} more.", "Then {she} gets {n} more.", "A friend brings {n} more."),
        *("{other} gives {name} {n} {things}.", "Later {name} receives another {n}."),
    ),
    "take": (
        *("{She} gives away {n}.", "{She} loses {n}.", "Then {she} sells {n}.", "A friend takes {n}."),
        *("{name} gives {n} {things} to {other}.", "Later {n} of them are gone."),
    ),
    "parcels": (
        "{She} buys {n} boxes of {m} {things} each.",
        "{other} brings {n} bags with {m} {things} in each.",
        "Then {she} gets {m} {things} from each of {n} friends.",
        "{n} packs of {m} {things} arrive.",
    ),
    "times": (
        "Then the number grows to {n} times as many.",
        "{name} now gets {n} times as many as {she} had.",
        "A wizard makes it {n} times as many.",
    ),
    "share": (
        "{She} makes {n} equal piles and keeps one of them.",
        "{She} shares them equally among {n} people and keeps one share.",
        "Then {name} keeps only one of {n} equal parts.",
    ),
}
COMPARED_WITH: dict[Change, tuple[str, ...]] = {
    "add": ("{name} has {n} more than {other}.", "{name} owns {n} {things} more than {other}."),
    "take": ("{name} has {n} fewer than {other}.", "{name} owns {n} {things} fewer than {other}."),
    "times": ("{name} has {n} times as many as {other}.", "{name} owns {n} times as many {things} as {other}."),
}
BESIDE = (
    *("The shop has {n} {others}.", "{She} also has {n} {others}.", "It is day {n} of the year."),
    *("{name} is {n} years old.", "The {others} cost {n} coins each."),
)
QUESTIONS = (
    *("How many {things} does {name} have now?", "How many does {she} have in the end?"),
    *("How many {things} are left?", "What is the number of {things} now?"),
)
TOGETHER = (
    "How many {things} do {name} and {other} have together?",
    "How many do {other} and {name} have in all?",
    "What is the total of {name} and {other}?",
)


class Step(NamedTuple):
    """One change of the total; `size` is that of each parcel."""

    change: Change
    number: int
    size: int = 0

    def applied(self, total: int) -> int:
        """The total after this step."""
        if self.change in ("times", "share"):
            return total * self.number if self.change == "times" else total // self.number
        return total + self.number * {"add": 1, "take": -1, "parcels": self.size}[self.change]

    def worked(self, total: int) -> str:
        """The equations of this step."""
        if self.change == "parcels":
            parcels = self.number * self.size
            return f"{self.number} * {self.size} = {parcels}. {total} + {parcels} = {self.applied(total)}."
        return f"{total} {SIGNS[self.change]} {self.number} = {self.applied(total)}."


class Calculation(NamedTuple):
    """A start and the steps that change it; `together` adds the start to the last total in the end."""

    start: int
    steps: tuple[Step, ...]
    together: bool

    @property
    def key(self) -> str:
        """The calculation regardless of the order of summands and factors, and of number and size of parcels."""
        steps = [(False, f"+{self.start}")]  # whether it is one of factors, and what it does
        for step in self.steps:
            parcels = "+{}x{}".format(*sorted((step.number, step.size)))
            done = parcels if step.change == "parcels" else f"{SIGNS[step.change]}{step.number}"
            steps.append((step.change in ("times", "share"), done))
        runs = ("".join(sorted(one for _, one in run)) for _, run in itertools.groupby(steps, lambda step: step[0]))
        return " ".join(runs) + (" together" if self.together else "")


def draw(rng: random.Random, config: MiniConfig) -> Calculation:
    """Draw a calculation whose totals are all in 2..math_max_number."""
    steps = between(rng, config.math_steps_from, config.math_steps_to)
    together = steps > 1 and rng.random() < COMPARED
    most = config.math_max_number // 2 if together else config.math_max_number
    start = total = between(rng, LEAST, most)
    found = list[Step]()
    while len(found) < steps - together:
        change = pick(rng, COMPARISONS if together else CHANGES)
        step = _step(rng, change, total, most, config.math_max_factor)
        if step is not None:
            found.append(step)
            total = step.applied(total)
    return Calculation(start, tuple(found), together)


def _step(rng: random.Random, change: Change, total: int, most: int, most_times: int) -> Step | None:
    """Draw a change of this kind that keeps the total in range; None if the drawn one does not."""
    room = most - total
    if change in ("add", "take"):
        largest = room if change == "add" else total - LEAST
        return Step(change, between(rng, LEAST, largest)) if largest >= LEAST else None
    if change == "parcels":
        number, size = between(rng, LEAST, most_times), between(rng, LEAST, most_times)
        return Step(change, number, size) if number * size <= room else None
    number = between(rng, LEAST, most_times)
    fits = total * number <= most if change == "times" else total % number == 0 and total // number >= LEAST
    return Step(change, number) if fits else None


def told(content: Calculation, rng: random.Random, config: MiniConfig) -> Item:
    """Tell the calculation as a story, with its solution."""
    question = _comparison(content, rng, config) if content.together else _story(content, rng, config)
    solution, total = [], content.start
    for step in content.steps:
        solution.append(step.worked(total))
        total = step.applied(total)
    if content.together:
        solution.append(f"{content.start} + {total} = {content.start + total}.")
        total += content.start
    solution.append(f"{ANSWER} {total}.")
    family = "compared" if content.together else "story"
    level = len(content.steps) + content.together
    return Item(f"Q: {question}\nA:", f" {' '.join(solution)}", str(total), content.key, level, family)


def _story(content: Calculation, rng: random.Random, config: MiniConfig) -> str:
    """A story about one person whose total changes."""
    person, other = _people(rng, 2)
    while other.she == person.she:  # or "she" might be either
        person, other = _people(rng, 2)
    words = _words(rng, person, other)
    sentences = [pick(rng, OPENINGS).format(n=content.start, **words)]
    for step in content.steps:
        sentences.append(pick(rng, TOLD[step.change]).format(n=step.number, m=step.size, **words))
    return " ".join([*_with_beside(sentences, words, rng, config), pick(rng, QUESTIONS).format(**words)])


def _comparison(content: Calculation, rng: random.Random, config: MiniConfig) -> str:
    """A comparison: every person has more or less than the one before."""
    people = _people(rng, len(content.steps) + 1)
    words = _words(rng, people[0], people[-1])
    sentences = [pick(rng, OPENINGS).format(n=content.start, **words)]
    for step, person, before in zip(content.steps, people[1:], people, strict=False):
        told = pick(rng, COMPARED_WITH[step.change])
        sentences.append(told.format(n=step.number, things=words["things"], name=person.name, other=before.name))
    return " ".join([*_with_beside(sentences, words, rng, config), pick(rng, TOGETHER).format(**words)])


def _with_beside(sentences: list[str], words: dict[str, str], rng: random.Random, config: MiniConfig) -> list[str]:
    """The sentences, sometimes with an irrelevant one among them."""
    if rng.random() >= config.math_distractors:
        return sentences
    place = between(rng, 1, len(sentences))
    beside = pick(rng, BESIDE).format(n=between(rng, LEAST, 99), **words)
    return [*sentences[:place], beside, *sentences[place:]]


def _people(rng: random.Random, count: int) -> list[Person]:
    """Draw distinct people."""
    found: dict[Person, None] = {}
    while len(found) < count:
        found[pick(rng, PEOPLE)] = None
    return list(found)


def _words(rng: random.Random, person: Person, other: Person) -> dict[str, str]:
    things, others = pick(rng, THINGS), pick(rng, THINGS)
    while others == things:
        others = pick(rng, THINGS)
    return {**person.words, "other": other.name, "things": things, "others": others}
