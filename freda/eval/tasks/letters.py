"""Questions with four options, answered by the letter that is most likely: how they are written and graded."""

from __future__ import annotations

from collections.abc import Sequence

from freda.eval.tasks.task import Example, Graded

LETTERS = "ABCD"
CHOICES = tuple(f" {letter}" for letter in LETTERS)


def with_options(question: str, options: Sequence[str]) -> str:
    """The question and its options, up to where the letter is to come."""
    lines = "\n".join(f"{letter}. {text}" for letter, text in zip(LETTERS, options, strict=True))
    return f"{question.strip()}\n{lines}\nAnswer:"


def heading(subject: str, solved: Sequence[tuple[str, str]]) -> str:
    """The beginning of a prompt: what the questions are about, and exemplars with their letters."""
    head = f"The following are multiple choice questions (with answers) about {subject}.\n\n"
    return head + "".join(f"{question} {letter}\n\n" for question, letter in solved)


def grade_letter(example: Example, text: str) -> Graded:
    """Compare the letter with the right one."""
    letter = text.strip()
    right = letter == example.gold
    return Graded(right, "right" if right else f"{letter} is not {example.gold}", letter)


def right_letter(example: Example) -> str:
    """The right answer, as one of `CHOICES`."""
    return f" {example.gold}"
