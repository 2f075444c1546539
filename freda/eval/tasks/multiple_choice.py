"""Questions with four options, answered by the most likely letter: MMLU and GPQA-Diamond, both 5-shot.

MMLU has 57 subjects; the exemplars are the five questions of each subject's dev file, in its order.

GPQA-Diamond asks graduate questions in science. The first five rows are the exemplars and the other 193 are scored (the
paper's loader). The options are in a random order that depends on the row's number alone. The authors ask that the
questions stay out of plain text on the net, so their checksum is not known here.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from freda.errors import require
from freda.eval.tasks.task import Example, Graded, Task, check_rows, compared_with_gold, csv_rows, found, one_by_one

SHOTS = 5
LETTERS = "ABCD"
CHOICES = tuple(f" {letter}" for letter in LETTERS)
GPQA_COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")


def load_mmlu(folder: Path, expected: int) -> list[Example]:
    """The test questions of all subjects in alphabetical order, each behind its subject's exemplars."""
    examples = []
    for path in sorted(found(folder / "mmlu" / "test").glob("*_test.csv")):
        subject = path.name.removesuffix("_test.csv")
        dev = _mmlu_rows(folder / "mmlu" / "dev" / f"{subject}_dev.csv")[:SHOTS]
        head = _heading(subject.replace("_", " "), [(_with_options(row[0], row[1:5]), row[5]) for row in dev])
        for number, row in enumerate(_mmlu_rows(path)):
            values = dict(zip(("question", *LETTERS, "answer"), row, strict=True))
            prompt = head + _with_options(row[0], row[1:5])
            examples.append(Example(f"mmlu/{subject}/{number}", prompt, row[5], values, subject))
    check_rows(folder / "mmlu" / "test", examples, expected)
    return examples


def _mmlu_rows(path: Path) -> list[list[str]]:
    rows = csv_rows(path)
    odd = next((n for n, row in enumerate(rows, start=1) if len(row) != 6 or row[5] not in tuple(LETTERS)), None)
    require(odd is None, f"{path}: question {odd} is not a question, four options and a letter; get the file again")
    return rows


def load_gpqa(folder: Path, expected: int) -> list[Example]:
    """All rows but the first five, each behind those five."""
    path = folder / "gpqa" / "gpqa_diamond.csv"
    names, *lines = csv_rows(path) or [[]]
    check_rows(path, lines, expected)
    missing = next((column for column in GPQA_COLUMNS if column not in names), None)
    require(missing is None, f"{path} has no column {missing!r}; it has {', '.join(names)}")
    rows = [dict(zip(names, line, strict=False)) for line in lines]
    empty = next((number for number, row in enumerate(rows, start=1) if not all(map(row.get, GPQA_COLUMNS))), None)
    require(empty is None, f"{path}: question {empty} is not a question and four answers; get the file again")
    asked = [_shuffled(row, number) for number, row in enumerate(rows)]
    head, left = _heading("science", asked[:SHOTS]), range(SHOTS, len(rows))
    return [Example(f"gpqa_diamond/{n}", head + asked[n][0], asked[n][1], rows[n]) for n in left]


def _shuffled(row: dict[str, str], number: int) -> tuple[str, str]:
    """The question with its options in a fixed random order, and the letter of the right one."""
    order = list(range(4))
    random.Random(number).shuffle(order)
    options = [row[GPQA_COLUMNS[1 + place]].strip() for place in order]
    return _with_options(row["Question"], options), LETTERS[order.index(0)]


def _with_options(question: str, options: Sequence[str]) -> str:
    """The question and its options, up to where the letter is to come."""
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=True))
    return f"{question.strip()}\n{lines}\nAnswer:"


def _heading(subject: str, solved: Sequence[tuple[str, str]]) -> str:
    """The beginning of a prompt: what the questions are about, and exemplars with their letters."""
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    return head + "".join(f"{question} {letter}\n\n" for question, letter in solved)


def grade_letter(example: Example, text: str) -> Graded:
    """Compare the letter with the right one."""
    return compared_with_gold(text.strip() == example.gold, text.strip(), example)


MMLU = Task(
    name="mmlu",
    kind="knowledge",
    rows=14042,
    checksum="81bdc382b3a0aafd",
    shots=SHOTS,
    choices=CHOICES,
    load=load_mmlu,
    grade_all=one_by_one(grade_letter),
    reference=lambda example: f" {example.gold}",  # as one of the choices
)
GPQA_DIAMOND = replace(MMLU, name="gpqa_diamond", rows=198, checksum="", load=load_gpqa)
