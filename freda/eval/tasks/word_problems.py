"""Word problems whose solution ends in a whole number: how answers are graded."""

from __future__ import annotations

from freda.data.synthetic import ANSWER, final_answer
from freda.eval.tasks.task import Example, Graded


def grade_final_number(example: Example, text: str) -> Graded:
    """Compare the number at the end of the solution with the right one."""
    number = final_answer(text)
    if number is None:
        return Graded(False, f"no '{ANSWER}' with a whole number", "")
    right = str(number) == example.gold
    return Graded(right, "right" if right else f"{number} is not {example.gold}", str(number))
