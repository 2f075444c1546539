"""Mathematics of the mini suite: held-out word problems of several steps, graded by the final number.

`--data` names a folder of shards with the source kind mini_math; its manifest says how difficult the problems are.
"""

from __future__ import annotations

from pathlib import Path

from freda.data.mini import questions_of
from freda.eval.tasks.task import Example, Task, one_by_one, shards
from freda.eval.tasks.word_problems import grade_final_number


def load(folder: Path, count: int) -> list[Example]:
    """The first problems of the test split, each with a calculation of its own."""
    return [
        Example(f"mini_math/{number}", item.prompt, item.answer, {"solution": item.solution}, f"steps {item.level}")
        for number, item in enumerate(questions_of("mini_math", shards(folder), count))
    ]


MINI_MATH = Task(
    name="mini_math",
    kind="mathematics",
    rows=2000,
    stops=("\nQ:",),
    max_new_tokens=192,
    load=load,
    grade_all=one_by_one(grade_final_number),
    reference=lambda example: str(example.row["solution"]),
)
