"""HumanEval, 0-shot: the body of a Python function from its docstring, executed against its tests."""

from __future__ import annotations

from pathlib import Path

from freda.eval.tasks.code import FUNCTION_STOPS, executed, humaneval_program
from freda.eval.tasks.task import Example, Task, gold, json_rows

FIELDS = ("task_id", "prompt", "canonical_solution", "test", "entry_point")


def load(folder: Path, expected: int) -> list[Example]:
    """The prompts as published."""
    rows = json_rows(folder / "humaneval" / "HumanEval.jsonl.gz", FIELDS, expected)
    return [Example(row["task_id"], row["prompt"], row["canonical_solution"], row) for row in rows]


HUMANEVAL = Task(
    name="humaneval",
    kind="coding",
    rows=164,
    checksum="1f089a3df8fcb544",
    stops=FUNCTION_STOPS,
    max_new_tokens=1024,
    load=load,
    grade_all=executed(humaneval_program),
    reference=gold,
)
