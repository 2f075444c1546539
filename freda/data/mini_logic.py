"""Deductions with four options: people in order, things inside of things, and things that change hands.

The letter comes right behind the question, to be chosen by likelihood; in training documents the reason follows it. The
content is the little world that is told: whatever is asked about it, in whatever order its facts come, a world is in
one split. The right letter is drawn evenly.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from freda.config import MiniConfig
from freda.data.mini_item import Item
from freda.data.mini_math import PEOPLE
from freda.data.synthetic import between, pick

T = TypeVar("T")
LETTERS = ("A", "B", "C", "D")
NAMES = tuple(person.name for person in PEOPLE)
COMPARATIVES = (
    ("taller", "shorter", "tallest", "shortest"),
    ("older", "younger", "oldest", "youngest"),
    ("faster", "slower", "fastest", "slowest"),
    ("richer", "poorer", "richest", "poorest"),
    ("stronger", "weaker", "strongest", "weakest"),
    ("louder", "quieter", "loudest", "quietest"),
)
RANKS = ("", "second ", "third ")
OBJECTS = ("coin", "key", "ring", "pen", "card", "stamp", "shell", "bead", "ticket", "button", "nut", "stone")
COLOURS = ("red", "blue", "green", "black", "white", "yellow")
LEVELS = (  # each of them is inside of one of the next
    tuple(f"the {thing}" for thing in OBJECTS),
    *(tuple(f"the {colour} {name}" for colour in COLOURS) for name in ("cup", "box", "bag", "chest")),
    tuple(f"the {name}" for name in ("kitchen", "hall", "cellar", "attic", "garage", "study")),
    *(tuple(f"the {colour} {name}" for colour in COLOURS) for name in ("house",)),
)
MOST_HOPS = len(LEVELS) - 1
INSIDE = ("{Inner} is in {outer}.", "{Outer} holds {inner}.", "Inside {outer} is {inner}.")
WHERE = ("Where is {thing} in the end?", "Which of these holds {thing}?", "{Thing} is somewhere inside what?")
HAS = ("{name} has {thing}.", "{Thing} belongs to {name}.", "{name} starts with {thing}.")
SWAPS = ("{one} and {two} swap.", "{one} swaps with {two}.", "Then {one} and {two} exchange what they have.")


class World(NamedTuple):
    """What is true: `people` or chains of things by rank, and for `swap` who swaps with whom."""

    family: str
    hops: int
    parts: tuple[tuple[str, ...], ...]
    swaps: tuple[tuple[int, int], ...]  # pairs of places in the first part

    @property
    def key(self) -> str:
        """The world, however it is told: an order from either end, chains and owners in any order."""
        if self.family == "order":
            return "order " + " ".join(min(self.parts[0], self.parts[0][::-1]))
        if self.family == "inside":
            return "inside " + "; ".join(sorted(" ".join(chain) for chain in self.parts))
        names, things = self.parts
        pairs = [tuple(sorted((names[one], names[two]))) for one, two in self.swaps]
        start = sorted(f"{name} {thing}" for name, thing in zip(names, things, strict=True))
        return "swap " + "; ".join([*start, *(" ".join(pair) for pair in _in_normal_order(pairs))])


def _in_normal_order(pairs: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Swaps next to each other that share nobody may come in either order: the smaller first."""
    ordered, changed = list(pairs), True
    while changed:
        changed = False
        for place in range(len(ordered) - 1):
            one, two = ordered[place : place + 2]
            if two < one and not set(one) & set(two):
                ordered[place : place + 2] = [two, one]
                changed = True
    return ordered


