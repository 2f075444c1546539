"""The embedded word problems: held-out sums, told as little stories, of the kind that a folder of shards was made of.

`--data` names that folder (`freda prepare`, or the demo's `data`); its manifest says which problems the model has
trained on, and the test split of the same generator is asked. No exemplars: such a model has seen nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from freda.data import synthetic
from freda.data.config import CorpusConfig
from freda.data.generators import settings_in
from freda.eval.tasks.task import Example, Graded, Kind

NAME = "sums"
KIND: Kind = "mathematics"
ROWS = 2000
CHECKSUM = ""  # it depends on the corpus
SHOTS = 0
STOPS: tuple[str, ...] = ()
MAX_NEW_TOKENS = 256
CHOICES: tuple[str, ...] = ()


def load(folder: Path) -> list[Example]:
    """The first problems of the test split."""
    asked = itertools.islice(synthetic.problems_of(corpus_of(folder), "test"), ROWS)
    return [
        Example(f"sums/{number}", problem.prompt, str(problem.answer), {"solution": problem.solution})
        for number, problem in enumerate(asked)
    ]


def corpus_of(folder: Path) -> CorpusConfig:
    """The settings of the generator that a folder of shards was made with."""
    return CorpusConfig(**settings_in(folder, "sums"))


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Every text by itself."""
    return [graded(example, text) for example, text in zip(examples, texts, strict=True)]


def reference(example: Example) -> str:
    """The written solution."""
    return f" {example.row['solution']}"


def graded(example: Example, text: str) -> Graded:
    """Does the text end in the right number?"""
    found = synthetic.final_answer(text)
    if found is None:
        return Graded(False, f"no '{synthetic.ANSWER}' with a whole number", "")
    right = str(found) == example.gold
    return Graded(right, "right" if right else f"{found} is not {example.gold}", str(found))
