"""GSM8K, 4-shot chain of thought: grade-school word problems, the answer a number.

The exemplars are the first four of the eight that most projects use (`fewshot/gsm8k_cot_8shot.json`). Strict match
takes the number after "The answer is", flexible match the last number of the text; strict is the headline.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from pathlib import Path

from freda.eval.tasks.task import Example, Graded, Kind, check_rows, json_rows, worked_examples

NAME = "gsm8k"
KIND: Kind = "mathematics"
CHECKSUM = "79e2b09803333a98"
ROWS = 1319
SHOTS = 4
STOPS = ("Q:", "\n\n")
MAX_NEW_TOKENS = 512
CHOICES: tuple[str, ...] = ()

STRICT = re.compile(r"[Tt]he answer is:?\s*\$?(-?[\d.,]*\d)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
CALCULATOR = re.compile(r"<<[^>]*>>")  # annotations of the published solutions


def load(folder: Path) -> list[Example]:
    """The test questions behind four worked ones."""
    path, shots = folder / "gsm8k" / "test.jsonl", folder / "fewshot" / "gsm8k_cot_8shot.json"
    rows = json_rows(path, ("question", "answer"))
    check_rows(path, rows, ROWS)
    head = worked_examples(shots, "Q: {question}\nA: {target}\n\n", SHOTS)
    return [
        Example(f"gsm8k/{number}", f"{head}Q: {row['question']}\nA:", gold_of(row["answer"]), row)
        for number, row in enumerate(rows)
    ]


def gold_of(answer: str) -> str:
    """The number behind ####."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Every text by itself: strict match, and flexible match beside it."""
    return [
        grade(example, text)._replace(also={"flexible": grade_flexible(example, text).correct})
        for example, text in zip(examples, texts, strict=True)
    ]


def grade(example: Example, text: str) -> Graded:
    """Strict match: the number after the first "The answer is"."""
    found = STRICT.search(text)
    if found is None:
        return Graded(False, "no 'The answer is'", "")
    return _compared(example, found[1])


def grade_flexible(example: Example, text: str) -> Graded:
    """Flexible match: the last number."""
    numbers = NUMBER.findall(text)
    return _compared(example, numbers[-1]) if numbers else Graded(False, "no number", "")


def reference(example: Example) -> str:
    """The published solution in the exemplars' words."""
    solution = CALCULATOR.sub("", str(example.row["answer"]).rpartition("####")[0]).strip()
    return f" {solution} The answer is {example.gold}."


def _compared(example: Example, answer: str) -> Graded:
    same = same_number(answer, example.gold)
    return Graded(same, "right" if same else f"{answer[:40]} is not {example.gold}", answer[:40])


def same_number(one: str, other: str) -> bool:
    """Equal as numbers, whatever the commas and zeros. Decimal, because a float would call neighbours equal."""
    try:
        return Decimal(one.replace(",", "")) == Decimal(other.replace(",", ""))
    except InvalidOperation:
        return False
