"""The benchmarks by name."""

from __future__ import annotations

from collections.abc import Sequence

from freda.errors import FredaError
from freda.eval.tasks.code import HUMANEVAL, HUMANEVAL_PLUS, MBPP, without_isolation
from freda.eval.tasks.generated import MINI_CODE, MINI_LOGIC, MINI_MATH, SUMS
from freda.eval.tasks.mathematics import GSM8K, MATH500
from freda.eval.tasks.multiple_choice import GPQA_DIAMOND, MMLU
from freda.eval.tasks.task import Task

PUBLISHED = (MMLU, GPQA_DIAMOND, GSM8K, MATH500, HUMANEVAL, HUMANEVAL_PLUS, MBPP)
GENERATED = (SUMS, MINI_MATH, MINI_CODE, MINI_LOGIC)  # by freda's own generators
TASKS: dict[str, Task] = {task.name: task for task in (*PUBLISHED, *GENERATED)}


def tasks_named(names: Sequence[str], *, isolated: bool = True) -> list[Task]:
    """The tasks of these names; all of them if no name is given. If not `isolated`, programs run without isolation."""
    unknown = next((name for name in names if name not in TASKS), None)
    if unknown is not None:
        raise FredaError(f"there is no task {unknown!r}; use one of {', '.join(TASKS)}")
    found = [TASKS[name] for name in names or TASKS]
    return found if isolated else [without_isolation(task) for task in found]
