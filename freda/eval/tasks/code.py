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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from freda.errors import require
from freda.eval.sandbox.run import Job, Verdict, check_ready, free_names, run_many
from freda.eval.tasks.task import Example, Graded, Task, json_rows

FUNCTION_STOPS = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")  # what follows the body of a function
MOST_KNOWN = 100_000  # verdicts kept, a few kilobytes each
EXEMPLARS, QUESTIONS = (2, 3, 4), range(11, 511)  # of MBPP
FUNCTION_FIELDS = ("task_id", "prompt", "canonical_solution", "entry_point")
PLUS_FIELDS = (*FUNCTION_FIELDS, "base_input", "plus_input", "atol")
MBPP_FIELDS = ("task_id", "text", "code", "test_list", "test_setup_code")
_KNOWN: dict[Job, Verdict] = {}

# The tests of HumanEval+, as in evalplus: the reference computes what is expected, and floats may differ by atol, or by
# 1e-6 where the row says 0. Inputs are parsed twice, since the reference may change them. One zero of a polynomial is
# as good as another, so find_zero is tested by its residual, which must be at most atol.
PLUS_TESTS = """
def check(candidate, oracle, inputs, entry_point, atol):
    import json

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

    wanted = [oracle[entry_point](*given) for given in json.loads(inputs)]
    for number, given in enumerate(json.loads(inputs)):
        out = candidate(*given)
        assert right(given, out, wanted[number]), f"input {number}: {out!r:.80} is not {wanted[number]!r:.80}"


oracle = dict(__name__="oracle")
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


@dataclass(frozen=True)
class Executed:
    """A `Task.grade_all` that runs in the sandbox what `job_of` makes of a row and a completion."""

    job_of: Callable[[Mapping[str, Any], str], Job]
    isolated: bool = True

    def __call__(self, examples: Sequence[Example], texts: Sequence[str]) -> list[Graded]:
        """The verdicts on all texts."""
        jobs = [self.job_of(example.row, text) for example, text in zip(examples, texts, strict=True)]
        verdicts = _verdicts(jobs, self.isolated)
        return [Graded(verdict.passed, verdict.reason, text) for verdict, text in zip(verdicts, texts, strict=True)]


def without_isolation(task: Task) -> Task:
    """A task that runs programs also where the kernel does not isolate them; other tasks as they are."""
    if not isinstance(task.grade_all, Executed):
        return task
    ready = functools.partial(check_ready, isolated=False)
    return replace(task, grade_all=replace(task.grade_all, isolated=False), check_ready=ready)


def _verdicts(jobs: Sequence[Job], isolated: bool) -> list[Verdict]:
    """Run every program once in this process: the settings of a sweep ask the same question a hundred times, and most
    answers are the same. Verdicts that depend on the clock are not kept."""
    new = [job for job in dict.fromkeys(jobs) if job not in _KNOWN]
    found = dict(zip(new, run_many(new, isolated=isolated), strict=True))
    found |= {job: _KNOWN[job] for job in jobs if job in _KNOWN}
    if len(_KNOWN) + len(new) > MOST_KNOWN:
        _KNOWN.clear()
    _KNOWN.update((job, found[job]) for job in new if not found[job].reason.startswith("time out"))
    return [found[job] for job in jobs]


def humaneval_job(row: Mapping[str, Any], completion: str) -> Job:
    """Prompt and completion; the row's test, called on the function in question. Other functions that the test uses, as
    encode_shift, are the prompt's own, so the reference brings them."""
    name, tests = row["entry_point"], f"{row['test']}\ncheck({row['entry_point']})\n"
    more = set(free_names(tests)) - {name}
    given = row["prompt"] + row["canonical_solution"] if more else ""
    return Job(row["prompt"] + completion, tests, (name,), given)


def humanevalplus_job(row: Mapping[str, Any], completion: str) -> Job:
    """Prompt and completion; a comparison with the reference on all inputs of the row."""
    inputs, name = json.dumps([*row["base_input"], *row["plus_input"]]), row["entry_point"]
    reference = row["prompt"] + row["canonical_solution"]
    call = f"exec({reference!r}, oracle)\ncheck({name}, oracle, {inputs!r}, {name!r}, {row['atol']!r})\n"
    return Job(row["prompt"] + completion, PLUS_TESTS + call, (name,))


def mbpp_job(row: Mapping[str, Any], completion: str) -> Job:
    """The completion, which is the whole program; the row's asserts.

    The set-up of rows 367 and 927, the only ones that have one, makes trees of the program's own class `Node`, so it
    comes after the program. Before it, as in other harnesses, these two references fail their own tests.
    """
    tests = "\n".join([row["test_setup_code"], *row["test_list"], ""])
    return Job(completion, tests, free_names(tests, row["code"]))  # row 126 asks for a function `sum`


HUMANEVAL = Task(
    name="humaneval",
    kind="coding",
    rows=164,
    checksum="1f089a3df8fcb544",
    stops=FUNCTION_STOPS,
    max_new_tokens=1024,
    load=functools.partial(load_functions, "humaneval/HumanEval.jsonl.gz", (*FUNCTION_FIELDS, "test")),
    grade_all=Executed(humaneval_job),
    check_ready=check_ready,
)
HUMANEVAL_PLUS = replace(
    HUMANEVAL,
    name="humaneval_plus",
    checksum="cfd6bda12614db7f",
    load=functools.partial(load_functions, "humanevalplus/HumanEvalPlus.jsonl.gz", PLUS_FIELDS),
    grade_all=Executed(humanevalplus_job),
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
    grade_all=Executed(mbpp_job),
    check_ready=check_ready,
)
