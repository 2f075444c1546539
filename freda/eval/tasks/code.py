"""HumanEval, HumanEval+ and MBPP: answers that are programs, run with their tests in the sandbox.

HumanEval, 0-shot, asks for the body of a Python function from its docstring. HumanEval+ asks the same with many more
inputs and compares outputs with the reference's. It is read from `HumanEvalPlus.jsonl.gz` (inputs and reference): the
other published form, with test code, has a broken test for HumanEval/32, which no answer can pass. MBPP, 3-shot, asks
for a short program from a sentence and its tests. As its authors have it, the questions are rows 11 to 510 of the
published file and the exemplars rows 2, 3 and 4.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from freda.errors import require
from freda.eval.tasks.sandbox import Verdict, run_many
from freda.eval.tasks.task import Example, GradeAll, Graded, Task, json_rows

FUNCTION_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # what follows the body of a function
MOST_KNOWN = 100_000  # verdicts kept, a few kilobytes each
EXEMPLARS, QUESTIONS = (2, 3, 4), range(11, 511)  # of MBPP
FUNCTION_FIELDS = ("task_id", "prompt", "canonical_solution", "entry_point")
PLUS_FIELDS = (*FUNCTION_FIELDS, "base_input", "plus_input", "atol")
MBPP_FIELDS = ("task_id", "text", "code", "test_list", "test_setup_code")
_KNOWN: dict[tuple[str, str], Verdict] = {}

# The tests of HumanEval+, as in evalplus: the reference computes what is expected (in a namespace of its own), and
# floats may differ by atol, or by 1e-6 where the row says 0. Builtins come from the module, since the program may use
# their names for its own; inputs are parsed twice, since functions change them. One zero of a polynomial is as good as
# another, so find_zero is tested by its residual, which must be at most atol.
PLUS_TESTS = """
def _freda_check(candidate, reference, inputs, entry_point, atol):
    import json
    from builtins import abs, all, dict, enumerate, exec, float, int, isinstance, len, list, tuple, type, zip

    def close(out, expected, allowed):
        if isinstance(expected, (list, tuple)):
            same = type(out) is type(expected) and len(out) == len(expected)
            return same and all([close(a, b, allowed) for a, b in zip(out, expected)])
        if out == expected or not isinstance(expected, (int, float)) or not isinstance(out, (int, float)):
            return out == expected
        return abs(out - expected) <= allowed + 1e-7 * abs(expected) or (out != out and expected != expected)

    def right(given, out, expected):
        if entry_point == "find_zero":
            return isinstance(out, (int, float)) and abs(oracle["poly"](*given, out)) <= atol
        parts = expected if isinstance(expected, (list, tuple)) else [expected]
        floats = len(parts) > 0 and all([isinstance(part, float) for part in parts])
        if atol or floats:
            return out == expected or close(out, expected, atol or 1e-6)
        return out == expected

    oracle = dict(__name__="oracle")
    exec(reference, oracle)
    wanted = [oracle[entry_point](*given) for given in json.loads(inputs)]
    for number, (given, kept) in enumerate(zip(json.loads(inputs), json.loads(inputs))):
        out = candidate(*given)
        assert right(kept, out, wanted[number]), f"input {number}: {out!r:.80} is not {wanted[number]!r:.80}"

