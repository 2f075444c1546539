"""lm-evaluation-harness asks what we ask, and comes to the same verdicts; no model has a part in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from freda.eval.harness_tasks import HARNESS_TASKS
from freda.methods.config import MethodConfig

from freda.decode.config import DecodeConfig
from freda.eval import harness
from freda.eval.harness import Answerer, run_task
from freda.eval.tasks import TASKS, gsm8k
from tests.benchmarks import written

pytest.importorskip("lm_eval")

SHORT = DecodeConfig(max_new_tokens=24, passes=2, threshold=0.3)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("benchmarks")
    with written(folder):
        yield folder


class Oracle(Answerer):
    """Says what the test limits; `answer` makes a text, or a letter to prefer, of a question's number."""

    answer: Callable[[int], str]

    def generate_until(self, requests: Any) -> list[str]:
        return [self.answer(number) for number in range(len(requests))]

    def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
        return [(float(request.args[1] == self.answer(number // 4)), True) for number, request in enumerate(requests)]


def ask(
    name: str, data: Path, place: Path, answer: Callable[[int], str], monkeypatch: pytest.MonkeyPatch, limit: int = 0
) -> tuple[dict[str, Any], list[bool]]:
    """What run_task says when a model answers so, and its verdict on every question."""
    from lm_eval.api.model import LM

    verdicts: list[bool] = []
    samples_of = harness._samples

    def kept(*arguments: Any) -> Any:
        samples = samples_of(*arguments)
        verdicts.extend(sample["correct"] for sample in samples)
        return samples

    oracle = type("Asked", (Oracle, LM), {"answer": staticmethod(answer)})
    monkeypatch.setattr(harness, "make_lm", lambda *arguments: oracle(*arguments))
    monkeypatch.setattr(harness, "_samples", kept)
    monkeypatch.setattr(harness, "about_model", lambda loaded: {"model": "none", "dtype": "none"})
    examples = TASKS[name].load(data)[: limit or None]
    loaded = SimpleNamespace(method=MethodConfig(name="self-refine"))
    found = run_task(loaded, name, examples, place, data=data, settings=SHORT)  # type: ignore[arg-type]
    return found, verdicts


def test_every_task_of_ours_is_one_of_the_harness() -> None:
    assert HARNESS_TASKS.keys() == TASKS.keys()


@pytest.mark.parametrize("name", HARNESS_TASKS)
def test_prompts_are_ours_byte_for_byte_and_references_are_right(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, examples = TASKS[name], TASKS[name].load(data)
    wrong = " Z" if task.CHOICES else " Nobody knows."

    def answer(number: int) -> str:
        """Right where the number is odd; a wrong letter is another one than A, which would win a draw."""
        if number % 2 or (task.CHOICES and examples[number].gold == "A"):
            return task.reference(examples[number])
        return wrong

    right = [bool(number % 2) or (bool(task.CHOICES) and e.gold == "A") for number, e in enumerate(examples)]
    found, verdicts = ask(name, data, tmp_path / name, answer, monkeypatch)
    assert found["prompts_equal"] == found["n"] == len(examples) > 1
    assert verdicts == right and 0 < sum(right) < len(right)
    assert found["accuracy"] == pytest.approx(sum(right) / len(right)), "every question counts once"
    assert json.loads((tmp_path / name / "harness.json").read_text()) == found


def test_a_limit_cuts_through_the_subjects(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in (2, 4):
        found, _ = ask("mmlu", data, tmp_path, lambda number: " A", monkeypatch, limit)
        assert found["prompts_equal"] == found["n"] == limit


def test_prompts_that_differ_are_counted(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = gsm8k.load
    monkeypatch.setattr(gsm8k, "load", lambda folder: [e._replace(prompt=e.prompt + " ") for e in original(folder)])
    assert ask("gsm8k", data, tmp_path, str, monkeypatch)[0]["prompts_equal"] == 0


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
def test_numbers_are_found_and_compared_as_ours(
    name: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, examples = TASKS[name], TASKS[name].load(data)
    texts = [text.replace("@", example.gold) for text, example in zip(NUMBERS, examples, strict=False)]
    found, verdicts = ask(name, data, tmp_path, lambda number: texts[number], monkeypatch)
    ours = task.grade_all(examples, texts)
    assert verdicts == [one.correct for one in ours] and 2 < sum(verdicts) < len(verdicts) - 2
    if name == "gsm8k":
        flexible = sum(one.also["flexible"] for one in ours) / len(ours)
        assert found["metrics"]["exact_match,flexible-extract"] == pytest.approx(flexible) != found["accuracy"]


def test_mathematics_is_found_and_compared_as_ours(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = TASKS["math500"].load(data)
    texts = [
        " The final answer is $0.5$. I hope not. The final answer is $3$.",
        " $\\boxed{32348}$",
        " $\\boxed{(-\\infty,3]}$ or $\\boxed{(-\\infty,3",  # the last one is not whole, so there is none
        " $\\boxed{1}$ no, $\\boxed{\\{2, 1\\}}$.",
        " Final Answer: the final answer is: $[2,5]$\n",
        " So we have 7",  # math-verify alone takes the last number
    ]
    found, verdicts = ask("math500", data, tmp_path, lambda number: texts[number], monkeypatch)
    assert verdicts == [one.correct for one in TASKS["math500"].grade_all(examples, texts)]
    assert verdicts == [True, True, False, True, True, False]
    assert found["metrics"]["math_verify,whole-text"] > found["accuracy"]
