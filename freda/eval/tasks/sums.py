"""The embedded word problems: held-out sums in little stories, of the kind that a folder of shards was made of.

`--data` names that folder (`freda prepare`, or the demo's `data`); its manifest says which problems the model has
trained on, and the questions are the test split of the same generator. No exemplars: such a model has seen nothing
else.
"""

from __future__ import annotations

import itertools
from pathlib import Path

from freda.data.config import CorpusConfig
from freda.data.generators import settings_in
from freda.data.synthetic import problems_of
from freda.eval.tasks.task import Example, Task, one_by_one, shards
from freda.eval.tasks.word_problems import grade_final_number


def load(folder: Path, count: int) -> list[Example]:
    """The first problems of the test split."""
    problems = problems_of(CorpusConfig(**settings_in(shards(folder), "sums")), "test")
    return [
        Example(f"sums/{number}", problem.prompt, str(problem.answer), {"solution": problem.solution})
        for number, problem in enumerate(itertools.islice(problems, count))
    ]


SUMS = Task(
    name="sums",
    kind="mathematics",
    rows=2000,
    max_new_tokens=256,
    load=load,
    grade_all=one_by_one(grade_final_number),
    reference=lambda example: f" {example.row['solution']}",
)
