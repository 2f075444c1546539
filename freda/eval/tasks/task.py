"""What a benchmark is: a module with these names, passed around as a value.

A task reads its rows, makes the prompts and grades the answers; it knows no model. `reference` gives a text that must
be graded as right, and a constant wrong one must not: the harness checks itself with them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

from freda.data.files import File, open_file, told_if_cut_short
from freda.errors import FredaError

TESTS = ("entry_point", "test", "base_input", "plus_input", "atol", "test_setup_code", "test_list")  # run on answers
Kind = Literal["mathematics", "coding", "knowledge"]


class Example(NamedTuple):
    """One question."""

    id: str
    prompt: str
    gold: str
    row: Mapping[str, Any]  # as published
    group: str = ""  # part of the benchmark that is also counted by itself, for example a subject


class Graded(NamedTuple):
    """A verdict, and why."""

    correct: bool
    reason: str
    answer: str  # what was taken for the answer; empty if nothing was
    also: Mapping[str, bool] = MappingProxyType({})  # verdicts by other rules than the headline's


class Task(Protocol):
    """The names of a task's module."""

    NAME: str
    KIND: Kind  # the panel of a figure it belongs to
    ROWS: int  # of the published file; fewer or more are an error
    CHECKSUM: str  # of all questions as published, its first digits; empty where that is not known
    SHOTS: int
    STOPS: tuple[str, ...]  # texts that end an answer
    MAX_NEW_TOKENS: int
    CHOICES: tuple[str, ...]  # answers to choose from by likelihood; empty: the answer is generated

    def load(self, folder: Path) -> list[Example]:
        """The examples in the order of the file, with their prompts."""

    def grade_all(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
        """Which texts are right answers? All at once, because some graders work in parallel."""

    def reference(self, example: Example) -> str:
        """A right answer."""


def json_rows(path: Path, fields: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, packed or not; each must have `fields`."""
    if not path.is_file():
        raise FredaError(f"there is no {path}; name the folder of the benchmarks with --data")
    rows = []
    with told_if_cut_short(path), open_file(File(path)) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FredaError(f"{path}:{number} is not JSON ({error}); get the file again") from None
            if not isinstance(row, dict):
                raise FredaError(f"{path}:{number} is no row of fields ({line[:40]!r}); get the file again")
            missing = next((field for field in fields if row.get(field) is None), None)
            if missing is not None:
                raise FredaError(f"{path}:{number} has no field {missing}; it has {', '.join(row)}")
            rows.append(row)
    return rows


def worked_examples(path: Path, template: str, count: int) -> str:
    """The first exemplars of a few-shot file, one after the other, each as `template` puts its fields."""
    try:
        samples = json.loads(path.read_text(encoding="utf-8"))["samples"][:count]
        return "".join(template.format_map(sample) for sample in samples)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FredaError(f"cannot read the worked examples in {path} ({error}); get the file again") from None


def check_rows(path: Path, rows: Sequence[object], expected: int) -> None:
    """A benchmark with rows missing gives another number under the same name."""
    if len(rows) != expected:
        raise FredaError(f"{path} has {len(rows)} rows, the benchmark {expected}; get the whole file")


def check_published(task: Task, examples: Sequence[Example]) -> None:
    """Refuse files with as many rows as the benchmark, but other questions, answers or exemplars."""
    found = checksum(examples)
    if not found.startswith(task.CHECKSUM):
        raise FredaError(
            f"the questions of {task.NAME} are not the published ones (checksum {found[:16]}, not {task.CHECKSUM}); "
            f"get the files again, or ask them as they are with --unpublished"
        )


def checksum(examples: Sequence[Example]) -> str:
    """SHA-256 of all prompts, answers and tests, in order: equal checksums ask the same and grade it alike."""
    digest = hashlib.sha256()
    for example in examples:
        tests = [example.row[name] for name in TESTS if name in example.row]
        digest.update(json.dumps([example.id, example.prompt, example.gold, *tests]).encode())
    return digest.hexdigest()
