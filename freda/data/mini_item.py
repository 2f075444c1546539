"""The item that all kinds of the mini suite make: a prompt, its solution, and what grading needs."""

from __future__ import annotations

from typing import NamedTuple


class Item(NamedTuple):
    """One task with a correct solution."""

    prompt: str
    solution: str  # follows the prompt immediately
    answer: str  # what is graded: a number, a letter, or for code the solution itself
    key: str  # that of its content
    level: int  # steps of a calculation, transformations of a function, hops of a deduction
    family: str = ""  # a subdivision of its kind: which puzzle, or what a function works on
    entry_point: str = ""  # name of the function to write
    lesson: bool = False  # easier than what is tested: for training only

    @property
    def document(self) -> str:
        """The text that a model is trained on."""
        return self.prompt + self.solution