def draw(rng: random.Random, config: MiniConfig) -> World:
    """A world of one of the three families."""
    family, hops = pick(rng, ("order", "inside", "swap")), between(rng, config.logic_hops_from, config.logic_hops_to)
    if family == "order":
        return World(family, hops, (_some(rng, NAMES, max(4, hops + 2)),), ())
    if family == "inside":
        levels = (LEVELS[0], *LEVELS[-hops:])
        return World(family, hops, tuple(zip(*(_some(rng, level, 4) for level in levels), strict=True)), ())
    names, things = _some(rng, NAMES, 4), _some(rng, LEVELS[0], 4)
    swaps = list[tuple[int, int]]()
    while len(swaps) < hops:
        one, two = _some(rng, range(4), 2)
        if not swaps or {one, two} != set(swaps[-1]):  # or it would undo the last one
            swaps.append((one, two))
    return World(family, hops, (names, things), tuple(swaps))


def told(content: World, rng: random.Random, config: MiniConfig) -> Item:
    """Facts and question, four options, the letter and its reason."""
    tell = {"order": _order, "inside": _inside, "swap": _swap}[content.family]
    text, right, others, reason = tell(content, rng)
    letter = between(rng, 0, 3)
    options = list(_some(rng, [other for other in others if other != right], 3))
    options.insert(letter, right)
    lines = "\n".join(f"{name}. {option}" for name, option in zip(LETTERS, options, strict=True))
    solution = f" {LETTERS[letter]}\n{reason}"
    return Item(f"{text}\n{lines}\nAnswer:", solution, LETTERS[letter], content.key, content.hops, content.family)


Told = tuple[str, str, Sequence[str], str]  # facts and question, right answer, what else could be, reason


def _order(content: World, rng: random.Random) -> Told:
    people, (more, less, most, least) = content.parts[0], pick(rng, COMPARATIVES)
    facts = []
    for upper, lower in itertools.pairwise(people):
        facts.append(f"{upper} is {more} than {lower}." if rng.random() < 0.5 else f"{lower} is {less} than {upper}.")
    rank = between(rng, 0, min(len(RANKS), len(people) // 2) - 1)
    from_top = rng.random() < 0.5
    right = people[rank] if from_top else people[-1 - rank]
    question = f"Who is the {RANKS[rank]}{most if from_top else least}?"
    reason = f"From {most} to {least}: {', '.join(people)}."
    return " ".join([*_some(rng, facts, len(facts)), question]), right, people, reason


def _inside(content: World, rng: random.Random) -> Told:
    facts = []
    for chain in content.parts:
        for inner, outer in itertools.pairwise(chain):
            words = {"inner": inner, "outer": outer, "Inner": _capital(inner), "Outer": _capital(outer)}
            facts.append(pick(rng, INSIDE).format(**words))
    asked = pick(rng, content.parts)
    question = pick(rng, WHERE).format(thing=asked[0], Thing=_capital(asked[0]))
    links = [f"{inner} is in {outer}" for inner, outer in itertools.pairwise(asked)]
    text = " ".join([*_some(rng, facts, len(facts)), question])
    return text, asked[-1], [chain[-1] for chain in content.parts], f"{_capital(', '.join(links))}."


def _swap(content: World, rng: random.Random) -> Told:
    names, things = content.parts
    facts = [
        pick(rng, HAS).format(name=name, thing=thing, Thing=_capital(thing))
        for name, thing in zip(names, things, strict=True)
    ]
    told, reasons, held = list(_some(rng, facts, 4)), [], list(things)
    for one, two in content.swaps:
        told.append(pick(rng, SWAPS).format(one=names[one], two=names[two]))
        held[one], held[two] = held[two], held[one]
        reasons.append(f"{names[one]} gets {held[one]}, {names[two]} gets {held[two]}.")
    asked = between(rng, 0, 3)
    if rng.random() < 0.5:
        question, right, others = f"Who has {held[asked]} now?", names[asked], names
    else:
        question, right, others = f"What does {names[asked]} have now?", held[asked], tuple(things)
    return " ".join([*told, question]), right, others, f"{' '.join(reasons)} {names[asked]} has {held[asked]}."


def _some(rng: random.Random, options: Sequence[T], count: int) -> tuple[T, ...]:
    """Different ones, in random order."""
    left = list(options)
    return tuple(left.pop(between(rng, 0, len(left) - 1)) for _ in range(count))


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]
