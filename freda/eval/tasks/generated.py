"""Held-out questions of freda's own generators: sums in little stories, and the mini suite of mathematics, code, logic.

`--data` names the folder of shards that a model was trained on (`freda prepare`, or the demo's `data`). Its manifest
says how difficult the documents are, and the questions are the test split of the same generator. There are no
exemplars: such a model has seen nothing else.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from pathlib import Path

from freda.data.config import CorpusConfig
from freda.data.mini import MiniKind, questions_of, settings_in
from freda.data.mini_code import tests_of
from freda.data.synthetic import ANSWER, final_answer, problems_of
from freda.errors import require
from freda.eval.tasks.code import HUMANEVAL
from freda.eval.tasks.multiple_choice import GPQA_DIAMOND
from freda.eval.tasks.task import Example, Graded, Task, compared_with_gold, one_by_one


def load_sums(folder: Path, count: int) -> list[Example]:
    """The first sums of the test split."""
    problems = itertools.islice(problems_of(CorpusConfig(**settings_in(_shards(folder), "sums")), "test"), count)
    return [
        Example(f"sums/{number}", one.prompt, one.answer, {"solution": one.solution})
        for number, one in enumerate(problems)
    ]


def load_mini(kind: MiniKind, group: str, folder: Path, count: int) -> list[Example]:
    """The first questions of a kind, no two of which have the same content; `group` is a template of the item."""
    examples = []
    for number, item in enumerate(questions_of(kind, _shards(folder), count)):
        row = {"prompt": item.prompt, "solution": item.solution}
        if item.entry_point:
            row |= {"canonical_solution": item.solution, "entry_point": item.entry_point, "test": tests_of(item)}
        examples.append(Example(f"{kind}/{number}", item.prompt, item.answer, row, group.format(item)))
    return examples


def _shards(folder: Path) -> Path:
    require((folder / "manifest.json").is_file(), f"{folder} has no token shards; name the model's with --data")
    return folder


def grade_final_number(example: Example, text: str) -> Graded:
    """Compare the number at the end of a solution with the right one."""
    number = final_answer(text)
    if number is None:
        return Graded(False, f"no '{ANSWER}' with a whole number", "")
    return compared_with_gold(str(number) == example.gold, str(number), example)


SUMS = Task(
    name="sums",
    kind="mathematics",
    rows=2000,
    max_new_tokens=256,
    load=load_sums,
    grade_all=one_by_one(grade_final_number),
    reference=lambda example: str(example.row["solution"]),
)
MINI_MATH = replace(
    SUMS,
    name="mini_math",
    stops=("\nQ:",),
    max_new_tokens=192,
    load=functools.partial(load_mini, "mini_math", "steps {0.level}"),
)
MINI_CODE = replace(
    HUMANEVAL,
    name="mini_code",
    rows=2000,
    checksum="",
    max_new_tokens=192,
    load=functools.partial(load_mini, "mini_code", "{0.family} {0.level}"),
)
MINI_LOGIC = replace(
    GPQA_DIAMOND,
    name="mini_logic",
    rows=2000,
    shots=0,
    load=functools.partial(load_mini, "mini_logic", "{0.family} {0.level}"),
)
