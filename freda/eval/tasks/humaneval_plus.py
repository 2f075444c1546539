"""HumanEval+, 0-shot: HumanEval's questions with many more inputs, compared with the reference's outputs.

From `HumanEvalPlus.jsonl.gz` (inputs and reference). The other published form, with test code, has a broken test for
HumanEval/32, which no answer can pass.
"""

from __future__ import annotations

from pathlib import Path

from freda.eval.tasks.code import FUNCTION_STOPS, executed, humanevalplus_program
from freda.eval.tasks.task import Example, Task, gold, json_rows

FIELDS = ("task_id", "prompt", "canonical_solution", "entry_point", "base_input", "plus_input", "atol")


def load(folder: Path, expected: int) -> list[Example]:
    """The prompts as published."""
    rows = json_rows(folder / "humanevalplus" / "HumanEvalPlus.jsonl.gz", FIELDS, expected)
    return [Example(row["task_id"], row["prompt"], row["canonical_solution"], row) for row in rows]


HUMANEVAL_PLUS = Task(
    name="humaneval_plus",
    kind="coding",
    rows=164,
    checksum="cfd6bda12614db7f",
    stops=FUNCTION_STOPS,
    max_new_tokens=1024,
    load=load,
    grade_all=executed(humanevalplus_program),
    reference=gold,
)
