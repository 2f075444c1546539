"""What the kinds of the mini suite make: a prompt, its solution, and what grading needs."""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """One task with a right solution."""

    prompt: str
    solution: str  # stands right behind the prompt
    answer: str  # what is graded: a number, a letter, or for code the solution itself
    key: str  # of its content
    level: int  # steps of a calculation, transformations of a function, hops of a deduction
    family: str = ""  # part of its kind: which puzzle, or what a function works on
    entry_point: str = ""  # name of the function to write
    lesson: bool = False  # easier than what is tested: for training only

    @property
    def document(self) -> str:
        """What a model is trained on."""
        return self.prompt + self.solution
