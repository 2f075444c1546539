"""Logic of the mini suite: held-out deductions with four options, the letter chosen by likelihood."""

from __future__ import annotations

from pathlib import Path

from freda.data.mini import questions_of
from freda.eval.tasks.letters import CHOICES, grade_letter, right_letter
from freda.eval.tasks.task import Example, Task, one_by_one, shards


def load(folder: Path, count: int) -> list[Example]:
    """The first deductions of the test split, each about a world of its own."""
    return [
        Example(
            f"mini_logic/{number}", item.prompt, item.answer, {"family": item.family}, f"{item.family} {item.level}"
        )
        for number, item in enumerate(questions_of("mini_logic", shards(folder), count))
    ]


MINI_LOGIC = Task(
    name="mini_logic",
    kind="knowledge",
    rows=2000,
    choices=CHOICES,
    load=load,
    grade_all=one_by_one(grade_letter),
    reference=right_letter,
)
