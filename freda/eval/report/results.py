"""Results of evaluations: the files of one, how certain its score is, and `freda eval --compare A B`.

The folder of an evaluation holds `samples.jsonl`, a head with what was asked and a line per answer, and `results.json`.
A process may be killed at any moment: a line that was cut off or damaged is skipped, and its question asked again.

Questions differ much more than models do, so two scores are compared question by question: what counts is where they
disagree. The interval is that of Agresti and Min (2005): the normal one of the mean of the differences (−1, 0 or 1), at
95%, after adding half a question to each of the four outcomes, or few questions could make two models equal for sure.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from freda.errors import FredaError, require
from freda.files import located, parse_json, read_text

SAMPLES, RESULTS = "samples.jsonl", "results.json"
SAMPLE: dict[str, type] = {  # what is counted of an answer
    **dict.fromkeys(("id", "group", "finish", "error", "output"), str),
    **{"correct": bool, "also": dict, "tokens": int, "nfe": int, "seconds": float},
}
Z = 1.96  # 95% of a normal distribution


class Compared(NamedTuple):
    """Two evaluations, A and B."""

    n: int
    accuracy: tuple[float, float]
    difference: float  # B minus A, as a fraction
    low: float
    high: float
    only: tuple[float, float]  # questions that A alone, or B alone, solves


def read_samples(folder: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The head, which says what was asked, and the answers by their ids; damaged lines are skipped."""
    path = folder / SAMPLES
    if not path.is_file():
        raise FredaError(f"{folder} holds no {SAMPLES}; name the folder of one task that freda eval made")
    with located(folder):
        first, *lines = read_text(path, errors="replace").split("\n")
    head = _line(first)
    if "checksum" not in head:
        raise FredaError(f"{path} does not begin with what was asked ({first[:40]!r}); delete it, or choose another")
    samples = [sample for sample in map(_line, lines[:-1]) if _is_sample(sample)]
    return head, {sample["id"]: sample for sample in samples}


def _line(text: str) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = parse_json(text)
        return found if isinstance(found, dict) else {}
    return {}


def _is_sample(values: dict[str, Any]) -> bool:
    """Whether all that is counted or compared of an answer is there, as it was written."""
    right = all(isinstance(values.get(name, kind()), kind) for name, kind in SAMPLE.items())
    return (
        right
        and {"id", "correct"} <= values.keys()
        and all(type(one) is bool for one in values.get("also", {}).values())
    )


def compare(first: Path, second: Path) -> Compared:
    """Compare the answers in two folders that `freda eval` made."""
    heads, samples = zip(read_samples(first), read_samples(second), strict=True)
    for key in ("task", "checksum"):
        one, other = (head.get(key) for head in heads)
        require(one == other, f"{first} and {second} were not asked the same: {key} {one} and {other}")
    for folder, head, found in zip((first, second), heads, samples, strict=True):
        odd = f"{folder} has {len(found)} of {head.get('n')} answers"
        require(0 < len(found) == head.get("n"), f"{odd}; run the same freda eval again to finish it")
    left, right = samples
    require(left.keys() == right.keys(), f"{first} and {second} have answers to other questions; one is damaged")
    return compared([(left[name]["correct"], right[name]["correct"]) for name in left])


def compared(pairs: Sequence[tuple[float, float]]) -> Compared:
    """Compare verdicts question by question; where a side is several models, the fraction of them that is right."""
    n, differences = len(pairs), [b - a for a, b in pairs]
    only = (sum(max(0, -d) for d in differences), sum(max(0, d) for d in differences))
    wider = n + 2  # with half a question for each outcome: two of them are differences, −1 and 1
    middle = sum(differences) / wider
    error = math.sqrt(((sum(d * d for d in differences) + 1) / wider - middle**2) / wider)
    accuracy = (sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n)
    low, high = max(-1.0, middle - Z * error), min(1.0, middle + Z * error)
    return Compared(n, accuracy, sum(differences) / n, low, high, only)


def compared_line(found: Compared) -> str:
    """The comparison in a line."""
    first, second = (f"{100 * value:.2f}" for value in found.accuracy)
    difference, low, high = (f"{100 * value:+.2f}" for value in (found.difference, found.low, found.high))
    points = f"B is {difference} points ({low} to {high} at 95%, paired, n = {found.n})"
    return f"A {first}, B {second}: {points}; A alone solves {found.only[0]:g}, B alone {found.only[1]:g}"


def wilson(right: int, n: int) -> tuple[float, float]:
    """The 95% interval of Wilson (1927) for `right` of `n` answers, as fractions: never empty, not even for 0 of n."""
    rate, spread = right / n, Z**2 / n
    middle = (rate + spread / 2) / (1 + spread)
    half = Z * math.sqrt(rate * (1 - rate) / n + spread / (4 * n)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)
