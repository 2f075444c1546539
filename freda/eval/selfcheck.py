"""The harness checks itself: right answers must score all, a constant wrong one nothing, a guess what guessing gives.

A benchmark number is worth no more than the grader behind it. This runs the graders on the published answers.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from pathlib import Path

from freda.eval.tasks.task import Example, Task, checksum

WRONG = " Nobody knows."  # an answer to no question


@dataclass(frozen=True)
class Checked:
    """One task: how many of n references are right, and how many of as many wrong answers."""

    task: str
    n: int
    references: int
    wrong: int
    guessed: float | None  # share of random choices that are right; None where the answer is generated
    checksum: str
    published: bool | None  # is that the checksum of the published questions? None where it is not known
    seconds: float
    failures: list[str]  # ids and reasons of the first references that are not right

    @property
    def passed(self) -> bool:
        """Is the grader to be trusted? A guess may be off by four standard errors."""
        even = self.guessed is None or abs(self.guessed - 0.25) < 4 * (0.25 * 0.75 / self.n) ** 0.5
        return self.references == self.n and self.wrong == 0 and even


def self_check(task: Task, folder: Path, *, seed: int = 0) -> Checked:
    """Grade the references, a constant wrong answer and, where there are choices, random ones."""
    begun, examples = time.perf_counter(), task.load(folder)
    found = checksum(examples)
    graded = task.grade_all(examples, [task.reference(example) for example in examples])
    wrong = task.grade_all(examples, [WRONG] * len(examples))
    return Checked(
        task=task.NAME,
        n=len(examples),
        references=sum(one.correct for one in graded),
        wrong=sum(one.correct for one in wrong),
        guessed=_guessed(task, examples, seed) if task.CHOICES else None,
        checksum=found,
        published=found.startswith(task.CHECKSUM) if task.CHECKSUM else None,
        seconds=time.perf_counter() - begun,
        failures=[f"{e.id}: {g.reason}" for e, g in zip(examples, graded, strict=True) if not g.correct][:5],
    )


def _guessed(task: Task, examples: list[Example], seed: int) -> float:
    generator = random.Random(seed)
    graded = task.grade_all(examples, [generator.choice(task.CHOICES) for _ in examples])
    return sum(one.correct for one in graded) / len(examples)
