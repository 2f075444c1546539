"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freda.errors import FredaError
from freda.eval.tasks import (
    gpqa,
    gsm8k,
    humaneval,
    humaneval_plus,
    math500,
    mbpp,
    mini_code,
    mini_logic,
    mini_math,
    mmlu,
    sums,
)
from freda.eval.tasks.task import Example, Task, check_published

TASKS: dict[str, Task] = {
    task.NAME: task
    for task in (
        *(mmlu, gpqa, gsm8k, math500, humaneval, humaneval_plus, mbpp),
        *(sums, mini_math, mini_code, mini_logic),  # of our own generators
    )
}


def tasks_named(names: Sequence[str]) -> list[Task]:
    """The tasks of these names; all if there is none."""
    unknown = next((name for name in names if name not in TASKS), None)
    if unknown is not None:
        raise FredaError(f"there is no task {unknown!r}; use one of {', '.join(TASKS)}")
    return [TASKS[name] for name in names or TASKS]


def load_examples(task: Task, data: Path, limit: int, *, unpublished: bool = False) -> list[Example]:
    """The first `limit` questions of a task, or all if it is 0."""
    examples = task.load(data)
    if not unpublished:
        check_published(task, examples)
    return examples[:limit] if limit else examples
