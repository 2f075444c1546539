"""MBPP, 3-shot: short Python programs from a sentence and their tests, executed against all of them.

The questions are rows 11 to 510 of the published file, the exemplars rows 2, 3 and 4, as its authors have it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from freda.errors import require
from freda.eval.tasks.code import executed, mbpp_program
from freda.eval.tasks.task import Example, Task, gold, json_rows

EXEMPLARS, QUESTIONS = (2, 3, 4), range(11, 511)
FIELDS = ("task_id", "text", "code", "test_list", "test_setup_code")


def load(folder: Path, expected: int) -> list[Example]:
    """The test questions behind three exemplars."""
    path = folder / "mbpp" / "mbpp.jsonl"
    by_id = {row["task_id"]: row for row in json_rows(path, FIELDS, expected)}
    missing = next((number for number in EXEMPLARS if number not in by_id), None)
    require(missing is None, f"{path} has no row with task_id {missing}, an exemplar; get the whole file")
    head = "".join(f"{_prompt(by_id[number])}{by_id[number]['code']}\n[DONE]\n\n" for number in EXEMPLARS)
    chosen = [by_id[number] for number in QUESTIONS if number in by_id]
    return [Example(f"mbpp/{row['task_id']}", head + _prompt(row), row["code"], row) for row in chosen]


def _prompt(row: dict[str, Any]) -> str:
    tests = "\n".join(row["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


MBPP = Task(
    name="mbpp",
    kind="coding",
    rows=974,
    checksum="2fef9268a8822aa8",
    shots=len(EXEMPLARS),
    stops=("[DONE]", "\nYou are"),
    max_new_tokens=512,
    load=load,
    grade_all=executed(mbpp_program),
    reference=gold,
)
