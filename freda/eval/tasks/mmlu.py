"""MMLU, 5-shot: 57 subjects, four options, the letter chosen by likelihood.

The exemplars are the five questions of each subject's dev file, in its order.
"""

from __future__ import annotations

from pathlib import Path

from freda.errors import require
from freda.eval.tasks.letters import CHOICES, LETTERS, grade_letter, heading, right_letter, with_options
from freda.eval.tasks.task import Example, Task, check_rows, csv_rows, found, one_by_one

SHOTS = 5


def load(folder: Path, expected: int) -> list[Example]:
    """The test questions of all subjects in alphabetical order, each behind its subject's five."""
    examples = []
    for path in sorted(found(folder / "mmlu" / "test").glob("*_test.csv")):
        subject = path.name.removesuffix("_test.csv")
        dev = _questions(folder / "mmlu" / "dev" / f"{subject}_dev.csv")[:SHOTS]
        head = heading(subject.replace("_", " "), [(with_options(row[0], row[1:5]), row[5]) for row in dev])
        for number, row in enumerate(_questions(path)):
            values = dict(zip(("question", *LETTERS, "answer"), row, strict=True))
            prompt = head + with_options(row[0], row[1:5])
            examples.append(Example(f"mmlu/{subject}/{number}", prompt, row[5], values, subject))
    check_rows(folder / "mmlu" / "test", examples, expected)
    return examples


def _questions(path: Path) -> list[list[str]]:
    rows = csv_rows(path)
    odd = next((n for n, row in enumerate(rows, start=1) if len(row) != 6 or row[5] not in tuple(LETTERS)), None)
    require(odd is None, f"{path}: question {odd} is not a question, four options and a letter; get the file again")
    return rows


MMLU = Task(
    name="mmlu",
    kind="knowledge",
    rows=14042,
    checksum="81bdc382b3a0aafd",
    shots=SHOTS,
    choices=CHOICES,
    load=load,
    grade_all=one_by_one(grade_letter),
    reference=right_letter,
)
