"""GPQA-Diamond, 5-shot: graduate questions in science, four options, the letter chosen by likelihood.

The first five rows are the exemplars and the other 193 are scored (the paper's loader). The published rows name the
right answer first; the options are put in a random order that depends on the row's number alone. The authors ask that
the questions stay out of plain text on the net, so their checksum is not known here.
"""

from __future__ import annotations

import random
from pathlib import Path

from freda.errors import require
from freda.eval.tasks.letters import CHOICES, LETTERS, grade_letter, heading, right_letter, with_options
from freda.eval.tasks.task import Example, Task, check_rows, csv_rows, one_by_one

SHOTS = 5
COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def load(folder: Path, expected: int) -> list[Example]:
    """All rows but the first five, each behind those five."""
    path = folder / "gpqa" / "gpqa_diamond.csv"
    names, *lines = csv_rows(path) or [[]]
    check_rows(path, lines, expected)
    missing = next((column for column in COLUMNS if column not in names), None)
    require(missing is None, f"{path} has no column {missing!r}; it has {', '.join(names)}")
    rows = [dict(zip(names, line, strict=False)) for line in lines]
    empty = next((number for number, row in enumerate(rows, start=1) if not all(map(row.get, COLUMNS))), None)
    require(empty is None, f"{path}: question {empty} is not a question and four answers; get the file again")
    asked = [_shuffled(row, number) for number, row in enumerate(rows)]
    head = heading("science", asked[:SHOTS])
    return [
        Example(f"gpqa_diamond/{number}", head + text, letter, rows[number])
        for number, (text, letter) in enumerate(asked)
        if number >= SHOTS
    ]


def _shuffled(row: dict[str, str], number: int) -> tuple[str, str]:
    """The question with its options in a fixed random order, and the letter of the right one."""
    order = list(range(4))
    random.Random(number).shuffle(order)
    options = [row[COLUMNS[1 + place]].strip() for place in order]
    return with_options(row["Question"], options), LETTERS[order.index(0)]


GPQA_DIAMOND = Task(
    name="gpqa_diamond",
    kind="knowledge",
    rows=198,
    shots=SHOTS,
    choices=CHOICES,
    load=load,
    grade_all=one_by_one(grade_letter),
    reference=right_letter,
)
