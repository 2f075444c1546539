"""HumanEval, 0-shot: the body of a Python function from its docstring, executed against its tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from freda.decode.stops import cut_at_stop
from freda.eval.code import HUMANEVAL_STOPS, humaneval_program
from freda.eval.sandbox import Verdict, run_many
from freda.eval.tasks.task import Example, Graded, Kind, check_rows, json_rows

NAME = "humaneval"
KIND: Kind = "coding"
CHECKSUM = "1f089a3df8fcb544"
ROWS = 164
SHOTS = 0
STOPS = HUMANEVAL_STOPS
MAX_NEW_TOKENS = 1024
CHOICES: tuple[str, ...] = ()
MOST_KNOWN = 100_000  # verdicts kept, a few kilobytes each
_KNOWN: dict[tuple[str, str], Verdict] = {}


def load(folder: Path) -> list[Example]:
    """The prompts as they are."""
    path = folder / "humaneval" / "HumanEval.jsonl.gz"
    rows = json_rows(path, ("task_id", "prompt", "canonical_solution", "test", "entry_point"))
    check_rows(path, rows, ROWS)
    return [Example(row["task_id"], row["prompt"], row["canonical_solution"], row) for row in rows]


def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
    """Run every completion against the row's own tests."""
    return executed(humaneval_program, examples, texts)


def executed(
    program_of: Callable[[Mapping[str, Any], str], tuple[str, str]],
    examples: Sequence[Example],
    texts: Sequence[str],
    stops: Sequence[str] = STOPS,
) -> list[Graded]:
    """Run completions, cut at their first stop, in the sandbox."""
    cut = [cut_at_stop(text, stops) for text in texts]
    verdicts = _verdicts([program_of(example.row, text) for example, text in zip(examples, cut, strict=True)])
    return [Graded(verdict.passed, verdict.reason, text) for verdict, text in zip(verdicts, cut, strict=True)]


def _verdicts(programs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Every program is run once in a process: the settings of a sweep ask the same question a hundred times, and most
    answers are the same. Verdicts by the clock are not kept."""
    new = [program for program in dict.fromkeys(programs) if program not in _KNOWN]
    found = dict(zip(new, run_many(new), strict=True)) | {job: _KNOWN[job] for job in programs if job in _KNOWN}
    if len(_KNOWN) + len(new) > MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN.update((job, found[job]) for job in new if not found[job].reason.startswith("time out"))
    return [found[job] for job in programs]


def reference(example: Example) -> str:
    """The published body."""
    return example.gold
