"""GSM8K, 4-shot chain of thought: grade-school word problems, the answer a number.

The exemplars are the first four of the eight that most projects use (`fewshot/gsm8k_cot_8shot.json`). Strict match
takes the number after "The answer is", flexible match the last number of the text; strict is the headline.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from pathlib import Path

from freda.eval.tasks.task import Example, Graded, Task, compared_with_gold, exemplars, json_rows, one_by_one

SHOTS = 4
STRICT = re.compile(r"[Tt]he answer is:?\s*\$?(-?[\d.,]*\d)")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
CALCULATOR = re.compile(r"<<[^>]*>>")  # annotations of the published solutions


def load(folder: Path, expected: int) -> list[Example]:
    """The test questions behind four exemplars."""
    rows = json_rows(folder / "gsm8k" / "test.jsonl", ("question", "answer"), expected)
    head = exemplars(folder / "fewshot" / "gsm8k_cot_8shot.json", "Q: {question}\nA: {target}\n\n", SHOTS)
    return [
        Example(f"gsm8k/{number}", f"{head}Q: {row['question']}\nA:", gold_of(row["answer"]), row)
        for number, row in enumerate(rows)
    ]


def gold_of(answer: str) -> str:
    """The number behind ####."""
    return answer.rpartition("####")[2].strip().replace(",", "")


def grade(example: Example, text: str) -> Graded:
    """Strict match, with the verdict of flexible match beside it."""
    found, numbers = STRICT.search(text), NUMBER.findall(text)
    also = {"flexible": bool(numbers) and same_number(numbers[-1], example.gold)}
    if found is None:
        return Graded(False, "no 'The answer is'", "", also)
    return compared_with_gold(same_number(found[1], example.gold), found[1][:40], example, also)


def reference(example: Example) -> str:
    """The published solution in the exemplars' words."""
    solution = CALCULATOR.sub("", str(example.row["answer"]).rpartition("####")[0]).strip()
    return f" {solution} The answer is {example.gold}."


def same_number(one: str, other: str) -> bool:
    """Equality as numbers, whatever the commas and zeros. Decimal, because a float would call neighbours equal."""
    try:
        return Decimal(one.replace(",", "")) == Decimal(other.replace(",", ""))
    except InvalidOperation:
        return False


GSM8K = Task(
    name="gsm8k",
    kind="mathematics",
    rows=1319,
    checksum="79e2b09803333a98",
    shots=SHOTS,
    stops=("Q:", "\n\n"),
    max_new_tokens=512,
    load=load,
    grade_all=one_by_one(grade),
    reference=reference,
)
