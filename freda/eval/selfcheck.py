"""`freda eval --self-check`: the graders on the published answers, which must all be right, on a constant wrong answer,
which never may be, and on random choices, which must be right as often as guessing is."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from freda.errors import FredaError, require
from freda.eval.tasks import tasks_named
from freda.eval.tasks.task import Task, checksum

PUBLISHED = {True: " as published", False: ", not the published questions", None: ""}
WRONG = " Nobody knows."  # an answer to no question


@dataclass(frozen=True)
class Checked:
    """The grader of one task on n references and on as many wrong answers."""

    n: int
    references: int  # graded as right
    wrong: int  # wrong answers graded as right
    guessed: float | None  # accuracy of random choices; None where the answer is generated
    checksum: str
    published: bool | None  # whether the questions are the published ones; None where that is not known
    seconds: float
    failures: list[str]  # ids and reasons of the first references that are not right

    @property
    def passed(self) -> bool:
        """Whether the grader can be trusted. Guesses may be off by four standard errors."""
        even = self.guessed is None or abs(self.guessed - 0.25) < 4 * (0.25 * 0.75 / self.n) ** 0.5
        return self.references == self.n and self.wrong == 0 and even


def check_graders(names: Sequence[str], data: Path) -> bool:
    """Check the graders of the named tasks, or of all whose files are there, and print a line for each; True if all can
    be trusted."""
    checked = []
    for task in tasks_named(names):
        try:
            checked.append(found := self_check(task, data))
        except FredaError as error:
            if names:
                raise
            print(f"{task.name:<16} not checked: {error}")
            continue
        guess = "" if found.guessed is None else f", a random guess {100 * found.guessed:.1f}%"
        print(
            f"{task.name:<16} {'ok' if found.passed else 'WRONG':<6} references {found.references:,}/{found.n:,}, "
            f"wrong answers {found.wrong}{guess}; {found.seconds:.1f} s, "
            f"checksum {found.checksum[:8]}{PUBLISHED[found.published]}"
        )
        print("".join(f"    {failure}\n" for failure in found.failures), end="")
    require(bool(checked), f"{data} holds the files of no task; get them with --download, or name their folder: --data")
    return all(found.passed for found in checked)


def self_check(task: Task, folder: Path) -> Checked:
    """Grade the references, a constant wrong answer and, where there are choices, random ones."""
    task.check_installed()
    begun, examples = time.perf_counter(), task.load(folder, task.rows)
    found, generator = checksum(examples), random.Random(0)

    def right(texts: Iterable[str]) -> int:
        return sum(one.correct for one in task.grade_all(examples, list(texts)))

    graded = task.grade_all(examples, [task.reference(example) for example in examples])
    return Checked(
        n=len(examples),
        references=sum(one.correct for one in graded),
        wrong=right(WRONG for _ in examples),
        guessed=right(generator.choice(task.choices) for _ in examples) / len(examples) if task.choices else None,
        checksum=found,
        published=found.startswith(task.checksum) if task.checksum else None,
        seconds=time.perf_counter() - begun,
        failures=[f"{e.id}: {g.reason}" for e, g in zip(examples, graded, strict=True) if not g.correct][:5],
    )
