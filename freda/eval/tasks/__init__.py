"""The benchmarks by name."""

from freda.eval.tasks import gpqa, gsm8k, humaneval, humaneval_plus, math500, mbpp, mmlu
from freda.eval.tasks.task import Task

TASKS: dict[str, Task] = {task.NAME: task for task in (mmlu, gpqa, gsm8k, math500, humaneval, humaneval_plus, mbpp)}
