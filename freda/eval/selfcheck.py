"""`freda eval --self-check`: the graders on the published answers, which must all be right, on a constant wrong answer,
which never may be, and on random choices, which must be right as often as guessing is."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from freda.eval.tasks.task import Example, Task, checksum

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
    found = checksum(examples)
    graded = task.grade_all(examples, [task.reference(example) for example in examples])
    wrong = task.grade_all(examples, [WRONG] * len(examples))
    return Checked(
        n=len(examples),
        references=sum(one.correct for one in graded),
        wrong=sum(one.correct for one in wrong),
        guessed=_guessed(task, examples, seed) if task.choices else None,
        checksum=found,
        published=found.startswith(task.checksum) if task.checksum else None,
        seconds=time.perf_counter() - begun,
        failures=[f"{e.id}: {g.reason}" for e, g in zip(examples, graded, strict=True) if not g.correct][:5],
    )


def _guessed(task: Task, examples: list[Example], seed: int) -> float:
    generator = random.Random(seed)
    graded = task.grade_all(examples, [generator.choice(task.choices) for _ in examples])
    return sum(one.correct for one in graded) / len(examples)
