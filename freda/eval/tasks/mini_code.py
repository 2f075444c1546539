"""Code of the mini suite: the body of a small held-out Python function from its docstring, executed in the sandbox."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freda.data.mini_code import tests_of
from freda.eval.code import HUMANEVAL_STOPS, humaneval_program
from freda.eval.tasks.humaneval import executed
from freda.eval.tasks.mini_math import asked
from freda.eval.tasks.task import Example, Graded, Kind

NAME = "mini_code"
KIND: Kind = "coding"
ROWS = 2000
CHECKSUM = ""  # it depends on the corpus
SHOTS = 0
STOPS = HUMANEVAL_STOPS
MAX_NEW_TOKENS = 192
CHOICES: tuple[str, ...] = ()


def load(folder: Path) -> list[Example]:
    """The first functions of the test split, no two of which do the same."""
    examples = []
    for number, item in enumerate(asked("mini_code", folder, ROWS)):
        name = f"{NAME}/{number}"
        row = {"task_id": name, "prompt": item.prompt, "entry_point": item.entry_point, "test": tests_of(item)}
        examples.append(Example(name, item.prompt, item.answer, row, f"{item.family} {item.level}"))
    return examples


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Run every completion on all inputs of its tests."""
    return executed(humaneval_program, examples, texts)


def reference(example: Example) -> str:
    """The body that the docstring spells out."""
    return example.gold
