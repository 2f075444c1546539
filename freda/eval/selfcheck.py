"""`freda eval --self-check`: the graders on the published answers, which must all be right, on a constant wrong answer,
which never may be, and on random choices, which must be right as often as guessing is."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from freda.eval.tasks.task import Task, checksum

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


def self_check(task: Task, folder: Path, *, seed: int = 0) -> Checked:
    """Grade the references, a constant wrong answer and, where there are choices, random ones."""
    task.check_installed()
    begun, examples = time.perf_counter(), task.load(folder, task.rows)
    found, generator = checksum(examples), random.Random(seed)

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
