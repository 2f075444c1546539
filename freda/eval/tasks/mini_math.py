"""Mathematics of the mini suite: held-out word problems of several steps, graded by the final number.

`--data` names a folder of shards with the source kind mini_math; its manifest says how difficult the problems are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from freda.data import mini
from freda.data.config import MiniConfig
from freda.data.generators import settings_in
from freda.data.mini_item import Item
from freda.eval.tasks import sums
from freda.eval.tasks.task import Example, Graded, Kind

NAME = "mini_math"
KIND: Kind = "mathematics"
ROWS = 2000
CHECKSUM = ""  # it depends on the corpus
SHOTS = 0
STOPS = ("\nQ:",)
MAX_NEW_TOKENS = 192
CHOICES: tuple[str, ...] = ()


def load(folder: Path) -> list[Example]:
    """The first problems of the test split, each with a calculation of its own."""
    return [
        Example(f"{NAME}/{number}", item.prompt, item.answer, {"solution": item.solution}, f"steps {item.level}")
        for number, item in enumerate(asked("mini_math", folder, ROWS))
    ]


def asked(kind: mini.MiniKind, folder: Path, count: int) -> list[Item]:
    """Test items of the difficulty that a folder of shards was made with."""
    return mini.questions(kind, MiniConfig(**settings_in(folder, kind)), "test", count)


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Every text by itself."""
    return sums.grade_all(examples, texts)


def reference(example: Example) -> str:
    """The worked solution."""
    return str(example.row["solution"])
