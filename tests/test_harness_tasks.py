"""lm-evaluation-harness asks what we ask, and comes to the same verdicts; no model has a part in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from freda.errors import FredaError
from freda.eval.tasks import TASKS
from freda.eval.tasks.task import Example
from tests.benchmarks import written
from tests.harness_tasks import HARNESS_TASKS, Asked
from tests.harness_tasks import ask as ask_lm

pytest.importorskip("lm_eval")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    with written(folder):
        yield folder


class Oracle:
    """Says what the test wants; `answer` makes a text, or a letter to prefer, of a question's number."""

    answer: Callable[[int], str]

    def generate_until(self, requests: Any) -> list[str]:
        return [self.answer(number) for number in range(len(requests))]

    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
        return [(float(request.args[1] == self.answer(number // 4)), True) for number, request in enumerate(requests)]

    def loglikelihood_rolling(self, requests: Any) -> list[float]:
        raise NotImplementedError


def ask(name: str, data: Path, answer: Callable[[int], str], examples: list[Example]) -> Asked:
    """What lm_eval says when a model answers so."""
    from lm_eval.api.model import LM

    return ask_lm(type("Told", (Oracle, LM), {"answer": staticmethod(answer)})(), name, data, examples)


@pytest.mark.skipif("FREDA_BENCHMARKS" not in os.environ, reason="FREDA_BENCHMARKS names no folder of published files")
@pytest.mark.parametrize("name", HARNESS_TASKS)
def test_prompts_of_the_published_files_are_ours(name: str) -> None:
    folder = Path(os.environ["FREDA_BENCHMARKS"])
    try:
        examples = TASKS[name].examples(folder)
    except FredaError as error:
        pytest.skip(str(error))
    found = ask(name, folder, lambda number: "", examples)  # before `data`, which makes the tasks expect other files
    assert found.prompts == [example.prompt for example in examples]


def test_every_task_of_ours_is_one_of_the_harness() -> None:
    assert HARNESS_TASKS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", HARNESS_TASKS)
def test_prompts_are_ours_byte_for_byte_and_references_are_right(name: str, data: Path) -> None:
    task, examples = TASKS[name], TASKS[name].examples(data)
    wrong = " Z" if task.choices else " Nobody knows."

    def answer(number: int) -> str:
        """Right where the number is odd; a wrong letter is another one than A, which would win a draw."""
        if number % 2 or (task.choices and examples[number].gold == "A"):
            return task.reference(examples[number])
        return wrong

    right = [bool(number % 2) or (bool(task.choices) and e.gold == "A") for number, e in enumerate(examples)]
    found = ask(name, data, answer, examples)
    assert found.prompts == [example.prompt for example in examples] and len(examples) > 1
    assert found.verdicts == right and 0 < sum(right) < len(right)
    assert found.accuracy == pytest.approx(sum(right) / len(right)), "every question counts once"


def test_a_limit_cuts_through_the_subjects(data: Path) -> None:
    for limit in (2, 4):
        examples = TASKS["mmlu"].examples(data, limit)
        assert ask("mmlu", data, lambda number: " A", examples).prompts == [one.prompt for one in examples]


NUMBERS = [  # with the gold 1,000 + n in place of @
    " It is so. The answer is @.",
    " The answer is $@.00.",
    " The answer is: @, I think. Or 8?",
    " The answer is 0@",
    " The answer is 8. No: the answer is @.",
    " The answer is @. The answer is 8.",
    " It is @",
    " the answer is @",
    " The answer is @.5.",
    " The answer is -@.",
    "",
    " The answer is @ or 9",
    " The answer is\n@.\n",
    " The answer is @apples. The answer is 1,2.",
    " So 12 = 7 and @.0",
    " The answer is ,@",
]


@pytest.mark.parametrize("name", ["gsm8k", "sums"])
def test_numbers_are_found_and_compared_as_ours(name: str, data: Path) -> None:
    task, examples = TASKS[name], TASKS[name].examples(data)
    texts = [text.replace("@", example.gold) for text, example in zip(NUMBERS, examples, strict=False)]
    found = ask(name, data, lambda number: texts[number], examples)
    ours = task.grade_all(examples, texts)
    assert found.verdicts == [one.correct for one in ours] and 2 < sum(found.verdicts) < len(texts) - 2
    if name == "gsm8k":
        flexible = sum(one.also["flexible"] for one in ours) / len(ours)
        assert found.metrics["exact_match,flexible-extract"] == pytest.approx(flexible) != found.accuracy


def test_mathematics_is_found_and_compared_as_ours(data: Path) -> None:
    examples = TASKS["math500"].examples(data)
    texts = [
        " The final answer is $0.5$. I hope not. The final answer is $3$.",
        " $\\boxed{32348}$",
        " $\\boxed{(-\\infty,3]}$ or $\\boxed{(-\\infty,3",  # the last one is not whole, so there is none
        " $\\boxed{1}$ no, $\\boxed{\\{2, 1\\}}$.",
        " Final Answer: the final answer is: $[2,5]$\n",
        " So we have 7",  # math-verify alone takes the last number
    ]
    found = ask("math500", data, lambda number: texts[number], examples)
    assert found.verdicts == [one.correct for one in TASKS["math500"].grade_all(examples, texts)]
    assert found.verdicts == [True, True, False, True, True, False]
    whole = found.metrics["math_verify,whole-text"]
    assert whole is not None and whole > found.accuracy
