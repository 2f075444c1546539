"""Code of the mini suite: the body of a small held-out Python function from its docstring, executed in the sandbox."""

from __future__ import annotations

from pathlib import Path

from freda.data.mini import questions_of
from freda.data.mini_code import tests_of
from freda.eval.tasks.code import FUNCTION_STOPS, executed, humaneval_program
from freda.eval.tasks.task import Example, Task, gold, shards


def load(folder: Path, count: int) -> list[Example]:
    """The first functions of the test split, no two of which do the same."""
    examples = []
    for number, item in enumerate(questions_of("mini_code", shards(folder), count)):
        name = f"mini_code/{number}"
        row = {"task_id": name, "prompt": item.prompt, "entry_point": item.entry_point, "test": tests_of(item)}
        examples.append(Example(name, item.prompt, item.answer, row, f"{item.family} {item.level}"))
    return examples


MINI_CODE = Task(
    name="mini_code",
    kind="coding",
    rows=2000,
    stops=FUNCTION_STOPS,
    max_new_tokens=192,
    load=load,
    grade_all=executed(humaneval_program),
    reference=gold,
)
