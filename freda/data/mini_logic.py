"""Deductions with four answers, A to D: things inside of things, people with people, things that swap places, walks.

The letters are the places of the story. The answer is a sentence that ends in a letter, chosen by likelihood. What
makes this learnable for a small model (LOG.md): no list of options in which a letter has to be looked up; facts of two
words, which the answer repeats; documents that continue with further conclusions from the same facts; and mostly
lessons: worlds of fewer things, down to one, with letters drawn freely and conclusions that repeat. Where one letter is
more frequent, attending to letters pays off early, and where there are few things, so does looking for the right one.

In the worlds of tests every letter ends equally many chains, or the most frequent one would be a good guess, and holds
at least two things or people, or a conclusion could be guessed from the letters that are left. The content is the
world: whatever is asked about it, and in whatever order its facts come, a world is in one split.

A walk goes around a circle of four places and says now and then where it is: the hard part is to combine the moves
since then in one forward. Most walks are lessons too, in which one move is more frequent and often stands alone: with
equally frequent moves, not even single ones were learned (LOG.md).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from freda.data.config import MiniConfig
from freda.data.mini_math import PEOPLE
from freda.data.synthetic import Item, between, pick

T = TypeVar("T")
LETTERS = ("A", "B", "C", "D")
FACTS = "Facts:"
WALK = "Walk from"  # around a circle: A, B, C, D and A again
CHAINS, SHORT_CHAINS = 4, 8  # chains in a world: of several things or people each, of one each; lessons have fewer
LESSONS = 0.7  # share of worlds and of walks that are lessons
NAMES = tuple(person.name for person in PEOPLE)
LEVELS = (  # each thing is inside one of the next level, those of the last level in places
    ("coin", "key", "ring", "pen", "card", "stamp", "shell", "bead", "ticket", "button", "nut", "stone"),
    ("cup", "jar", "mug", "tin", "bowl", "vase"),
    ("box", "bag", "sack", "case", "basket", "bucket"),
    ("chest", "drawer", "trunk", "cupboard", "locker", "safe"),
    ("corner", "closet", "cabinet", "niche", "alcove", "chamber"),
    ("kitchen", "hall", "cellar", "attic", "garage", "study"),
)
FAMILIES = ("inside", "with", "swap", *["walk"] * 3)  # things, people, things whose places swap; half are walks
MOVES, SHIFTS = ("left", "right", "across"), (1, 3, 2)  # by so many places around the circle
MOVES_A_HOP = 4  # most moves per hop: a move is easier than a look-up
FAVOURED, SINGLE = 0.8, 0.5  # in a lesson: share of moves that are the same, share of rounds of one move
STOPS = (5, 8)  # rounds of a walk, fewest and most, with the one that is asked for


class World(NamedTuple):
    """A little world: chains of things or people with the letter each ends in, and for `swap` which places swap."""

    family: str
    hops: int
    chains: tuple[tuple[str, ...], ...]
    letters: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        """The world regardless of the order of its chains, and of swaps that share no place."""
        family = "inside" if self.family == "swap" and not self.swaps else self.family
        chains = sorted(" ".join((*chain, LETTERS[letter])) for chain, letter in self.ends)
        pairs = _in_normal_order([(min(pair), max(pair)) for pair in self.swaps])
        return f"{family} {'; '.join([*chains, *(f'{one} {two}' for one, two in pairs)])}"

    @property
    def lesson(self) -> bool:
        """Whether it has fewer chains than a world of a test, or some letter more often than another."""
        times = (SHORT_CHAINS if len(self.chains[0]) == 1 else CHAINS) // len(LETTERS)
        return any(self.letters.count(letter) != times for letter in range(len(LETTERS)))

    @property
    def ends(self) -> list[tuple[tuple[str, ...], int]]:
        """Pairs of a chain and its letter."""
        return list(zip(self.chains, self.letters, strict=True))


class Walk(NamedTuple):
    """A first place, and the moves between the places that are mentioned; the last place is asked for."""

    start: int
    rounds: tuple[tuple[int, ...], ...]
    lesson: bool

    @property
    def key(self) -> str:
        """The start and all moves, whatever places are mentioned on the way."""
        return f"walk {LETTERS[self.start]} {' '.join(MOVES[move] for moves in self.rounds for move in moves)}"

    @property
    def places(self) -> list[str]:
        """The letter after each round."""
        turns = (sum(SHIFTS[move] for move in moves) for moves in self.rounds)
        totals = itertools.accumulate(turns, initial=self.start)
        return [LETTERS[total % len(LETTERS)] for total in totals][1:]


def _in_normal_order(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Order neighbouring swaps that share no place, the smaller first: they may come in either order."""
    for place, (one, two) in enumerate(itertools.pairwise(pairs)):
        if two < one and not set(one) & set(two):
            return _in_normal_order([*pairs[:place], two, one, *pairs[place + 2 :]])
    return pairs