"""


def load_functions(file: str, fields: Sequence[str], folder: Path, expected: int) -> list[Example]:
    """The prompts of HumanEval or HumanEval+ as published."""
    rows = json_rows(folder / file, fields, expected)
    return [Example(row["task_id"], row["prompt"], row["canonical_solution"], row) for row in rows]


def load_mbpp(folder: Path, expected: int) -> list[Example]:
    """The test questions of MBPP behind three exemplars."""
    path = folder / "mbpp" / "mbpp.jsonl"
    by_id = {row["task_id"]: row for row in json_rows(path, MBPP_FIELDS, expected)}
    missing = next((number for number in EXEMPLARS if number not in by_id), None)
    require(missing is None, f"{path} has no row with task_id {missing}, an exemplar; get the whole file")
    head = "".join(f"{_mbpp_prompt(by_id[number])}{by_id[number]['code']}\n[DONE]\n\n" for number in EXEMPLARS)
    chosen = [by_id[number] for number in QUESTIONS if number in by_id]
    return [Example(f"mbpp/{row['task_id']}", head + _mbpp_prompt(row), row["code"], row) for row in chosen]


def _mbpp_prompt(row: dict[str, Any]) -> str:
    tests = "\n".join(row["test_list"])
    return (
        f"You are an expert Python programmer, and here is your task: {row['text']} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    )


def executed(program_of: Callable[[Mapping[str, Any], str], tuple[str, str]]) -> GradeAll:
    """A `Task.grade_all` that runs in the sandbox what `program_of` makes of a row and a completion: program, tests."""

    def grade_all(examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
        verdicts = _verdicts([program_of(example.row, text) for example, text in zip(examples, texts, strict=True)])
        return [Graded(verdict.passed, verdict.reason, text) for verdict, text in zip(verdicts, texts, strict=True)]

    return grade_all


def _verdicts(programs: Sequence[tuple[str, str]]) -> list[Verdict]:
    """Run every program once in this process: the settings of a sweep ask the same question a hundred times, and most
    answers are the same. Verdicts that depend on the clock are not kept."""
    new = [program for program in dict.fromkeys(programs) if program not in _KNOWN]
    found = dict(zip(new, run_many(new), strict=True)) | {job: _KNOWN[job] for job in programs if job in _KNOWN}
    if len(_KNOWN) + len(new) > MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN.update((job, found[job]) for job in new if not found[job].reason.startswith("time out"))
    return [found[job] for job in programs]


def humaneval_program(row: Mapping[str, Any], completion: str) -> tuple[str, str]:
    """Prompt and completion; the row's test, called on the function in question."""
    return row["prompt"] + completion, f"{row['test']}\ncheck({row['entry_point']})\n"


def humanevalplus_program(row: Mapping[str, Any], completion: str) -> tuple[str, str]:
    """Prompt and completion; a comparison with the reference on all inputs of the row."""
    inputs, name = json.dumps([*row["base_input"], *row["plus_input"]]), row["entry_point"]
    reference = row["prompt"] + row["canonical_solution"]
    call = f"_freda_check({name}, {reference!r}, {inputs!r}, {name!r}, {row['atol']!r})\n"
    return row["prompt"] + completion, PLUS_TESTS + call


def mbpp_program(row: Mapping[str, Any], completion: str) -> tuple[str, str]:
    """The completion, which is the whole program; the row's asserts.

    The set-up of rows 367 and 927, the only ones that have one, makes trees of the program's own class `Node`, so it
    comes after the program. Before it, as in other harnesses, these two references fail their own tests.
    """
    return completion, "\n".join([row["test_setup_code"], *row["test_list"], ""])


HUMANEVAL = Task(
    name="humaneval",
    kind="coding",
    rows=164,
    checksum="1f089a3df8fcb544",
    stops=FUNCTION_STOPS,
    max_new_tokens=1024,
    load=functools.partial(load_functions, "humaneval/HumanEval.jsonl.gz", (*FUNCTION_FIELDS, "test")),
    grade_all=executed(humaneval_program),
)
HUMANEVAL_PLUS = replace(
    HUMANEVAL,
    name="humaneval_plus",
    checksum="cfd6bda12614db7f",
    load=functools.partial(load_functions, "humanevalplus/HumanEvalPlus.jsonl.gz", PLUS_FIELDS),
    grade_all=executed(humanevalplus_program),
)
MBPP = Task(
    name="mbpp",
    kind="coding",
    rows=974,
    checksum="2fef9268a8822aa8",
    shots=len(EXEMPLARS),
    stops=("[DONE]", "\nYou are"),
    max_new_tokens=512,
    load=load_mbpp,
    grade_all=executed(mbpp_program),
)
