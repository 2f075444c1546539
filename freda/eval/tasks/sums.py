"""The embedded word problems: held-out sums, told as little stories, of the kind that a folder of shards was made of.

`--data` names that folder (`freda prepare`, or the demo's `data`); its manifest says which problems the model has
trained on, and the test split of the same generator is asked. No exemplars: such a model has seen nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from freda.config import CorpusConfig
from freda.data import synthetic
from freda.data.shards import Manifest
from freda.errors import FredaError
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
    values = dict(Manifest.read(folder).source.get("corpus", {}))
    if not values:
        raise FredaError(f"{folder} holds no word problems of the embedded generator; name such shards with --data")
    version = values.pop("generator")
    if version != synthetic.VERSION:
        raise FredaError(
            f"{folder} was made by version {version} of the generator, this is {synthetic.VERSION}; prepare it again"
        )
    return CorpusConfig(**values)


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Every text by itself."""
    return [_graded(example, text) for example, text in zip(examples, texts, strict=True)]


def reference(example: Example) -> str:
    """The written solution."""
    return f" {example.row['solution']}"


def _graded(example: Example, text: str) -> Graded:
    found = synthetic.final_answer(text)
    if found is None:
        return Graded(False, f"no '{synthetic.ANSWER}' with a whole number", "")
    right = str(found) == example.gold
    return Graded(right, "right" if right else f"{found} is not {example.gold}", str(found))
