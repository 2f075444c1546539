"""The word problems: splits that share no sum, solutions that are right, and a grader that is not fooled."""

from __future__ import annotations

import collections
import hashlib
import itertools
import os
import re
import subprocess
import sys

import pytest

from freda.data import synthetic
from freda.data.synthetic import Item, Split, Sum, final_answer, grade, split_of
from freda.errors import FredaError
from tests.helpers import problems

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
EQUATION = re.compile(r"(\d+) ([+-]) (\d+) = (\d+)")


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def question_of(problem: Item) -> str:
    return problem.prompt.removeprefix("Q: ").removesuffix("\nA:")


def key_from_text(problem: Item) -> str:
    """The key, worked out from the words of the question alone."""
    start, *changes = numbers(question_of(problem))
    sentences = re.split(r"(?<=\.) ", question_of(problem))[1:-1]
    taken = [re.search(r"gives away|loses|sells|takes", sentence) is not None for sentence in sentences]
    added = sorted([start, *(number for number, minus in zip(changes, taken, strict=True) if not minus)])
    minus = sorted(number for number, minus in zip(changes, taken, strict=True) if minus)
    return "+".join(map(str, added)) + "".join(f"-{number}" for number in minus)


# -- splits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "max_number"), [(1, 30), (2, 12)])
def test_splits_share_no_sum_whatever_the_seed(steps: int, max_number: int) -> None:
    keys = {
        split: {
            key_from_text(problem)
            for seed in range(3)
            for problem in problems(split, 400, steps=steps, max_number=max_number, seed=seed)
        }
        for split in SPLITS
    }
    assert all(len(found) > 5 for found in keys.values())
    assert not keys["train"] & keys["validation"]
    assert not keys["train"] & keys["test"]
    assert not keys["validation"] & keys["test"]


def test_commuted_sums_are_one_key() -> None:
    assert Sum(12, (5,)).key == Sum(5, (12,)).key == "5+12"
    assert Sum(12, (5, -3)).key == Sum(5, (12, -3)).key == Sum(12, (-3, 5)).key == "5+12-3"
    assert Sum(12, (-5,)).key == "12-5"
    assert Sum(30, (-5, -3)).key == Sum(30, (-3, -5)).key


def test_the_split_of_a_sum_never_changes() -> None:
    # These are stored in nobody's files but in everybody's results: another value would leak test sums into training.
    known = {"12-5": "train", "5+12-3": "train", "23+45": "validation", "10+16": "validation", "53-25": "test"}
    assert {key: split_of(key) for key in known} == known


def test_splits_are_80_10_10() -> None:
    counts = collections.Counter(split_of(f"{a}+{b}") for a in range(400) for b in range(a, 400))
    shares = [counts[split] / counts.total() for split in SPLITS]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.005)  # five standard errors


# -- problems --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_solutions_are_right(steps: int) -> None:
    for problem in problems("train", 300, steps=steps, max_number=99, seed=1):
        equations = EQUATION.findall(problem.solution)
        assert len(equations) == steps
        total, *changes = numbers(question_of(problem))
        for (left, sign, right, result), change in zip(equations, changes, strict=True):
            assert sorted([int(left), int(right)]) == sorted([total, change])
            assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
            total = int(result)
        assert problem.solution.endswith(f" The answer is {total}.")
        assert problem.answer == str(total)
        assert problem.key == key_from_text(problem)
        assert all(2 <= number <= 99 for number in numbers(problem.document))
        assert grade(problem, problem.solution)


def test_document_is_prompt_and_solution() -> None:
    for problem in problems("train", 20, steps=1, max_number=9, seed=0):
        assert re.fullmatch(r"Q: .+\?\nA:", problem.prompt) and problem.document == problem.prompt + problem.solution
        assert re.fullmatch(r" .+ The answer is \d\.", problem.solution)


def test_a_question_has_several_solutions() -> None:
    solutions = collections.defaultdict(set)
    for problem in problems("train", 6000, steps=1, max_number=9, seed=0):
        name, things = question_of(problem).split()[0], re.search(r"\d+ (\w+)\.", question_of(problem))
        solutions[problem.key].add(
            problem.solution.replace(name, "NAME").replace(things[1] if things else "", "THINGS")
        )
    sums = [len(found) for key, found in solutions.items() if "+" in key and len(set(key.split("+"))) == 2]
    differences = [len(found) for key, found in solutions.items() if "-" in key]
    assert set(sums) == {6}  # three wordings, two orders
    assert set(differences) == {3}


def test_wordings_vary() -> None:
    made = problems("train", 2000, steps=1, max_number=99, seed=0)
    assert len({question_of(problem).split()[0] for problem in made}) >= 12
    assert len({re.sub(r"^\w+|\d+", "", question_of(problem)) for problem in made}) > 500


def test_fewer_problems_are_a_prefix_and_seeds_differ() -> None:
    many = problems("test", 50, steps=1, max_number=99, seed=3)
    assert problems("test", 20, steps=1, max_number=99, seed=3) == many[:20]
    assert problems("test", 50, steps=1, max_number=99, seed=4) != many


