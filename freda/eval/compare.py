"""`freda eval --compare A B`: the paired difference of two evaluations of the same questions.

Questions differ much more than models do, so two scores are compared question by question: what counts is where they
disagree. The interval is the normal one of the mean of the differences (−1, 0 or 1), at 95%.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freda.errors import FredaError, require
from freda.eval.evaluate import SAMPLES

Z = 1.96


class Compared(NamedTuple):
    """Two evaluations, A and B."""

    n: int
    accuracy: tuple[float, float]
    difference: float  # of B over A, as a share
    low: float
    high: float
    only: tuple[int, int]  # questions that A alone, or B alone, has right


def compare(first: Path, second: Path) -> Compared:
    """Compare the answers in two folders that `freda eval` made."""
    heads, samples = zip(read_verdicts(first), read_verdicts(second), strict=True)
    for key in ("task", "checksum"):
        one, other = (head[key] for head in heads)
        require(one == other, f"{first} and {second} were not asked the same: {key} {one} and {other}")
    left, right = samples
    require(left.keys() == right.keys(), f"{first} has {len(left)} answers, {second} {len(right)}; let both finish")
    return compared([(left[name], right[name]) for name in left])


def compared(pairs: Sequence[tuple[bool, bool]]) -> Compared:
    """Compare verdicts question by question."""
    n, only = len(pairs), (sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
    mean = (only[1] - only[0]) / n
    error = math.sqrt(max(0.0, sum(only) / n - mean**2) / n)
    accuracy = (sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n)
    return Compared(n, accuracy, mean, mean - Z * error, mean + Z * error, only)


def compared_line(found: Compared) -> str:
    """The comparison in a line."""
    first, second, difference, low, high = (
        f"{100 * value:{sign}.2f}"
        for value, sign in zip(
            (*found.accuracy, found.difference, found.low, found.high), ("", "", "+", "+", "+"), strict=True
        )
    )
    return (
        f"A {first}, B {second}: B is {difference} points ({low} to {high} at 95%, paired, n = {found.n}); "
        f"A alone has {found.only[0]} right, B alone {found.only[1]}"
    )


def read_verdicts(folder: Path) -> tuple[dict[str, Any], dict[str, bool]]:
    """What was asked, and which answers are right."""
    path = folder / SAMPLES
    if not path.is_file():
        raise FredaError(f"{folder} holds no {SAMPLES}; name a folder that freda eval made, one task's")
    lines = path.read_text(encoding="utf-8").split("\n")
    samples = [json.loads(line) for line in lines[1:-1] if line]
    return json.loads(lines[0]), {sample["id"]: bool(sample["correct"]) for sample in samples}
