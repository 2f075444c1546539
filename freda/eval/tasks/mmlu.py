"""MMLU, 5-shot: 57 subjects, four options, the letter chosen by likelihood.

The exemplars are the five questions of each subject's dev file, in its order.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

from freda.errors import FredaError
from freda.eval.tasks.task import Example, Graded, Kind, check_rows

NAME = "mmlu"
KIND: Kind = "knowledge"
CHECKSUM = "81bdc382b3a0aafd"
ROWS = 14042
SUBJECTS = 57
SHOTS = 5
STOPS: tuple[str, ...] = ()
MAX_NEW_TOKENS = 1
LETTERS = ("A", "B", "C", "D")
CHOICES = tuple(f" {letter}" for letter in LETTERS)


def load(folder: Path) -> list[Example]:
    """The test questions of all subjects in alphabetical order, each behind its subject's five."""
    files = sorted((folder / "mmlu" / "test").glob("*_test.csv"))
    if len(files) != SUBJECTS:
        raise FredaError(f"{folder / 'mmlu' / 'test'} has {len(files)} subjects, MMLU {SUBJECTS}; get all files")
    examples = []
    for path in files:
        subject = path.name.removesuffix("_test.csv")
        shots = _questions(folder / "mmlu" / "dev" / f"{subject}_dev.csv")[:SHOTS]
        head = f"The following are multiple choice questions (with answers) about {subject.replace('_', ' ')}.\n\n"
        head += "".join(f"{_asked(row)} {row[5]}\n\n" for row in shots)
        for number, row in enumerate(_questions(path)):
            values = dict(zip(("question", "A", "B", "C", "D", "answer"), row, strict=True))
            examples.append(Example(f"mmlu/{subject}/{number}", head + _asked(row), row[5], values, subject))
    check_rows(folder / "mmlu" / "test", examples, ROWS)
    return examples


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Every text by itself."""
    return [grade(example, text) for example, text in zip(examples, texts, strict=True)]


def grade(example: Example, text: str) -> Graded:
    """Is the letter the right one?"""
    letter = text.strip()
    right = letter == example.gold
    return Graded(right, "right" if right else f"{letter} is not {example.gold}", letter)


def reference(example: Example) -> str:
    """The right letter."""
    return f" {example.gold}"


def _asked(row: list[str]) -> str:
    options = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", row[1:5], strict=True))
    return f"{row[0].strip()}\n{options}\nAnswer:"


def _questions(path: Path) -> list[list[str]]:
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FredaError(f"cannot read {path} ({error}); get the file again") from None
    for number, row in enumerate(rows, start=1):
        if len(row) != 6 or row[5] not in LETTERS:
            raise FredaError(f"{path}: question {number} is not a question, four options and a letter; get it again")
    return rows