def draw(rng: random.Random, config: MiniConfig) -> World | Walk:
    """Draw a world of one of three families, or a walk."""
    family = pick(rng, FAMILIES)
    if family != "walk":
        return _draw_world(rng, config, family)
    lesson, favourite = rng.random() < LESSONS, between(rng, 0, len(MOVES) - 1)

    def moves() -> tuple[int, ...]:
        count = between(rng, config.logic_hops_from, MOVES_A_HOP * config.logic_hops_to)
        if lesson and rng.random() < SINGLE:
            count = 1
        favoured = (lesson and rng.random() < FAVOURED for _ in range(count))
        return tuple(favourite if one else between(rng, 0, len(MOVES) - 1) for one in favoured)

    start = between(rng, 0, len(LETTERS) - 1)
    return Walk(start, tuple(moves() for _ in range(between(rng, *STOPS))), lesson)


def _draw_world(rng: random.Random, config: MiniConfig, family: str) -> World:
    hops = between(rng, config.logic_hops_from, config.logic_hops_to)
    count = SHORT_CHAINS if hops == 1 or family == "swap" else CHAINS
    letters = _some(rng, [place % len(LETTERS) for place in range(count)], count)  # each equally often
    if rng.random() < LESSONS:
        count = between(rng, 1, count)
        letters = tuple(between(rng, 0, len(LETTERS) - 1) for _ in range(count))
    if family == "inside":
        chains = zip(*(_some(rng, level, count) for level in LEVELS[:hops]), strict=True)
        return World(family, hops, tuple(chains), letters)
    if family == "with":
        names = _some(rng, NAMES, count * hops)
        return World(family, hops, tuple(names[first::count] for first in range(count)), letters)
    swaps = list[tuple[int, int]]()
    while len(swaps) < hops - 1:  # to look up where a thing was at first is a hop, too
        one, two = _some(rng, range(len(LETTERS)), 2)
        if not swaps or {one, two} != set(swaps[-1]):  # or it would undo the last one
            swaps.append((one, two))
    return World(family, hops, tuple((thing,) for thing in _some(rng, LEVELS[0], count)), letters, tuple(swaps))


def _told_walk(walk: Walk) -> Item:
    """Tell the first place, then moves and where they lead. Three constant words stand before a letter, so that a block
    of four tokens with the letter contains no move."""
    rounds = [" ".join(MOVES[move] for move in moves) for moves in walk.rounds]
    *said, answer = walk.places
    known = [f"{moves}, now at {place}." for moves, place in zip(rounds, said, strict=False)]
    prompt = " ".join([WALK, f"{LETTERS[walk.start]}.", *known, f"{rounds[-1]}, now at"])
    return Item(prompt, f" {answer}.", answer, walk.key, len(walk.rounds[-1]), "walk", lesson=walk.lesson)


def told(content: World | Walk, rng: random.Random, config: MiniConfig) -> Item:
    """Tell the facts, a question over all hops of the world and its answer, then further conclusions; or a walk."""
    if isinstance(content, Walk):
        return _told_walk(content)
    facts, conclusions = list[str](), list[tuple[str, str]]()  # a conclusion is a thing or person, and its letter
    for chain, place in content.ends:
        facts.extend(f" {one} {two}." for one, two in itertools.pairwise((*chain, LETTERS[place])))
        end = place
        for pair in content.swaps:
            end = sum(pair) - end if end in pair else end
        conclusions.extend((one, LETTERS[end]) for one in chain)
    swaps = [f" Swap {LETTERS[one]} and {LETTERS[two]}." for one, two in content.swaps]
    first = len(content.chains[0]) * between(rng, 0, len(content.chains) - 1)  # of a chain: all its hops
    one, letter = conclusions[first]
    story = "".join([FACTS, *_some(rng, facts, len(facts)), *swaps])
    prompt = f"{story} Where is {one}?\nAnswer: {one}"  # letters in a question would attract attention too
    if content.lesson:  # repeated: what was said a moment ago is the easiest to look up
        more = tuple(pick(rng, tuple(conclusions)) for _ in range(config.logic_conclusions - 1))
    else:
        conclusions.pop(first)
        more = _some(rng, conclusions, min(len(conclusions), config.logic_conclusions - 1))
    solution = "".join([f" {letter}.", *(f" {other} {its}." for other, its in more)])
    return Item(prompt, solution, letter, content.key, content.hops, content.family, lesson=content.lesson)


def _some(rng: random.Random, options: Sequence[T], count: int) -> tuple[T, ...]:
    """`count` distinct options in random order."""
    left = list(options)
    return tuple(left.pop(between(rng, 0, len(left) - 1)) for _ in range(count))
