"""HumanEval+, 0-shot: HumanEval's questions with many more inputs, compared with the reference's outputs.

From `HumanEvalPlus.jsonl.gz` (inputs and reference). The other published form, with test code, has a broken test for
HumanEval/32, which no answer can pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freda.eval.code import humanevalplus_program
from freda.eval.tasks.humaneval import CHOICES, MAX_NEW_TOKENS, ROWS, SHOTS, STOPS, executed, reference
from freda.eval.tasks.task import Example, Graded, Kind, check_rows, json_rows

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

NAME = "humaneval_plus"
KIND: Kind = "coding"
CHECKSUM = "cfd6bda12614db7f"


def load(folder: Path) -> list[Example]:
    """The prompts as they are."""
    path = folder / "humanevalplus" / "HumanEvalPlus.jsonl.gz"
    fields = ("task_id", "prompt", "canonical_solution", "entry_point", "base_input", "plus_input", "atol")
    rows = json_rows(path, fields)
    check_rows(path, rows, ROWS)
    return [Example(row["task_id"], row["prompt"], row["canonical_solution"], row) for row in rows]


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Run every completion beside the reference on all inputs."""
    return executed(humanevalplus_program, examples, texts)