def test_same_problems_in_every_process() -> None:
    code = (
        "import hashlib; from tests.helpers import problems\n"
        "splits = ('train', 'validation', 'test')\n"
        "made = [p for split in splits for p in problems(split, 200, steps=2, max_number=50, seed=7)]\n"
        "print(hashlib.sha256(repr([tuple(p) for p in made]).encode()).hexdigest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_texts_of_this_version() -> None:
    """If you change the texts on purpose, raise `synthetic.VERSION` and put the new digest here."""
    made = [problem.document for split in SPLITS for problem in problems(split, 50, steps=2, max_number=99, seed=0)]
    digest = hashlib.sha256("\n".join(made).encode()).hexdigest()
    assert digest[:16] == "a19988dd78c02c9c"


def test_held_out_questions_are_distinct_until_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = problems("test", 2000, steps=1, max_number=9, seed=0)
    assert len({problem.key for problem in made}) < 10  # few sums ...
    assert len({question_of(problem) for problem in made}) == 2000  # ... in many wordings
    monkeypatch.setattr(synthetic, "PATIENCE", 100)
    more = problems("test", 7_000, steps=1, max_number=6, seed=0)  # more than there are
    assert 6_000 < len({question_of(problem) for problem in more}) < len(more) == 7_000


def test_impossible_problems_are_refused() -> None:
    with pytest.raises(FredaError, match=r"corpus.max_number is 4; use 5"):
        problems("train", 1, steps=1, max_number=4, seed=0)
    with pytest.raises(FredaError, match=r"corpus.steps is 0; use 1"):
        problems("train", 1, steps=0, max_number=9, seed=0)
    with pytest.raises(FredaError, match="up to 5 is in the test split; use a larger max_number"):
        problems("test", 1, steps=1, max_number=5, seed=0)  # five sums exist, none of them in this split


# -- grading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("23 + 45 = 68. The answer is 68.", 68),
        ("The answer is 68", 68),
        ("The answer is 68 shells.", 68),
        ("The answer is\n68.\nQ: Next", 68),
        ("The answer is 1,068.", 1068),
        ("The answer is 1,234,567, of course.", 1_234_567),
        ("The answer is -5.", -5),
        ("The answer is 5. No, wait. The answer is 6.", 6),
        ("", None),
        ("68", None),
        ("= 68. The answer", None),
        ("the answer: 68", None),
        ("The answer is", None),
        ("The answer is 68. The answer is", None),  # cut off: what counts is the last one
        ("The answer is unknown, maybe 68.", None),
        ("The answer is 68.5", None),
        ("The answer is 68,5", None),
        ("The answer is 1,23", None),
        ("The answer is 68th", None),
        ("The answer is 68The answer", None),
        ("The answer is " + "6" * 5000, None),  # more digits than int() takes
        ("The answer is " + "1,000" * 5000, None),
        ("The answer is ٦٨.", None),
    ],
)
def test_final_answer(text: str, answer: int | None) -> None:
    assert final_answer(text) == answer


def test_grade() -> None:
    problem = Item("Q: ?\nA:", " The answer is 68.", "68", "23+45", 1)
    assert grade(problem, " 23 + 45 = 68. The answer is 68.")
    assert not grade(problem, " 23 + 45 = 68. The answer is 69.")
    assert not grade(problem, " 23 + 45 = 68.")
    assert not grade(problem, "")


def test_sums_without_carry() -> None:
    made = problems("train", 400, steps=2, max_number=99, seed=0, carry=False)
    for left, sign, right, _ in (equation for problem in made for equation in EQUATION.findall(problem.solution)):
        columns = itertools.zip_longest(reversed(left), reversed(right), fillvalue="0")
        digits = [(int(a), int(b)) for a, b in columns]
        assert all(a + b <= 9 if sign == "+" else a >= b for a, b in digits), (left, sign, right)
    assert len({problem.key for problem in made}) > 300
    assert Sum(17, (5,)).carries and Sum(31, (-2,)).carries and not Sum(45, (-5, 12)).carries


def test_changes_can_be_kept_small() -> None:
    made = problems("train", 500, steps=2, max_number=99, seed=0, max_change=5)
    assert {number for problem in made for number in numbers(question_of(problem))[1:]} == {2, 3, 4, 5}
    assert max(int(problem.answer) for problem in made) > 60


def test_plain_solutions_are_determined_by_the_question() -> None:
    made = problems("train", 3000, steps=1, max_number=12, seed=0, varied=False)
    solutions = collections.defaultdict(set)
    for problem in made:
        solutions[re.sub(r"[A-Z]\w+|shells", "", question_of(problem)), problem.key].add(problem.solution)
        start, change = numbers(question_of(problem))
        assert problem.solution.lstrip().startswith((f"{start} + {change} =", f"{start} - {change} ="))
    assert all(len(found) == 1 for found in solutions.values())
