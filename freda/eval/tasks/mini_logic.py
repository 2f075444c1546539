"""Logic of the mini suite: held-out deductions with four options, the letter chosen by likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freda.data.mini_logic import LETTERS
from freda.eval.tasks import mmlu
from freda.eval.tasks.mini_math import asked
from freda.eval.tasks.task import Example, Graded, Kind

NAME = "mini_logic"
KIND: Kind = "knowledge"
ROWS = 2000
CHECKSUM = ""  # it depends on the corpus
SHOTS = 0
STOPS: tuple[str, ...] = ()
MAX_NEW_TOKENS = 1
CHOICES = tuple(f" {letter}" for letter in LETTERS)


def load(folder: Path) -> list[Example]:
    """The first deductions of the test split, each about a world of its own."""
    return [
        Example(f"{NAME}/{number}", item.prompt, item.answer, {"family": item.family}, f"{item.family} {item.level}")
        for number, item in enumerate(asked("mini_logic", folder, ROWS))
    ]


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Every letter by itself."""
    return mmlu.grade_all(examples, texts)


def reference(example: Example) -> str:
    """The right letter."""
    return mmlu.reference(example)
