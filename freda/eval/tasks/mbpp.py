"""MBPP, 3-shot: short Python programs from a sentence and one of their tests, executed against all of them.

The questions are rows 11 to 510 of the published file, the exemplars rows 2, 3 and 4, as its authors have it. A prompt
shows the sentence and the tests that the program must pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freda.errors import FredaError
from freda.eval.code import mbpp_program
from freda.eval.tasks.humaneval import executed
from freda.eval.tasks.task import Example, Graded, Kind, check_rows, json_rows

NAME = "mbpp"
KIND: Kind = "coding"
CHECKSUM = "2fef9268a8822aa8"
ROWS = 974
SHOTS = 3
STOPS = ("[DONE]", "\nYou are")
MAX_NEW_TOKENS = 512
CHOICES: tuple[str, ...] = ()

EXEMPLARS, QUESTIONS = (2, 3, 4), range(11, 511)


def load(folder: Path) -> list[Example]:
    """The test questions behind three worked ones."""
    path = folder / "mbpp" / "mbpp.jsonl"
    rows = json_rows(path, ("task_id", "text", "code", "test_list", "test_setup_code"))
    check_rows(path, rows, ROWS)
    by_id = {row["task_id"]: row for row in rows}
    missing = [number for number in EXEMPLARS if number not in by_id]
    if missing:
        raise FredaError(f"{path} has no row with task_id {missing[0]}, a worked example; get the whole file")
    head = "".join(f"{_asked(by_id[number])}{by_id[number]['code']}\n[DONE]\n\n" for number in EXEMPLARS)
    chosen = [by_id[number] for number in QUESTIONS if number in by_id]
    return [Example(f"mbpp/{row['task_id']}", head + _asked(row), row["code"], row) for row in chosen]


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Run every program, cut at its end mark, against the row's tests."""
    return executed(mbpp_program, examples, texts, STOPS)


def reference(example: Example) -> str:
    """The published program."""
    return example.gold


def _asked(row: dict[str, Any]) -> str:
    tests = "\n".join(row["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )
