"""What a benchmark is: a value that reads questions and grades answers, and knows no model.

`reference` gives a text that must be graded as right: `freda eval --self-check` tests the graders with it.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from freda.data.files import File, open_file, told_if_cut_short
from freda.errors import FredaError, require
from freda.files import located, parse_json, read_json

TESTS = ("entry_point", "test", "base_input", "plus_input", "atol", "test_setup_code", "test_list")  # run on answers
FIELDS: dict[str, Any] = {  # of published rows: what is no text
    **dict.fromkeys(("base_input", "plus_input", "test_list"), list),
    **{"task_id": str | int, "atol": int | float},
}
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


GradeAll = Callable[[Sequence[Example], Sequence[str]], list[Graded]]  # all at once: some graders run in parallel


@dataclass(frozen=True, kw_only=True)
class Task:
    """A benchmark: where its questions come from, how they are asked and how answers are graded."""

    name: str
    kind: Kind  # the panel of a figure that it belongs to
    rows: int  # in the published file; fewer or more are an error
    load: Callable[[Path, int], list[Example]]  # from a data folder and `rows`, in the order of the file
    grade_all: GradeAll
    reference: Callable[[Example], str] = lambda example: example.gold  # a right answer
    max_new_tokens: int = 1
    checksum: str = ""  # first digits of the published questions' checksum; empty where it is not known
    shots: int = 0
    stops: tuple[str, ...] = ()  # texts that end an answer
    choices: tuple[str, ...] = ()  # answers to choose from by likelihood; empty if the answer is generated
    check_ready: Callable[[], None] = lambda: None  # raises if what the grader needs is missing

    def examples(self, folder: Path, limit: int = 0, *, unpublished: bool = False) -> list[Example]:
        """The first `limit` questions in a folder, or all if it is 0; others than published only if `unpublished`."""
        self.check_ready()
        examples = self.load(folder, self.rows)
        found = checksum(examples)
        odd = f"the questions of {self.name} are not the published ones (checksum {found[:16]}, not {self.checksum})"
        hint = "get the files again, or evaluate on them as they are with --unpublished"
        require(unpublished or found.startswith(self.checksum), f"{odd}; {hint}")
        return examples[:limit] if limit else examples


def one_by_one(grade: Callable[[Example, str], Graded]) -> GradeAll:
    """A `Task.grade_all` that grades every text by itself."""
    return lambda examples, texts: [grade(*pair) for pair in zip(examples, texts, strict=True)]


def compared_with_gold(right: bool, answer: str, example: Example, also: Mapping[str, bool] = {}) -> Graded:
    """The verdict on an answer that was found in a text; a wrong one is shown beside the right one, both cut."""
    reason = "right" if right else f"{answer[:60]} is not {example.gold[:60]}"
    return Graded(right, reason, answer, also)


def checksum(examples: Sequence[Example]) -> str:
    """SHA-256 of all prompts, answers and tests, in order: equal checksums ask the same and grade it alike."""
    digest = hashlib.sha256()
    for example in examples:
        tests = [example.row[name] for name in TESTS if name in example.row]
        digest.update(json.dumps([example.id, example.prompt, example.gold, *tests]).encode())
    return digest.hexdigest()


def found(path: Path) -> Path:
    """The path of a benchmark's file or folder; an error that says how to get it if it is missing."""
    require(path.exists(), f"there is no {path}; get it with --download, or name the benchmarks' folder with --data")
    return path


def check_rows(path: Path, rows: Sequence[object], expected: int) -> None:
    """Refuse a benchmark with rows missing, which would give another number under the same name."""
    require(len(rows) == expected, f"{path} has {len(rows)} rows, the benchmark {expected}; get the whole file")


def json_rows(path: Path, fields: Sequence[str], expected: int | None = None) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file, compressed or not; each must have `fields`."""
    rows = []
    with told_if_cut_short(found(path)), open_file(File(path)) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                row = parse_json(line)
            except ValueError as error:
                raise FredaError(f"{path}:{number} is not JSON ({error}); get the file again") from None
            require(isinstance(row, dict), f"{path}:{number} is not an object ({line[:40]!r}); get the file again")
            missing = next((field for field in fields if row.get(field) is None), None)
            require(missing is None, f"{path}:{number} has no field {missing}; it has {', '.join(row)}")
            odd = next((field for field in fields if not isinstance(row[field], FIELDS.get(field, str))), "")
            require(not odd, f"{path}:{number} has {odd} {row.get(odd)!r:.60}, not as published; get the file again")
            rows.append(row)
    if expected is not None:
        check_rows(path, rows, expected)
    return rows


def csv_rows(path: Path) -> list[list[str]]:
    """The lines of a CSV file that are not blank."""
    try:
        with open(found(path), encoding="utf-8", newline="") as file:
            return [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FredaError(f"cannot read {path} ({error}); get the file again") from None


def exemplars(path: Path, template: str, count: int) -> str:
    """The first exemplars of a few-shot file, one after the other, each as `template` puts its fields."""
    with located(found(path)):
        content = read_json(path)
    try:
        return "".join(template.format_map(sample) for sample in content["samples"][:count])
    except (KeyError, TypeError) as error:
        raise FredaError(f"cannot read the exemplars in {path} ({error}); get the file again") from None
