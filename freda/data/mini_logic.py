"""Deductions with four answers, A to D: things inside of things, people with people, things that change places, walks.

The letters are the places of the story, and the answer is a sentence that ends in one, to be chosen by likelihood. What
is meant to make that learnable for a small model (LOG.md): there is no list of options in which a letter has to be
looked up; facts are two words long, and the answer repeats those of the fact that it follows from; in training
documents further conclusions from the same facts come behind it; and most of them are lessons, worlds of fewer things,
down to one, with letters as they come and conclusions that repeat. Where one letter is more frequent, looking at
letters pays, and where there are few things, looking for the right one does, before either is done well.

In the worlds of tests every letter ends as many chains, or the most frequent one would be a good guess, and holds two
things or people at least, or a conclusion could be told from the letters that are left. The content is the little world
that is told: whatever is asked about it, in whatever order its facts come, a world is in one split.

A walk goes around four places in a circle and says now and then where it is. Nothing has to be looked up but the last
place said; what is hard is to put the moves since then together, in one forward. Most of them are lessons too, with one
move more frequent than others, and more often alone: with all as frequent, neither the last place nor the last move
says anything about the next place, but both together do, and even single moves were not learned (LOG.md).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from freda.data.config import MiniConfig
from freda.data.mini_item import Item
from freda.data.mini_math import PEOPLE
from freda.data.synthetic import between, pick

T = TypeVar("T")
LETTERS = ("A", "B", "C", "D")
FACTS = "Facts:"
WALK = "Walk from"  # around a circle: A, B, C, D and A again
CHAINS, SHORT_CHAINS = 4, 8  # of several things or people, of one; lessons have fewer
LESSONS = 0.7  # share of worlds and of walks
NAMES = tuple(person.name for person in PEOPLE)
LEVELS = (  # each of them is inside of one of the next, the last ones in places
    ("coin", "key", "ring", "pen", "card", "stamp", "shell", "bead", "ticket", "button", "nut", "stone"),
    ("cup", "jar", "mug", "tin", "bowl", "vase"),
    ("box", "bag", "sack", "case", "basket", "bucket"),
    ("chest", "drawer", "trunk", "cupboard", "locker", "safe"),
    ("corner", "closet", "cabinet", "niche", "alcove", "chamber"),
    ("kitchen", "hall", "cellar", "attic", "garage", "study"),
)


FAMILIES = ("inside", "with", "swap", *["walk"] * 3)  # things, people, things whose places swap; half are walks
MOVES = ("left", "right", "across")  # by 1, 3 and 2 places around the circle
SHIFTS = (1, 3, 2)
MOVES_A_HOP = 4  # at most: a move is easier than a look-up
FAVOURED, SINGLE = 0.8, 0.5  # of the moves of a lesson are the same; of its rounds are one move
STOPS = (5, 8)  # of a walk, fewest and most, the one that is asked for included


class World(NamedTuple):
    """What is true: chains of things or people with the letter each ends in, and for `swap` which places swap."""

    family: str
    hops: int
    chains: tuple[tuple[str, ...], ...]
    letters: tuple[int, ...]
    swaps: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        """The world, however it is told: chains in any order, swaps that share nothing too."""
        family = "inside" if self.family == "swap" and not self.swaps else self.family
        chains = sorted(" ".join((*chain, LETTERS[letter])) for chain, letter in self.ends)
        pairs = _in_normal_order([(min(pair), max(pair)) for pair in self.swaps])
        return f"{family} {'; '.join([*chains, *(f'{one} {two}' for one, two in pairs)])}"

    @property
    def lesson(self) -> bool:
        """Fewer chains than a test has, or some letter more often than another?"""
        return sorted(self.letters) != sorted(_evenly(SHORT_CHAINS if len(self.chains[0]) == 1 else CHAINS))

    @property
    def ends(self) -> list[tuple[tuple[str, ...], int]]:
        """Every chain with its letter."""
        return list(zip(self.chains, self.letters, strict=True))


class Walk(NamedTuple):
    """A first place, and the moves between the places that are said; the last of those is asked for."""

    start: int
    rounds: tuple[tuple[int, ...], ...]
    lesson: bool

    @property
    def key(self) -> str:
        """Where it begins and all its moves, whatever is said on the way."""
        return f"walk {LETTERS[self.start]} {' '.join(MOVES[move] for moves in self.rounds for move in moves)}"

    @property
    def places(self) -> list[str]:
        """The letter after each round."""
        turns = (sum(SHIFTS[move] for move in moves) for moves in self.rounds)
        totals = itertools.accumulate(turns, initial=self.start)
        return [LETTERS[total % len(LETTERS)] for total in totals][1:]


def _evenly(count: int) -> list[int]:
    """So many letters, each as often."""
    return [place % len(LETTERS) for place in range(count)]


def _in_normal_order(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Swaps next to each other that share nothing may come in either order: the smaller first."""
    ordered, changed = list(pairs), True
    while changed:
        changed = False
        for place in range(len(ordered) - 1):
            one, two = ordered[place : place + 2]
            if two < one and not set(one) & set(two):
                ordered[place : place + 2] = [two, one]
                changed = True
    return ordered


