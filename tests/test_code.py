"""Rows of the code benchmarks as programs: references pass, what is wrong does not."""

from __future__ import annotations

from typing import Any

import pytest

from freda.decode.request import cut_at_stop
from freda.eval.sandbox.run import Job, Limits, Verdict, run_many, run_program
from freda.eval.tasks import code
from freda.eval.tasks.code import FUNCTION_STOPS, humaneval_job, humanevalplus_job, mbpp_job
from freda.eval.tasks.task import Example
from tests.isolation import needs_namespaces

pytestmark = needs_namespaces
LIMITS = Limits(seconds=10.0, memory_mb=512)

DOUBLE = {
    "prompt": 'def twice(x: int) -> int:\n    """ Two times x. """\n',
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
    "test": "\nMETADATA = {}\n\ndef check(candidate):\n    assert candidate(2) == 4\n    assert candidate(-1) == -2\n",
}
HEAD = "from typing import List\n\n\ndef halves(xs: List[float]) -> List[float]:\n"
ROOTS = "def poly(xs, x):\n    return sum(c * x**i for i, c in enumerate(xs))\n\n\ndef find_zero(xs):\n"


def plus(prompt: str, name: str, solution: str, inputs: list[Any], atol: float = 0) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "entry_point": name,
        "canonical_solution": solution,
        "base_input": inputs[:1],
        "plus_input": inputs[1:],
        "atol": atol,
    }


HALVES = plus(HEAD, "halves", "    return [x / 2 for x in xs]\n", [[[1.0, 3.0]], [[]], [[0.1]]])
ZERO = plus(ROOTS, "find_zero", "    return -xs[0] / xs[1]\n", [[[1, 3]], [[-2, 7]]], 1e-4)
SQUARES = plus("def squares(xs):\n", "squares", "    return [x * x for x in xs]\n", [[[1, 2]], [[-3]]])


def reasons(programs: list[Job]) -> list[str]:
    return [verdict.reason for verdict in run_many(programs, LIMITS)]


def verdict_of(row: dict[str, Any], completion: str) -> Verdict:
    return run_program(humanevalplus_job(row, completion), LIMITS)


def test_humaneval() -> None:
    completions = [DOUBLE["canonical_solution"], "    return 4\n", "    return x +\n", ""]
    found = reasons([humaneval_job(DOUBLE, completion) for completion in completions])
    assert found[:2] == ["passed", "failed: AssertionError"]
    assert found[2].startswith("failed: SyntaxError")
    assert found[3].startswith("failed: AssertionError"), "the docstring alone is a function that returns None"


@pytest.mark.parametrize("row", [HALVES, ZERO, SQUARES], ids=lambda row: row["entry_point"])
def test_humaneval_plus_references(row: dict[str, Any]) -> None:
    assert verdict_of(row, row["canonical_solution"]).reason == "passed"
    assert verdict_of(row, "    return 7\n").reason.startswith("failed: AssertionError: input 0: 7 is not")


@pytest.mark.parametrize(
    ("row", "completion", "reason"),
    [
        (HALVES, "    return [x / 2 + 1e-7 for x in xs]\n", "passed"),
        (HALVES, "    return [x / 2 + 1e-4 for x in xs]\n", "failed: AssertionError: input 0: [0.5001, "),
        (HALVES, "    return [x / 2 + 1e-7 for x in xs] + [0.0] * (len(xs) == 1)\n", "failed: AssertionError: input 2"),
        (
            HALVES,
            "    return tuple(x / 2 for x in xs)\n",
            "failed: AssertionError: input 0: (0.5, 1.5) is not [0.5, 1.5]",
        ),
        (HALVES, "    return [x / 2 for x in xs] if xs else None\n", "failed: AssertionError: input 1: None is not []"),
        (HALVES, "    return [float('nan') for x in xs]\n", "failed: AssertionError: input 0"),
        (ZERO, "    return -xs[0] / xs[1] + 1e-5\n", "passed"),
        (ZERO, "    return -xs[0] / xs[1] + 1e-3\n", "failed: AssertionError: input 0"),
        (ZERO, "    return None\n", "failed: AssertionError: input 0: None is not"),
        (SQUARES, "    return [x * x + 1e-9 for x in xs]\n", "failed: AssertionError: input 0"),
        (SQUARES, "    out = []\n    while xs: out.append(xs.pop(0) ** 2)\n    return out\n", "passed"),
        (SQUARES, "    return [x**2 for x in xs]\nlist = len = zip = json = reference = oracle = None\n", "passed"),
        (SQUARES, "    return [x ** 2 for x in xs][:1]\n", "failed: AssertionError: input 0: [1] is not [1, 4]"),
    ],
)
def test_humaneval_plus_comparison(row: dict[str, Any], completion: str, reason: str) -> None:
    assert verdict_of(row, completion).reason.startswith(reason)


def test_mbpp() -> None:
    row = {
        "text": "Write a function to find the depth of a tree.",
        "code": "class Node:\r\n\tdef __init__(self): \r\n\t\tself.left = None\r\n"
        "def depth(n):\r\n\treturn 0 if n is None else 1 + depth(n.left)",
        "test_setup_code": "root = Node()\r\nroot.left = Node()",
        "test_list": ["assert depth(root) == 2", "assert depth(None) == 0"],
    }
    wrong = row["code"].replace("1 +", "2 *")  # type: ignore[attr-defined]
    programs = [mbpp_job(row, str(row["code"])), mbpp_job(row, wrong), mbpp_job(row, "depth = len")]
    assert reasons(programs)[:2] == ["passed", "failed: AssertionError"]
    assert reasons(programs[2:]) == ["failed: NameError: name 'Node' is not defined"]


def test_completions_are_cut_at_the_first_stop() -> None:
    text = "    return x\n\nif __name__:\n    print(1)\ndef g(): pass\n"
    assert cut_at_stop(text, FUNCTION_STOPS) == "    return x\n"
    assert cut_at_stop(text, ("\ndef",)) == text[: text.index("\ndef")]
    assert cut_at_stop("    return x", FUNCTION_STOPS) == "    return x" and cut_at_stop(text, ()) == text
    assert cut_at_stop("\ndef f", FUNCTION_STOPS) == ""


def test_the_same_program_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts by the clock are asked for again."""
    ran: list[Job] = []

    def run_many(jobs: list[Job], isolated: bool) -> list[Verdict]:
        ran.extend(jobs)
        return [Verdict("right" in job[0], "time out after 1 s" if "slow" in job[0] else "x", 0.0, "") for job in jobs]

    monkeypatch.setattr(code, "run_many", run_many)
    monkeypatch.setattr(code, "_KNOWN", {})
    examples, executed = (
        [Example(str(n), "", "", {}) for n in range(4)],
        code.Executed(lambda row, text: Job(text, "t")),
    )
    for _ in range(2):
        made = executed(examples, ["right", "slow", "right", "wrong"])
        assert [one.correct for one in made] == [True, False, True, False]
    assert [job.program for job in ran] == ["right", "slow", "wrong", "slow"]
    monkeypatch.setattr(code, "MOST_KNOWN", 2)
    executed(examples[:1], ["new"])
    assert list(code._KNOWN) == [Job("new", "t")]
