"""GPQA-Diamond, 5-shot: graduate questions in science, four options, the letter chosen by likelihood.

The first five rows are the exemplars and the other 193 are scored (the paper's loader). The published rows name the
right answer first; the options are put in an order drawn from the row's number, the same in every run. The authors ask
that the questions stay out of plain text on the net: the file is yours to get, `gpqa/gpqa_diamond.csv`.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

from freda.errors import FredaError
from freda.eval.tasks.mmlu import CHOICES, grade_all, reference
from freda.eval.tasks.task import Example, Kind, check_rows

__all__ = [
    "CHECKSUM",
    "CHOICES",
    "KIND",
    "MAX_NEW_TOKENS",
    "NAME",
    "ROWS",
    "SHOTS",
    "STOPS",
    "grade_all",
    "load",
    "reference",
]

NAME = "gpqa_diamond"
KIND: Kind = "knowledge"
CHECKSUM = ""  # the questions are not public
ROWS = 198
SHOTS = 5
STOPS: tuple[str, ...] = ()
MAX_NEW_TOKENS = 1

COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def load(folder: Path) -> list[Example]:
    """All rows but the first five, each behind those five."""
    path = folder / "gpqa" / "gpqa_diamond.csv"
    try:
        with open(path, encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FredaError(
            f"cannot read {path} ({error}); get it from its authors and name the folder with --data"
        ) from None
    check_rows(path, rows, ROWS)
    missing = next((column for column in COLUMNS if column not in rows[0]), None)
    if missing is not None:
        raise FredaError(f"{path} has no column {missing!r}; it has {', '.join(rows[0])}")
    empty = next((number for number, row in enumerate(rows, start=1) if not all(row[name] for name in COLUMNS)), 0)
    if empty:
        raise FredaError(f"{path}: question {empty} is not a question and four answers; get the file again")
    asked = [_asked(row, number) for number, row in enumerate(rows)]
    head = "The following are multiple choice questions (with answers) about science.\n\n"
    head += "".join(f"{text} {letter}\n\n" for text, letter in asked[:SHOTS])
    return [
        Example(f"gpqa_diamond/{number}", head + text, letter, rows[number])
        for number, (text, letter) in enumerate(asked)
        if number >= SHOTS
    ]


def _asked(row: dict[str, str], number: int) -> tuple[str, str]:
    """The question with its options in a fixed random order, and the letter of the right one."""
    order = list(range(4))
    random.Random(number).shuffle(order)
    options = [row[COLUMNS[1 + place]].strip() for place in order]
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip("ABCD", options, strict=True))
    return f"{row['Question'].strip()}\n{lines}\nAnswer:", "ABCD"[order.index(0)]