def draw(rng: random.Random, config: MiniConfig) -> World | Walk:
    """A world of one of three families, or a walk."""
    family = pick(rng, FAMILIES)
    return _draw_walk(rng, config) if family == "walk" else _draw_world(rng, config, family)


def _draw_walk(rng: random.Random, config: MiniConfig) -> Walk:
    lesson, favourite = rng.random() < LESSONS, between(rng, 0, len(MOVES) - 1)

    def moves() -> tuple[int, ...]:
        count = between(rng, config.logic_hops_from, MOVES_A_HOP * config.logic_hops_to)
        if lesson and rng.random() < SINGLE:
            count = 1
        return tuple(
            favourite if lesson and rng.random() < FAVOURED else between(rng, 0, len(MOVES) - 1) for _ in range(count)
        )

    start = between(rng, 0, len(LETTERS) - 1)
    return Walk(start, tuple(moves() for _ in range(between(rng, *STOPS))), lesson)


def _draw_world(rng: random.Random, config: MiniConfig, family: str) -> World:
    hops = between(rng, config.logic_hops_from, config.logic_hops_to)
    count = SHORT_CHAINS if hops == 1 or family == "swap" else CHAINS
    letters = _some(rng, _evenly(count), count)
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
    while len(swaps) < hops - 1:  # to know where a thing was at first is a hop, too
        one, two = _some(rng, range(len(LETTERS)), 2)
        if not swaps or {one, two} != set(swaps[-1]):  # or it would undo the last one
            swaps.append((one, two))
    return World(family, hops, tuple((thing,) for thing in _some(rng, LEVELS[0], count)), letters, tuple(swaps))


def told(content: World | Walk, rng: random.Random, config: MiniConfig) -> Item:
    """The content in words, with its solution."""
    return _told_walk(content) if isinstance(content, Walk) else _told_world(content, rng, config)


def _told_walk(walk: Walk) -> Item:
    """The first place; then moves, and where they lead. Before a letter come three words that are always the same, as
    before the letter of any question with options: a block of four that has the letter has no move before it."""
    rounds = [" ".join(MOVES[move] for move in moves) for moves in walk.rounds]
    *said, answer = walk.places
    known = [f"{moves}, now at {place}." for moves, place in zip(rounds, said, strict=False)]
    prompt = " ".join([WALK, f"{LETTERS[walk.start]}.", *known, f"{rounds[-1]}, now at"])
    return Item(prompt, f" {answer}.", answer, walk.key, len(walk.rounds[-1]), "walk", lesson=walk.lesson)


def _told_world(content: World, rng: random.Random, config: MiniConfig) -> Item:
    """Facts, a question over all the world's hops and its answer; then what else follows."""
    facts, conclusions = list[str](), list[tuple[str, str]]()  # about one thing or person, and the letter
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
    prompt = f"{story} Where is {one}?\nAnswer: {one}"  # letters in a question would be looked at too
    if content.lesson:  # said again and again: what was said a moment ago is the easiest to look up
        more = tuple(pick(rng, tuple(conclusions)) for _ in range(config.logic_conclusions - 1))
    else:
        conclusions.pop(first)
        more = _some(rng, conclusions, min(len(conclusions), config.logic_conclusions - 1))
    solution = "".join([f" {letter}.", *(f" {other} {its}." for other, its in more)])
    return Item(prompt, solution, letter, content.key, content.hops, content.family, lesson=content.lesson)


def _some(rng: random.Random, options: Sequence[T], count: int) -> tuple[T, ...]:
    """Different ones, in random order."""
    left = list(options)
    return tuple(left.pop(between(rng, 0, len(left) - 1)) for _ in range(count))
