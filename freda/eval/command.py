"""`freda eval`: tasks by name, one folder of results each; and the check of the graders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from freda.config import DecodeConfig
from freda.errors import FredaError, require
from freda.eval.evaluate import evaluate
from freda.eval.selfcheck import self_check
from freda.eval.tasks import TASKS
from freda.eval.tasks.task import Task
from freda.model.transformer import pick_device
from freda.model.weights import DTYPES, load_model, resolve_model_folder


def tasks_named(names: Sequence[str]) -> list[Task]:
    """The tasks of these names; all if there is none."""
    unknown = next((name for name in names if name not in TASKS), None)
    if unknown is not None:
        raise FredaError(f"there is no task {unknown!r}; use one of {', '.join(TASKS)}")
    return [TASKS[name] for name in names or TASKS]


def check_graders(names: Sequence[str], data: Path) -> bool:
    """Run every task's grader on the published answers and print what it says; True if all can be trusted."""
    trusted = True
    for task in tasks_named(names):
        try:
            found = self_check(task, data)
        except FredaError as error:
            if names:
                raise
            print(f"{task.NAME:<16} not checked: {error}")
            continue
        guess = "" if found.guessed is None else f", a random guess {100 * found.guessed:.1f}%"
        verdict = "ok" if found.passed else "WRONG"
        print(
            f"{found.task:<16} {verdict:<6} references {found.references:,}/{found.n:,}, wrong answers {found.wrong}"
            f"{guess}; {found.seconds:.1f} s, checksum {found.checksum[:8]}"
        )
        for failure in found.failures:
            print(f"    {failure}")
        trusted = trusted and found.passed
    return trusted


def evaluate_tasks(
    path: Path,
    names: Sequence[str],
    data: Path,
    out: Path | None,
    settings: dict[str, Any],
    *,
    limit: int,
    batch_size: int,
    device: str,
    dtype: str,
) -> None:
    """Evaluate the model on every task; a line on stdout for each."""
    require(limit >= 0, f"limit is {limit}; use 0 (all) or more")
    require(dtype in DTYPES, f"there is no dtype {dtype!r}; use one of {', '.join(DTYPES)}")
    decoding, tasks = DecodeConfig(**settings), tasks_named(names)
    folder = out or resolve_model_folder(path) / "eval"
    loaded = load_model(path, pick_device(device), DTYPES[dtype])
    for task in tasks:
        examples = task.load(data)
        examples = examples[:limit] if limit else examples
        place = folder / task.NAME
        found = evaluate(
            loaded, task, examples, place, settings=decoding, batch_size=batch_size, progress=_progress(task.NAME)
        )
        print(
            f"{task.NAME}: {100 * found['accuracy']:.2f} ± {100 * found['standard_error']:.2f} "
            f"({found['correct']} of {found['n']}), {found['tpf']:.2f} tokens per forward; {place}"
        )


def _progress(name: str) -> Any:
    end = "\r" if sys.stderr.isatty() else "\n"

    def show(done: int, total: int, share: float) -> None:
        last = "\n" if done == total else end
        print(f"{name}: {done:,} of {total:,}, {100 * share:.1f}% right so far", end=last, file=sys.stderr, flush=True)

    return show
